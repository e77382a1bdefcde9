"""Forks a process for each line of JSON on stdin: a fork needs no imports."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_write = os.write  # a program may replace os.write


def say(*words: object) -> None:
    _write(1, (" ".join(map(str, words)) + "\n").encode())


def fork_for_each_line(run: Callable[[dict[str, Any]], None]) -> None:
    """Call ``run`` with each line, in a process of its own. ``{"end": true}`` kills all these processes; the
    program then says ``ended all``. The end of stdin kills them too."""
    children: list[int] = []
    for line in sys.stdin:
        order = json.loads(line)
        if "end" in order:
            _kill(children)
            say("ended all")
        elif pid := os.fork():
            children.append(pid)
        else:
            try:
                run(order)
            except BaseException as error:
                say("error", repr(error))
            os._exit(0)
    _kill(children)


def _kill(children: list[int]) -> None:
    while children:
        with suppress(ProcessLookupError):
            os.kill(children[-1], signal.SIGKILL)
        os.waitpid(children.pop(), 0)
