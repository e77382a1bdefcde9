"""Memory of huge pages where there is such, and of any kind where not."""

from __future__ import annotations

import os

import pytest

from elasticd.checkpoint import huge_pages, shared_memory
from elasticd.checkpoint.shared_memory import Memory

SIZE = 5 << 20


def used(memory: Memory) -> None:
    """It is there to be written and, elsewhere, read."""
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
    monkeypatch.setattr(shared_memory.huge_pages, "make_file", lambda: pytest.fail("it was asked for"))
    Memory.make(4096)
