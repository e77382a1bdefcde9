"""Memory and processor time of a process and its descendants, from Linux's /proc. Standard library only."""

from __future__ import annotations

import os
from dataclasses import dataclass

from elasticd.procs.linux import children

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """``cpu_s``: user and system time, including descendants that have ended."""

    resident_bytes: int
    cpu_s: float


def usage(pid: int) -> Usage | None:
    """Return the usage of a process and its descendants; None if the process is gone."""
    own = _own(pid)
    if own is None:
        return None
    total, todo = own, children(pid)
    while todo:
        child = todo.pop()
        if (its := _own(child)) is not None:
            total = Usage(total.resident_bytes + its.resident_bytes, total.cpu_s + its.cpu_s)
            todo += children(child)
    return total


def own_usage() -> Usage:
    """Return the usage of this process, without its children."""
    times = os.times()
    mine = _own(os.getpid())
    return Usage(mine.resident_bytes if mine else 0, times.user + times.system)


def _own(pid: int) -> Usage | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    # Fields 14 to 17 (times) and 24 (resident pages) of proc(5); this list starts at field 3.
    ticks = sum(int(field) for field in fields[11:15])
    return Usage(int(fields[21]) * _PAGE_BYTES, ticks / _TICKS_PER_S)
