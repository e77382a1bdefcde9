"""What memory there is to be had where a container may not have all of it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticd.checkpoint import shared_memory
from elasticd.checkpoint.shared_memory import available


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


def test_it_is_what_the_container_or_any_around_it_has_left_and_what_was_only_read_from_disk(two):
    assert available("0::/pod/main\n", two) == 1300
    (two / "pod/main/memory.max").write_text("8100\n")
    assert available("0::/pod/main\n", two) == 400
    (two / "pod/main/memory.max").write_text("7000\n")  # it was lowered since
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
def test_those_who_ask_at_one_instant_pass_no_limit_together(monkeypatch, askers, share):
    """All see the same before each part, and take it at once."""
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
