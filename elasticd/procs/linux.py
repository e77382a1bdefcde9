"""Linux facts about processes that the standard library lacks.

Standard library only, because the warden uses this module: the warden starts fast, and no broken package
stops its work. ``started_at`` has a second reason: psutil's ``create_time`` changes with the machine's clock.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Container, Iterable, Iterator, Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_READ_BYTES = 1 << 13
_FLAGS = 6  # of the fields that ``stat_of`` returns
_PF_EXITING = 0x4

TAKING_DOWN_S = 60.0  # the time to wait for a process that is exiting (40 GB of memory, a GPU)

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int | bytes) -> None:
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def adopt_orphans() -> None:
    """Make this process the parent of the orphans among its descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel SIGKILL this process when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def hide_memory() -> None:
    """Hide this process's memory, environment and open files from other processes of this user, and prevent
    tracing, except by processes with CAP_SYS_PTRACE. Forked children are hidden too, until they run a
    program. A hidden process leaves no core dump."""
    _prctl(_PR_SET_DUMPABLE, 0)


def name_process(name: str) -> None:
    """Set the name that ``ps`` and ``top`` show; at most 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode())


def steady_now() -> float:
    """Return the seconds since boot, including suspended time. All processes of a host share this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def is_ready(fd: int, how: int, timeout_s: float | None = None) -> bool:
    """Return whether ``fd`` becomes readable or writable (``select.POLLIN``, ``POLLOUT``) within the time.
    Unlike ``select.select``, it takes descriptors above 1,023."""
    poll = select.poll()
    poll.register(fd, how)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)  # ``open`` takes longer, and reports of deaths wait for this function
    try:
        return b"".join(iter(lambda: os.read(fd, _READ_BYTES), b""))
    finally:
        os.close(fd)


def children(pid: int) -> list[int]:
    """Return the children of a process, including unreaped ones; none if the process has exited."""
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        try:
            found += map(int, _read(f"/proc/{pid}/task/{task}/children").split())
        except FileNotFoundError:
            if not os.path.exists("/proc/self/task"):
                continue
            if os.path.exists(f"/proc/{pid}/task/{task}"):  # a kernel without CONFIG_PROC_CHILDREN
                return _children_by_scan(pid)
        except OSError:
            continue
    return found


def descendants(pid: int) -> Iterator[int]:
    """Yield the children of a process, their children, and so on."""
    todo = children(pid)
    while todo:
        child = todo.pop()
        yield child
        todo += children(child)


def _children_by_scan(parent: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            fields = stat_of(int(entry))
            if fields and int(fields[1]) == parent:
                found.append(int(entry))
    return found


def stat_of(pid: int) -> list[bytes]:
    """Return the fields of /proc/pid/stat after the command name: state, ppid, pgrp, session, … Empty if the
    process, or the thread, is gone."""
    try:
        return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except OSError:
        return []


def status_of(pid: int, task: int | None = None) -> dict[bytes, bytes]:
    """Return the fields of /proc/pid/status of a process's main thread, or of another thread; empty if the
    thread is gone."""
    try:
        lines = _read(f"/proc/{pid}/task/{task or pid}/status").split(b"\n")
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(b":") for line in lines)}


def is_exiting(stat: Sequence[bytes]) -> bool:
    """Return whether the kernel has begun to take down the process, or the thread, that has these fields of
    ``stat_of``."""
    return bool(stat) and bool(int(stat[_FLAGS]) & _PF_EXITING)


def session_of(pid: int) -> int:
    """Return the session of a process, or of a zombie; 0 if the process does not exist."""
    fields = stat_of(pid)
    return int(fields[3]) if len(fields) > 3 else 0


def started_at(pid: int) -> int:
    """Return when a process started, in clock ticks since boot, to recognise a reused pid; 0 if the process
    does not exist or is a zombie."""
    fields = stat_of(pid)
    return int(fields[19]) if len(fields) > 19 and fields[0] not in (b"Z", b"X") else 0


def was_started_with(pid: int, variables: Iterable[str]) -> bool:
    """Return whether one of these ``NAME=value`` was in the environment with which a process started its
    program."""
    try:
        environ = _read(f"/proc/{pid}/environ").split(b"\0")
    except OSError:
        return False
    return any(os.fsencode(variable) in environ for variable in variables)


def came_from(pid: int, sessions: Container[int], variables: Iterable[str]) -> bool:
    """Return whether a process is in one of these sessions, or was started with one of these
    ``NAME=value``."""
    return session_of(pid) in sessions or was_started_with(pid, variables)


def is_resource_tracker(pid: int) -> bool:
    """Return whether a process is the resource tracker of multiprocessing or joblib, or is in the middle of
    execve and may become one. The tracker ends after all users of its pipe have exited, and removes the
    shared memory and semaphores that they left.

    In the middle of execve a process has no command line yet, and the process that started it goes on
    already. On a busy machine this takes many milliseconds.
    """
    try:
        command = _read(f"/proc/{pid}/cmdline")
    except OSError:
        return False
    if not command:
        stat = stat_of(pid)
        return bool(stat) and not is_exiting(stat)
    return b"resource_tracker import main" in command


def kill(pid: int, signal_number: int) -> None:
    """Send a signal. A process that has exited, or belongs to another user, is ignored."""
    try:
        os.kill(pid, signal_number)
    except (ProcessLookupError, PermissionError):
        pass


def kill_group(pid: int, signal_number: int) -> None:
    """Send a signal to a process group, as ``kill`` does."""
    try:
        os.killpg(pid, signal_number)
    except (ProcessLookupError, PermissionError):
        pass


def kill_tree(pid: int) -> None:
    """SIGKILL a process and its present descendants.

    Processes that are forked meanwhile become orphans; the reaper that adopts them kills them later.
    """
    below = children(pid)
    kill(pid, signal.SIGKILL)
    for child in below:
        kill_tree(child)
