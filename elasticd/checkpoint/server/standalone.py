"""The saver as a process of its own, for workers that run without an elasticd agent."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from typing import Any, Final

from elasticd.checkpoint.newest.pointer import FilePointer
from elasticd.checkpoint.server.save_report import SaveReport, sentence
from elasticd.checkpoint.server.saver import Saver
from elasticd.checkpoint.storage.rate_limit import RateLimit

_NICE: Final = 19
_SESSION_NICE: Final = 10  # gives the saver about a tenth of a processor that it shares with a worker


def lower_priority() -> None:
    """Lower the priority of this process, so that the saver uses only the time that training leaves.

    Where the kernel groups processes by session, ``nice`` counts only within a session: a saver with a
    session of its own would get as much time as a worker. This function then lowers the priority of the
    session too.
    """
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as session:
            session.write(str(_SESSION_NICE))


def say(words: str) -> None:
    """Print a line to standard error. The words may come from a file that others can write."""
    shown = "".join(char if char.isprintable() else "\ufffd" for char in " ".join(words.splitlines()))
    with contextlib.suppress(OSError):  # the reader has closed the pipe
        print(f"elasticd saver: {shown}", file=sys.stderr, flush=True)


def main(fd: int, options: str = "{}") -> None:
    """Serve the listening socket ``fd``. A client must name the secret, which is read from standard input.
    ``options`` is JSON: ``linger_s``, see ``Saver``, and ``bytes_s``, the most bytes to write per second."""
    given: dict[str, Any] = json.loads(options)
    lower_priority()
    bytes_s = given.get("bytes_s")
    pace = RateLimit(bytes_s) if bytes_s else None
    listener = socket.socket(fileno=fd)
    secret = sys.stdin.read()

    def tell(report: SaveReport) -> None:
        if words := sentence(report):
            say(words)

    Saver(
        listener,
        committer_of=lambda store: FilePointer(store, say),
        secret=secret,
        pace=pace,
        linger_s=given.get("linger_s", 0.0),
        say=say,
        report=tell,
    ).serve()
