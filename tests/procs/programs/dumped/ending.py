"""Ends in the way that its argument names, with the usual things to clean up."""

import atexit
import os
import signal
import sys
import threading
import time
import weakref

from steps import step_once


class Kept:
    def __init__(self):
        weakref.finalize(self, print, "finalized")

    def __del__(self):
        os.write(1, b"deleted\n")


def raise_deeply(error):
    try:
        raise KeyError("inner")
    except KeyError as inner:
        raise error from inner


def late():
    threading.main_thread().join()
    print("a thread was waited for")


def main():
    how = sys.argv[1]
    if how == "exit 7":
        sys.exit(7)
    if how == "exit text":
        sys.exit("a last word")
    if how == "exit in a function at exit":
        atexit.register(lambda: 1 / 0)
    if how == "raise":
        raise_deeply(ValueError("ü"))
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "a real interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    if how == "_exit":
        os._exit(9)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    if how == "abort":
        os.abort()
    if how == "excepthook":
        sys.excepthook = lambda kind, error, tb: print("hooked", kind, error)
        raise RuntimeError("no")
    if how == "a thread raises":
        threading.Thread(target=lambda: 1 / 0).start()
    if how == "closed stdout":
        sys.stdout.close()


step_once()
kept = Kept()
for number in (1, 2):
    atexit.register(lambda number=number: print("at exit", number, "__file__" in globals(), __name__))
threading.Thread(target=late).start()
main()
