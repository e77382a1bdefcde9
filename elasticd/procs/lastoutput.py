"""The reason why a worker failed, from the end of its stderr: the error of the last traceback, or the message
of an abort. If there is neither, the last line is used, and labelled as the last output."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from elasticd.core.facts import LAST_OUTPUT

_LINES = 20
_AFTER = 10  # lines shown after an error: its message may have several lines
_RANK = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # torch's prefix of the lines of a traceback
# The first line of a traceback (a progress bar may precede it), the lines inside (rich and loguru draw
# boxes), and the error at the end. A syntax error in the script itself has no first line.
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


def cause(text: str, code: int) -> tuple[str, str]:
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
    """Yield each traceback that may have ended the process: the first line of its chain, the line of its
    error, and the error."""
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
