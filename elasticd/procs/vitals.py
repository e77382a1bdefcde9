"""The state of a process as the kernel sees it: cheap to read, also if the process does not respond.

Read from /proc: psutil reports neither how often each thread has waited nor where in the kernel it waits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from elasticd.core.hang.judging import ProcessState
from elasticd.core.hang.standstill import Vitals
from elasticd.procs.linux import children, stat_of

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_DESCENDANTS_MAX = 256


def vitals(pid: int) -> Vitals:
    fields = stat_of(pid)
    if not fields:
        return Vitals(ProcessState.GONE, 0.0)
    cpu_s = _cpu_s(fields) + sum(_cpu_s(stat_of(p)) for p in _below(pid))
    wakes = {task: _wakes(f"/proc/{pid}/task/{task}/status") for task in _tasks(pid)}
    return Vitals(_state(fields[0]), cpu_s, wakes.get(pid, 0), sum(wakes.values()))


def _below(pid: int) -> Iterable[int]:
    seen = 0
    todo = children(pid)
    while todo and seen < _DESCENDANTS_MAX:
        child = todo.pop()
        seen += 1
        yield child
        todo += children(child)


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
        state = " ".join(_line(f"{base}/status", "State").split()) or "gone"
        lines.append(f"{task} {_read(f'{base}/comm')}: {state}, waits in {_read(f'{base}/wchan') or '?'}")
    return "\n".join(lines) + "\n"


def _tasks(pid: int) -> list[int]:
    try:
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return []


def _wakes(status: str) -> int:
    return int(_line(status, "voluntary_ctxt_switches") or 0)


def _line(path: str, name: str) -> str:
    return next((v for k, _, v in (ln.partition(":") for ln in _read(path).splitlines()) if k == name), "")


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
