"""The state of a process as the kernel sees it: cheap to read, also if the process does not respond.

Read from /proc: psutil reports neither how often each thread has waited nor where in the kernel it waits.
"""

from __future__ import annotations

import os
from itertools import islice

from elasticd.core.hang.judging import ProcessState
from elasticd.core.hang.standstill import Vitals
from elasticd.procs.linux import descendants, stat_of, status_of

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_DESCENDANTS_MAX = 256


def vitals(pid: int) -> Vitals:
    fields = stat_of(pid)
    if not fields:
        return Vitals(ProcessState.GONE, 0.0)
    cpu_s = _cpu_s(fields) + sum(_cpu_s(stat_of(p)) for p in islice(descendants(pid), _DESCENDANTS_MAX))
    wakes = {task: int(status_of(pid, task).get(b"voluntary_ctxt_switches", 0)) for task in _tasks(pid)}
    return Vitals(_state(fields[0]), cpu_s, wakes.get(pid, 0), sum(wakes.values()))


def _cpu_s(fields: list[bytes]) -> float:
    return sum(map(int, fields[11:15])) * _TICK_S if len(fields) > 14 else 0.0


def _state(letter: bytes) -> ProcessState:
    try:
        return ProcessState(letter.decode())
    except ValueError:  # a state of a kernel thread or of a newer kernel
        return ProcessState.SLEEPING


def thread_report(pid: int) -> str:
    """Return one line per thread: its number, name, state, and where in the kernel it waits."""
    lines = []
    for task in _tasks(pid):
        base = f"/proc/{pid}/task/{task}"
        state = status_of(pid, task).get(b"State", b"gone").decode()
        lines.append(f"{task} {_read(f'{base}/comm')}: {state}, waits in {_read(f'{base}/wchan') or '?'}")
    return "\n".join(lines) + "\n"


def _tasks(pid: int) -> list[int]:
    try:
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
