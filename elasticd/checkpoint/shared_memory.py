"""Shared memory that holds a shard, allocated within the memory limits of the machine and its containers."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from elasticd.checkpoint import huge_pages
from elasticd.control_groups import ROOT, control_groups

_HUGE: Final = 2 << 20  # bytes of a huge page
_ASKERS_MAX: Final = 64  # processes that may allocate memory of one container at the same time
# Memory in the page cache, which the kernel frees under pressure.
_RECLAIMED: Final = ("inactive_file", "active_file")
# By version of control groups: the file with the limit, and the file with the usage.
_FILES: Final = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}


class Memory:
    """Shared memory that holds a shard. The memory outlives the process that filled it while another process
    maps it, and is freed with the last mapping. It has no file name, so it cannot be left behind."""

    def __init__(self, fd: int, size: int, *, writable: bool) -> None:
        self.fd = fd
        self.size = size
        protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if writable else 0)  # allocate the pages now
        self.map = mmap.mmap(fd, max(size, 1), flags=flags, prot=protection)
        self.view = memoryview(self.map)[:size]

    @classmethod
    def make(cls, size: int) -> Memory:
        """Allocate ``size`` bytes. Raises OSError if there is not enough memory."""
        _require(size)
        fd = huge_pages.make_file() if size >= _HUGE else None
        if fd is None:
            fd = os.memfd_create("elasticd-shard", os.MFD_CLOEXEC)
        try:
            _set_aside(fd, max(size, 1))
            return cls(fd, size, writable=True)
        except BaseException:
            os.close(fd)
            raise

    def __del__(self) -> None:  # a memoryview that is still in use keeps the mapping alive
        if hasattr(self, "map"):
            os.close(self.fd)


def _set_aside(fd: int, size: int) -> None:
    """Allocate ``size`` bytes for the file, in parts: other processes allocate at the same time, and the
    kernel kills a process that exceeds its container's limit. Raises OSError."""
    at = 0
    while at < size:
        part = max(_HUGE, _require(size - at) // _ASKERS_MAX // _HUGE * _HUGE)
        os.posix_fallocate(fd, at, min(part, size - at))
        at += part


def _require(size: int) -> int:
    """Check that ``size`` bytes are available, with a margin for other processes that allocate at the same
    time. Return the bytes that remain. Raises OSError."""
    there = available()
    if size + min(size, _ASKERS_MAX * _HUGE) > there:
        raise OSError(errno.ENOMEM, f"only {there} bytes are available")
    return there - size


def available(groups: str | None = None, root: Path = ROOT) -> int:
    """Return the bytes that can be allocated without swapping and without the out-of-memory killer.
    ``groups``, ``root``: see ``control_groups``."""
    of_machine: int = psutil.virtual_memory().available
    return max(0, min([of_machine, *_of_groups(groups, root)]))


def _of_groups(groups: str | None, root: Path) -> Iterator[int]:
    """Yield the bytes left in each control group that has a limit, parent groups included."""
    for version, group in control_groups("memory", groups, root):
        total = "" if version == 2 else "total_"
        limit, usage = _FILES[version]
        try:
            most = (group / limit).read_text().strip()
            if most != "max":
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                freed = sum(int(stat.get(total + kind, 0)) for kind in _RECLAIMED)
                yield int(most) - int((group / usage).read_text()) + freed
        except (OSError, ValueError):
            continue
