"""Errors that another try would only meet again: the job ends with them, at once and in their words."""

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
from elasticd.worker import told

_MARK: Final = "_elasticd_futile"


def if_uncaught(error: BaseException, why: Fatal) -> None:
    """If ``error``, which is about to be raised, ends this process, the job ends with it. A script may well
    catch it, and go on."""
    setattr(error, _MARK, why)
    _watch_the_end()


def say(sentence: str, why: Fatal, traceback: str = "") -> None:
    """This process ends now, for that."""
    told.fatal(why)
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
