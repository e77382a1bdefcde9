"""A process that has ended, and that the kernel does not take down until the test lets it.

One of its threads is held at its exit, as the clean-up of a driver would hold the thread. The other threads
have exited, the main thread as a zombie. So the process runs no code, and cannot be reaped.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import pytest

from elasticd.procs.linux import is_exiting, stat_of

_PTRACE_DETACH, _PTRACE_SEIZE, _PTRACE_O_TRACEEXIT = 17, 0x4206, 0x40


class Undead:
    """Holds the exit of a process that has more than one thread. Use it on one thread of the test: the kernel
    lets no other thread release the process."""

    def __init__(self, pid: int) -> None:
        """The process lives, and ends later. The test is skipped if this user may not trace other
        processes."""
        self.pid = pid
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.ptrace.argtypes = [ctypes.c_long] * 4
        self._thread = next(int(task) for task in os.listdir(f"/proc/{pid}/task") if int(task) != pid)
        if self._libc.ptrace(_PTRACE_SEIZE, self._thread, 0, _PTRACE_O_TRACEEXIT) != 0:
            pytest.skip("this process may not trace another")

    def wait_for_the_exit(self, lives: Callable[[], object] = lambda: True) -> None:
        """Wait until the process runs no code any more."""
        while (stat_of(self.pid)[:1], stat_of(self._thread)[:1]) != ([b"Z"], [b"t"]):
            assert lives()

    def let_go(self) -> None:
        """Let the process end. The kernel refuses until the held thread has stopped on its way out."""
        while self._libc.ptrace(_PTRACE_DETACH, self._thread, 0, 0) != 0 and is_exiting(stat_of(self.pid)):
            time.sleep(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go()
