"""Memory and processor time of a process and its descendants, and the time lost to processor quotas.

``linux.descendants`` finds the descendants. psutil's ``children(recursive=True)`` reads the files of all
processes of the machine: with 170 processes it takes 3 ms for each worker, ``linux.descendants`` 0.03 ms.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from elasticd.control_groups import ROOT, control_groups
from elasticd.procs.linux import descendants


@dataclass(frozen=True, slots=True)
class Usage:
    """The memory and processor time of processes. ``cpu_s``: user and system time, including descendants that
    have ended."""

    resident_bytes: int
    cpu_s: float


def usage(pid: int) -> Usage | None:
    """Return the usage of a process and its descendants; None if the process has exited."""
    own = _own(pid)
    if own is None:
        return None
    found = [own, *filter(None, map(_own, descendants(pid)))]
    return Usage(sum(one.resident_bytes for one in found), sum(one.cpu_s for one in found))


def own_usage() -> Usage:
    """Return the usage of this process, without its children."""
    times = os.times()
    mine = _own(os.getpid())
    return Usage(mine.resident_bytes if mine else 0, times.user + times.system)


def _own(pid: int) -> Usage | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            reaped_s = times.children_user + times.children_system
            return Usage(process.memory_info().rss, times.user + times.system + reaped_s)
    except psutil.Error:
        return None


def memory_limit(groups: str | None = None, root: Path = ROOT) -> int:
    """Return the bytes of memory that this process's control groups and their parents may use; at most the
    machine's memory. ``groups``, ``root``: see ``control_groups``."""
    limits = _of_groups("memory", "memory.max", "memory.limit_in_bytes", groups, root)
    of_machine: int = psutil.virtual_memory().total
    return min([of_machine, *(int(most) for most in limits if most.strip().isdigit())])


def throttled_s(groups: str | None = None, root: Path = ROOT) -> float:
    """Return for how many seconds processor quotas have stopped processes in this process's control groups
    and their parents, summed over processors. ``groups``, ``root``: see ``control_groups``."""
    found = _of_groups("cpu", "cpu.stat", "cpu.stat", groups, root)
    return sum(int(time) * _UNIT_S[kind] for text in found for kind, time in _THROTTLED.findall(text))


_UNIT_S = {"usec": 1e-6, "time": 1e-9}  # in version 2 and in version 1
_THROTTLED = re.compile(r"^throttled_(usec|time) ([0-9]+)$", re.MULTILINE)


def _of_groups(controller: str, name: str, name_before: str, groups: str | None, root: Path) -> Iterator[str]:
    """Yield the content of a file of each control group of this process, and of their parents. ``name``: the
    file's name; ``name_before``: in version 1. ``groups``, ``root``: see ``control_groups``."""
    for version, group in control_groups(controller, groups, root):
        with suppress(OSError, UnicodeError):
            yield (group / (name if version == 2 else name_before)).read_text()
