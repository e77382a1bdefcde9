"""Process 1 of a container that runs the agent: it forwards signals to the agent, and reaps orphans.

Orphans in a container become children of process 1. If the agent were process 1 and waited for every child,
it would take exit statuses that other code waits for. So process 1 forks before any thread starts, and its
child becomes the agent. Standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

_FROM_THE_KERNEL = 0x80  # SI_KERNEL: the signal is Ctrl-C on a terminal, which the agent receives too


def fork_from_process_1() -> None:
    """In process 1, fork: the child returns and becomes the agent, and the parent stays until the agent ends
    and exits with its code. In any other process, return."""
    if os.getpid() != 1:
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Signals are blocked and read one by one, so that none is lost after the fork.
    every = signal.valid_signals()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, every)
    agent = os.fork()
    if agent:
        _serve(agent, every)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(agent: int, every: set[signal.Signals]) -> NoReturn:
    while True:
        got = signal.sigwaitinfo(every)
        if got.si_signo == signal.SIGCHLD:
            status = _reap(agent)
            if status is not None:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)
        elif got.si_code != _FROM_THE_KERNEL:
            try:
                os.kill(agent, got.si_signo)
            except ProcessLookupError:
                pass


def _reap(agent: int) -> int | None:
    """Reap all children that have ended. Return the wait status of the agent if it is one of them, else
    None."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == agent:
            found = status
