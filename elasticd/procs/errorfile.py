"""The reason why a worker failed: from torch's error file, else from the end of its stderr.

In stderr the reason is the error of the last traceback, or the message of an abort. If there is neither, the
last line is used, and labelled as the last output.

The worker's output is not trusted: sizes are bounded, types checked, control characters dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from elasticd.core.facts import LAST_OUTPUT, without_surrogates

_FILE_BYTES_MAX = 1 << 20
_MESSAGE_CHARS_MAX = 2_000
_TRACEBACK_CHARS_MAX = 50_000
TAIL_BYTES = 16_384
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LINES = 20
_AFTER = 10  # the most lines shown after an error, since a message may have several lines
_RANK = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # torch's prefix of the lines of a traceback
# The patterns match the first line of a traceback, which a progress bar may precede, the lines inside, around
# which rich and loguru draw boxes, and the error at the end. A syntax error in the script has no first line.
_PLAIN = re.compile(r"(?<!Original )(?<!Group )Traceback \(most recent call last\)[^\w\"']*$")
_PLAIN_INSIDE = re.compile(r"(?:[\s>│╭╰]|$)")
_PLAIN_ERROR = re.compile(r"([^\W\d][\w.]*(?:: .*|:)?)$")
_SYNTAX = re.compile(r'  File "[^"]*", line \d+$')
_GROUP = re.compile(r"\s*\+ Exception Group Traceback \(most recent call last\):$")
_GROUP_INSIDE = re.compile(r"\s*\|(?:  |$)")
_GROUP_ERROR = re.compile(r"\s*\| ([^\W\d][\w.]*(?:: .*|:)?)$")
_NOT_THE_END = re.compile(r"Exception ignored |Exception in thread |--- Logging error ---")
_CHAINED = re.compile(r"During handling of the above exception|The above exception was the direct cause")
_ABORTED = (
    re.compile(
        r"^terminate called after throwing an instance of '(?P<kind>[^']+)'"
        r"(?:\n\s+what\(\):\s+(?P<what>.*))?",
        re.MULTILINE,
    ),
    re.compile(
        r"^(?P<what>terminate called without an active exception|Fatal Python error: .*"
        r"|.*: Assertion .* failed\.|(?:double free|free\(\)|malloc|munmap_chunk|corrupted).*)$",
        re.MULTILINE,
    ),
)


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


def read_announced(why: str) -> tuple[str, str] | None:
    """Return message and traceback from the error that a worker announced; None if there is no such error."""
    message = _printable(why)[:_MESSAGE_CHARS_MAX]
    return (message, "") if message else None


def read_tail(output: bytes, code: int) -> tuple[str, str]:
    """Return message and traceback from the end of the output of a process that ended with ``code``."""
    message, shown = _cause(_printable(output[-TAIL_BYTES:].decode(errors="replace")), code)
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
    plain = _ESCAPES.sub("", without_surrogates(text))
    return _CONTROLS.sub("", plain.replace("\r\n", "\n").replace("\r", "\n"))


def _cause(text: str, code: int) -> tuple[str, str]:
    """Return the error in one line, and the text to show, from the end of a process's output. ``code``: the
    exit status, or minus the signal that killed the process. If no error is found, return the last line,
    labelled."""
    text = _RANK.sub("", text)
    lines = [line.rstrip() for line in text.splitlines()]
    if code > 0:
        *_, found = None, *_tracebacks(lines)
        if found is not None:
            first, last, error = found
            return error, "\n".join(lines[first : last + 1 + _AFTER]).strip("\n")
    shown = "\n".join(lines[-_LINES:]).strip("\n")
    if code < 0:
        aborts = [match for pattern in _ABORTED for match in pattern.finditer(text)]
        if aborts:
            said = max(aborts, key=lambda match: match.start()).groupdict()
            return ": ".join(filter(None, (said.get("kind"), said.get("what")))), shown
    last_line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return (LAST_OUTPUT + last_line if last_line else ""), shown


def _tracebacks(lines: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Yield each traceback that may have ended the process: the index of its first line (of the first
    traceback in a chain), the index of the error's line, and the error."""
    before = -1  # the first line of the previous traceback
    at = 0
    while at < len(lines):
        inside, ends = _PLAIN_INSIDE, _PLAIN_ERROR
        if _GROUP.match(lines[at]):
            inside, ends = _GROUP_INSIDE, _GROUP_ERROR
        elif not (_PLAIN.search(lines[at]) or _SYNTAX.match(lines[at])):
            at += 1
            continue
        said = next((lines[n] for n in range(at - 1, -1, -1) if lines[n]), "")
        first = before if before >= 0 and _CHAINED.match(said) else at
        at += 1
        while at < len(lines) and inside.match(lines[at]):
            at += 1
        error = ends.match(lines[at]) if at < len(lines) else None
        if error is not None and not _NOT_THE_END.match(said):
            before = first
            yield first, at, error[1]
