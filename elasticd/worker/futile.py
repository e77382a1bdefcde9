"""Errors that a restart would only repeat: they end the job at once, with their own message."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from traceback import format_exception
from types import TracebackType
from typing import Final

from elasticd.core.page import Fatal
from elasticd.worker import agentpage

_MARK: Final = "_elasticd_futile"


def if_uncaught(error: BaseException, why: Fatal) -> None:
    """Let the job end with ``error``, which is about to be raised, if ``error`` ends this process. A script
    may catch the error and go on."""
    setattr(error, _MARK, why)
    _watch_the_end()


def say(sentence: str, why: Fatal, traceback: str = "") -> None:
    """Tell the agent that this process ends now, with this sentence, and the job with it."""
    agentpage.fatal(why)
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": traceback, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(file, "w") as out:
            json.dump({"message": {"message": sentence, "extraInfo": extra}}, out)


@functools.cache
def _watch_the_end() -> None:
    before = sys.excepthook

    def ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(why := getattr(error, _MARK, None), Fatal):
            say(str(error), why, "".join(format_exception(error)))
        before(kind, error, trace)

    sys.excepthook = ended
