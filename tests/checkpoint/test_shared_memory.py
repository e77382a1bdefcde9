"""How much memory a container may have, and memory of huge pages where the kernel has them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticd.checkpoint import huge_pages, shared_memory
from elasticd.checkpoint.shared_memory import Memory, available


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.fixture
def two(tmp_path: Path) -> Path:
    group(tmp_path, memory__current=0, memory__max=1 << 62, memory__stat="anon 5")
    group(
        tmp_path / "pod",
        memory__current=9000,
        memory__max=10_000,
        memory__stat="inactive_file 300\nshmem 8000",
    )
    group(tmp_path / "pod/main", memory__current=8000, memory__max="max", memory__stat="inactive_file 300")
    return tmp_path


def test_available_memory_is_the_least_that_any_container_around_has_left_with_its_page_cache(two):
    assert available("0::/pod/main\n", two) == 1300
    (two / "pod/main/memory.max").write_text("8100\n")
    assert available("0::/pod/main\n", two) == 400
    (two / "pod/main/memory.max").write_text("7000\n")  # lowered below the usage
    assert available("0::/pod/main\n", two) == 0


def test_version_1_counts_too(tmp_path):
    stat = "inactive_file 1\ntotal_inactive_file 300\ntotal_active_file 20"
    files = {"memory__limit_in_bytes": 10_000, "memory__usage_in_bytes": 9000, "memory__stat": stat}
    group(tmp_path / "memory", **files)
    assert available("5:cpu:/x\n4:memory:/not/seen/from/here\n0::/\n", tmp_path) == 1320


def test_without_a_limit_it_is_the_machine_s(tmp_path, monkeypatch):
    assert available() > 1 << 20
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=77))
    group(tmp_path, memory__max="max")
    assert available("0::/\n", tmp_path) == 77


@pytest.mark.parametrize(("askers", "share"), [(8, 0.12), (8, 0.25), (64, 0.015), (64, 0.1)])
def test_concurrent_requests_together_stay_below_the_limit(monkeypatch, askers, share):
    """All processes see the same before each part, and take memory at the same instant."""
    limit, taken = 16 << 30, 0

    def take(fd: int, at: int, length: int) -> None:
        nonlocal taken
        taken += askers * length
        assert taken <= limit, "somebody would have been killed"

    monkeypatch.setattr(os, "posix_fallocate", take)
    monkeypatch.setattr(shared_memory, "available", lambda: limit - taken)
    size = int(limit * share)
    if askers * share < 1:
        shared_memory._set_aside(-1, size)
        assert taken == askers * size
    else:
        with pytest.raises(OSError, match="bytes are available"):
            shared_memory._set_aside(-1, size)


# ------------------------------------------------------------ huge pages

SIZE = 5 << 20


def used(memory: Memory) -> None:
    """Check that the memory can be written here and read in another process."""
    memory.view[:] = b"x" * SIZE
    assert os.stat(memory.fd).st_size == SIZE
    other = Memory(os.dup(memory.fd), SIZE, writable=False)
    assert bytes(other.view) == b"x" * SIZE
    assert os.pread(memory.fd, 10, SIZE - 5) == b"xxxxx"


@pytest.mark.parametrize("ask", [huge_pages._mount, huge_pages._ask_for_one], ids=["ours", "a helper's"])
def test_a_mount_that_is_nowhere_holds_files_until_they_are_closed(ask):
    try:
        mount = ask()
    except OSError as error:
        pytest.skip(f"this kernel lends none to us: {error.strerror}")
    if mount is None:
        pytest.skip("this kernel lends none to anybody")
    fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=mount)
    os.close(mount)
    os.posix_fallocate(fd, 0, SIZE)
    used(Memory(fd, SIZE, writable=True))
    with open("/proc/self/mounts") as mounts:
        assert "elasticd" not in mounts.read()


@pytest.mark.parametrize("lent", [True, False])
def test_memory_is_made_of_what_there_is(monkeypatch, lent):
    if not lent:
        monkeypatch.setattr(huge_pages, "_mount_of", lambda _: None)
    used(Memory.make(SIZE))


def test_small_memory_takes_no_huge_page(monkeypatch):
    monkeypatch.setattr(huge_pages, "make_file", lambda: pytest.fail("it was asked for"))
    Memory.make(4096)
