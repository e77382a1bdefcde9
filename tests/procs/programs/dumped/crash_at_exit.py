"""Ends in the way that the first argument names. Then Python crashes in its finalisation, in the way that the
second argument names."""

import atexit
import os
import signal
import sys

from steps import step_once


class Crash:
    """Crashes while Python clears modules, after all exit functions of the script."""

    def __init__(self):
        self.kill, self.getpid, self.number = os.kill, os.getpid, getattr(signal, sys.argv[2])
        self.left = signal.getitimer, signal.ITIMER_REAL

    def __del__(self):
        left, timer = self.left
        print("killed in", *left(timer), flush=True)
        self.kill(self.getpid(), self.number)


def crash_earlier():
    os.kill(os.getpid(), signal.SIGABRT)


step_once()
how = sys.argv[1]
crash = Crash()
if how == "crash in a function at exit":
    atexit.register(crash_earlier)
if how == "crash":
    crash_earlier()
if how == "exit":
    sys.exit(0)
if how == "exit 1":
    sys.exit(1)
if how == "raise SystemExit":
    raise SystemExit("a last word")
if how == "raise":
    raise ValueError("no")
if how == "interrupt":
    raise KeyboardInterrupt
if how == "a child ends well" and os.fork() > 0:
    os.wait()
    crash_earlier()
print("the end")
