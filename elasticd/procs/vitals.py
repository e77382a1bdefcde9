"""The state of a process as the kernel sees it: cheap to read, also if the process does not respond.

Read from /proc: psutil reports neither how often each thread has waited nor where in the kernel it waits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import islice

from elasticd.core.hang.judging import ProcessState
from elasticd.core.hang.standstill import Vitals
from elasticd.procs.linux import descendants, stat_of, status_of

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_DESCENDANTS_MAX = 256
_GLOO_LOOP = b"gloo_tcp_loop"  # wakes up a hundred times a second, also if nothing comes


def vitals(pid: int) -> Vitals:
    """Return the figures of a process now. Gloo's event loops, of which each gloo group has one, do not count
    among the threads that wake up."""
    fields = stat_of(pid)
    if not fields:
        return Vitals(ProcessState.GONE, 0.0)
    cpu_s = _cpu_s(fields) + sum(_cpu_s(stat_of(p)) for p in islice(descendants(pid), _DESCENDANTS_MAX))
    threads = {task: status_of(pid, task) for task in _tasks(pid)}
    wakes = {task: _wakes(thread) for task, thread in threads.items() if thread.get(b"Name") != _GLOO_LOOP}
    return Vitals(_state(fields[0]), cpu_s, wakes.get(pid, 0), sum(wakes.values()))


def _wakes(status: Mapping[bytes, bytes]) -> int:
    return int(status.get(b"voluntary_ctxt_switches", 0))


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
