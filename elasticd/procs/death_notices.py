"""Learn of a worker's death when the kernel begins to take the process down.

SIGCHLD and pidfds tell of an exit only once the memory of the process is released: after a second for 2 GB.
Each worker therefore holds a robust mutex in its page (elasticd/worker/boot/elasticd_mutex.py), which the
kernel marks first, and /proc then has the exit status already. Such a process runs no more code of its own.

Threads wait for the mutexes with futex_waitv(2), from Linux 5.16 on. Without it, without the mutex, and for
exits with status 0, which nothing waits for, there are no notices.

Standard library only, because the warden uses this module.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import threading
from collections.abc import Callable

from elasticd.procs.linux import is_exiting, stat_of, status_of

_FUTEX_WAITV = 449  # the number of the system call, on all machines
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(os.uname().machine)  # as in elasticd_mutex
_WAKE_PRIVATE = 1 | 128
_SIZE_U32, _PRIVATE = 2, 128  # flags of a waiter
_WAITERS_MAX = 128  # of one call
_OWNER_DIED = 0x40000000
_AGAIN = (errno.EAGAIN, errno.EINTR, errno.EFAULT)  # a mutex has changed, or its page is gone
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
    """The mutex in the page of process ``pid``. It is read through the file: after a worker has truncated the
    file, a read of the mapped memory would kill this process."""

    def __init__(self, pid: int, page: str, offset: int) -> None:
        self.pid = pid
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
        """Close the file. The memory is unmapped with this object, which takes longer."""
        os.close(self._fd)


class DeathNotices:
    """The deaths of watched processes. The thread that waits for a death reports it. If the thread woke
    another one to do so, the report would come later, since the machine is busy when a worker dies."""

    def __init__(
        self, offset: int, died: Callable[[int, int], object], failed: Callable[[str], object]
    ) -> None:
        """``offset``: of the mutex in each page, in bytes.

        ``died(id, code)`` is called when process ``id`` has begun to exit, with its exit status, or minus the
        signal that kills it. ``failed(why)`` is called when deaths, from now on or of one more process, will
        be noticed only once the processes are gone. Threads call both; ``watch`` calls ``failed`` too.
        """
        self._offset = offset
        self._died, self._failed = died, failed
        self._waits: list[_Wait] = []

    def watch(self, id: int, pid: int, page: str) -> None:
        """Watch the worker that has this page. ``id`` names it; unlike its pid, no later worker has the same.
        Without descriptors, memory or threads the worker is not watched."""
        if why := _unsupported():
            self._failed(why)
            return
        wait = next((wait for wait in self._waits if wait.has_room), None)
        if wait is None:
            wait = _Wait(self._died, self._failed)
            self._waits.append(wait)
        try:
            wait.add(id, _Mutex(pid, page, self._offset))
        except (OSError, ValueError, RuntimeError) as error:
            self._failed(str(error))

    def forget(self, id: int) -> None:
        """Watch a process no longer, since it was reaped."""
        for wait in self._waits:
            wait.remove(id)


def _unsupported() -> str:
    """Return why this machine gives no notices; empty if it may give them."""
    if _FUTEX is None:
        return f"elasticd knows no robust mutexes on {os.uname().machine}"
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        return "the C library is not glibc"
    return ""


class _Wait:
    """A thread that waits for as many mutexes as one system call takes."""

    def __init__(self, died: Callable[[int, int], object], failed: Callable[[str], object]) -> None:
        self._died, self._failed = died, failed
        self._lock = threading.Lock()
        self._mutexes: dict[int, _Mutex] = {}  # by id
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._changes = ctypes.c_uint32(0)  # a futex of this process, to wake the thread
        self._thread: threading.Thread | None = None

    @property
    def has_room(self) -> bool:
        return len(self._mutexes) < _WAITERS_MAX - 1

    def add(self, id: int, mutex: _Mutex) -> None:
        """Raises RuntimeError if the thread cannot be started; the next call tries again."""
        with self._lock:
            self._mutexes[id] = mutex
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="elasticd-deaths", daemon=True)
            thread.start()
            self._thread = thread
        self._wake()

    def remove(self, id: int) -> None:
        with self._lock:
            mutex = self._mutexes.pop(id, None)
        if mutex is not None:
            mutex.close()
            self._wake()

    def _wake(self) -> None:
        """Have the thread wait for the present mutexes."""
        self._changes.value += 1
        self._libc.syscall(_FUTEX, ctypes.byref(self._changes), _WAKE_PRIVATE, 1)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            here = _Waiter(self._changes.value, ctypes.addressof(self._changes), _SIZE_U32 | _PRIVATE)
            waiters = [here, *self._look()]
            array = (_Waiter * len(waiters))(*waiters)
            woken = self._libc.syscall(_FUTEX_WAITV, array, len(waiters), 0, None, 0)
            if woken < 0 and (code := ctypes.get_errno()) not in _AGAIN:
                older = " (Linux has it from 5.16 on)" if code == errno.ENOSYS else ""
                self._failed(f"futex_waitv: {os.strerror(code)}{older}")
                return

    def _look(self) -> list[_Waiter]:
        """Report the deaths that the mutexes show. Return a waiter for each other mutex."""
        waiters, released = [], []
        with self._lock:
            for id, mutex in list(self._mutexes.items()):
                word = mutex.word()
                if word is not None and not word & _OWNER_DIED:
                    waiters.append(_Waiter(word, mutex.address, _SIZE_U32))
                else:
                    released.append((id, self._mutexes.pop(id)))
                    mutex.close()
        # Without the lock: ``died`` may wait for a lock that the caller of ``remove`` holds.
        for id, mutex in released:
            if code := exit_under_way(mutex.pid):
                self._died(id, code)
        return waiters


def exit_under_way(pid: int) -> int | None:
    """Return the status with which a process is exiting, or minus the signal that kills it. None if it lives:
    its main thread has ended alone, or has begun another program."""
    fields = stat_of(pid)
    if not is_exiting(fields):
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
            if not fields or is_exiting(fields) or fields[-1] == status != b"0":
                return True
            return _is_killed(pid, int(task))
    return True


def _is_killed(pid: int, task: int) -> bool:
    """Whether SIGKILL is pending for a thread, or the thread is gone."""
    pending = status_of(pid, task).get(b"SigPnd")
    return pending is None or bool(int(pending, 16) & _SIGKILL_PENDING)
