"""The saver as a process of its own, where no agent has one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from typing import Any, Final

from elasticd.checkpoint.pace import RateLimit
from elasticd.checkpoint.pointer import FilePointer
from elasticd.checkpoint.report import SaveReport, sentence
from elasticd.checkpoint.saver import Saver

_NICE: Final = 19
_SESSION_NICE: Final = 10  # a tenth of a processor that a worker wants too: slow, but never starved


def be_modest() -> None:
    """Take what processor and disk time the training leaves.

    Where the kernel groups processes by session, ``nice`` counts within a session only: one of our own would
    get as much as a worker. Then the session has to be nice, too."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as session:
            session.write(str(_SESSION_NICE))


def say(words: str) -> None:
    """To whoever looks at what the process writes."""
    with contextlib.suppress(OSError):  # nobody looks any more
        print(f"elasticd saver: {words}", file=sys.stderr, flush=True)


def main(fd: int, options: str = "{}") -> None:
    """Serve a listening socket that it was given, those who know the secret that its standard input says.
    ``options``: JSON of ``linger_s`` and ``bytes_s``
    (how much to write per second at most)."""
    given: dict[str, Any] = json.loads(options)
    be_modest()
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
