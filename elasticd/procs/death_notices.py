"""Learn of a worker's death when the kernel begins to take the process down.

SIGCHLD and pidfds tell of an exit only once the memory of the process is released: after a second for 2 GB.
Each worker therefore holds a robust mutex in its page (elasticd/worker/boot/elasticd_mutex.py), which the
kernel marks first, and /proc then has the exit status already. Such a process runs no more code of its own.

A thread waits for all mutexes with futex_waitv(2), from Linux 5.16 on. Without it, without the mutex, and
for exits with status 0, which nothing waits for, there are no notices.

Standard library only, because the warden uses this module.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import signal
import threading
from collections import deque
from pathlib import Path

from elasticd.procs.linux import stat_of

_FUTEX_WAITV = 449  # the number of the system call, on all machines
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(os.uname().machine)  # as in elasticd_mutex
_WAKE_PRIVATE = 1 | 128
_SIZE_U32, _PRIVATE = 2, 128  # flags of a waiter
_WAITERS_MAX = 128
_OWNER_DIED = 0x40000000
_AGAIN = (errno.EAGAIN, errno.EINTR, errno.EFAULT)  # a mutex has changed, or its page is gone
_FLAGS = 6  # of the fields that ``stat_of`` returns
_PF_EXITING = 0x4
_SIGKILL_PENDING = 1 << 8


class _Waiter(ctypes.Structure):
    """struct futex_waitv of linux/futex.h."""

    _fields_ = (
        ("expected", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class _Mutex:
    """The mutex in a worker's page. It is read through the file: after a worker has truncated the file, a
    read of the mapped memory would kill this process."""

    def __init__(self, page: str, offset: int) -> None:
        self._fd = os.open(page, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._offset = offset
        try:
            self._memory = mmap.mmap(self._fd, mmap.PAGESIZE)
        except (OSError, ValueError):
            os.close(self._fd)
            raise
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory, offset))

    def word(self) -> int | None:
        """Return the first word of the mutex; None if the file no longer has it."""
        raw = os.pread(self._fd, 4, self._offset)
        return int.from_bytes(raw, "little") if len(raw) == 4 else None

    def close(self) -> None:
        os.close(self._fd)
        self._memory = None  # type: ignore[assignment]  # it unmaps itself


class DeathNotices:
    """The deaths of watched processes. ``fd`` becomes readable when ``take`` has one to return."""

    def __init__(self, offset: int) -> None:
        """``offset``: of the mutex in each page, in bytes."""
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._offset = offset
        self._lock = threading.Lock()
        self._mutexes: dict[int, _Mutex] = {}
        self._deaths: deque[tuple[int, int]] = deque()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._changes = ctypes.c_uint32(0)  # a futex of this process, to wake the thread
        self._thread: threading.Thread | None = None

    def watch(self, pid: int, page: str) -> None:
        """Watch the worker that has this page. Without descriptors, memory or threads it is not watched."""
        if _FUTEX is None:
            return
        with contextlib.suppress(OSError, ValueError), self._lock:
            self._mutexes[pid] = _Mutex(page, self._offset)
        if self._thread is None:
            thread = threading.Thread(target=self._wait, name="elasticd-deaths", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads: the next worker leads to another try
                thread.start()
                self._thread = thread
        self._wake()

    def forget(self, pid: int) -> None:
        """Watch a process no longer, since it was reaped."""
        with self._lock:
            mutex = self._mutexes.pop(pid, None)
        if mutex is not None:
            mutex.close()
            self._wake()

    def take(self) -> list[tuple[int, int]]:
        """Return the pids of processes that have begun to exit, each with its exit status, or minus the
        signal that kills it."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        taken: list[tuple[int, int]] = []
        while self._deaths:
            taken.append(self._deaths.popleft())
        return taken

    def _wake(self) -> None:
        """Have the thread wait for the present mutexes."""
        self._changes.value += 1
        self._libc.syscall(_FUTEX, ctypes.byref(self._changes), _WAKE_PRIVATE, 1)

    # ------------------------------------------------------------ the thread

    def _wait(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            here = _Waiter(self._changes.value, ctypes.addressof(self._changes), _SIZE_U32 | _PRIVATE)
            waiters = [here, *self._look()]
            array = (_Waiter * len(waiters))(*waiters)
            woken = self._libc.syscall(_FUTEX_WAITV, array, len(waiters), 0, None, 0)
            if woken < 0 and ctypes.get_errno() not in _AGAIN:
                return  # an older kernel, or a sandbox without this call

    def _look(self) -> list[_Waiter]:
        """Report the deaths that the mutexes show. Return what to wait for."""
        waiters = []
        with self._lock:
            for pid, mutex in list(self._mutexes.items())[: _WAITERS_MAX - 1]:
                word = mutex.word()
                if word is not None and not word & _OWNER_DIED:
                    waiters.append(_Waiter(word, mutex.address, _SIZE_U32))
                    continue
                self._mutexes.pop(pid).close()
                code = exit_under_way(pid)
                if code:
                    self._deaths.append((pid, code))
                    os.eventfd_write(self.fd, 1)
        return waiters


def exit_under_way(pid: int) -> int | None:
    """Return the status with which a process is exiting, or minus the signal that kills it. None if it lives:
    its main thread has ended alone, or has begun another program."""
    fields = stat_of(pid)
    if not fields or not int(fields[_FLAGS]) & _PF_EXITING:
        return None
    code = os.waitstatus_to_exitcode(int(fields[-1]))
    return code if code < 0 or _all_exit(pid, fields[-1]) else None


def _all_exit(pid: int, status: bytes) -> bool:
    """Whether the other threads exit with the main thread, which has this status: one is enough to tell. New
    kernels show the status of the whole process in /proc/tid, also before the thread begins to exit."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it was reaped meanwhile
        return True
    for task in reversed(tasks):
        if int(task) != pid:
            fields = stat_of(int(task))
            if not fields or int(fields[_FLAGS]) & _PF_EXITING or fields[-1] == status != b"0":
                return True
            return _is_killed(pid, int(task))
    return True


def _is_killed(pid: int, task: int) -> bool:
    """Whether SIGKILL is pending for a thread."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/task/{task}/status").read_bytes().splitlines():
            name, _, value = line.partition(b":")
            if name == b"SigPnd":
                return bool(int(value, 16) & _SIGKILL_PENDING)
    return True  # it is gone
