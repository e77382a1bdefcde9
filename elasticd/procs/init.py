"""Process 1 of a container, where the agent is started as such: it only passes signals on and reaps.

Whatever dies in a container without a parent falls to process 1. An agent that waited for every child
would take the exits of processes that others wait for, so there is a process between: this one forks,
before there are threads, and its child goes on as the agent. Standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

_FROM_THE_KERNEL = 0x80  # SI_KERNEL: Ctrl-C on a terminal, which goes to the agent as well by itself


def part_from_init() -> None:
    """In process 1: stay behind as its init, until the agent ends, and with its exit code; return in
    the child, which is the agent. In any other process: return."""
    if os.getpid() != 1:
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Blocked, and taken one by one: none is lost between the fork and the first look.
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
    """All that have ended; the wait status of the agent if it is among them."""
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
