"""The reason why a worker failed: from torch's error file, else from the end of its stderr (lastoutput.py).

The worker's output is not trusted: sizes are bounded, types checked, control characters dropped.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from elasticd.procs import lastoutput

_FILE_BYTES_MAX = 1 << 20
_MESSAGE_CHARS_MAX = 2_000
_TRACEBACK_CHARS_MAX = 50_000
TAIL_BYTES = 16_384
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def read_error_file(path: str | Path) -> tuple[str, str] | None:
    """Return message and traceback from the file that torch's ``@record`` writes; None if there is no such
    file."""
    try:
        if not Path(path).is_file():
            return None
        with open(path, "rb") as file:
            content: Any = json.loads(file.read(_FILE_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return None
    message = content.get("message") if isinstance(content, dict) else None
    traceback: Any = ""
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        traceback = extra.get("py_callstack") if isinstance(extra, dict) else ""
        message = message.get("message")
    if not isinstance(message, str) or not message:
        return None
    return (
        _printable(message)[:_MESSAGE_CHARS_MAX],
        # the end of a traceback names the error
        _printable(traceback)[-_TRACEBACK_CHARS_MAX:] if isinstance(traceback, str) else "",
    )


def read_tail(output: bytes, code: int) -> tuple[str, str]:
    """Return message and traceback from the end of the output of a process that ended with ``code``."""
    message, shown = lastoutput.cause(_printable(output[-TAIL_BYTES:].decode(errors="replace")), code)
    return message[:_MESSAGE_CHARS_MAX], shown


def tail_of(path: str | Path) -> bytes:
    """Return the end of a file; empty if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            return file.read(TAIL_BYTES)
    except OSError:
        return b""


def _printable(text: str) -> str:
    return _CONTROLS.sub("", _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n"))
