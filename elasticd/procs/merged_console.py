"""The output of several workers on one console, merged so that no line mixes two workers. Bytes in, bytes
out."""

from __future__ import annotations

import re
from dataclasses import dataclass

_HELD_BYTES_MAX = 1 << 16
# Where a line starts, or restarts after a carriage return; a chunk may begin in the middle of a line.
_LINE_STARTS = re.compile(rb"(?:\A|(?<=\n))(?!\Z|\r(?!\n))|\r(?!\n|\Z)")
_LATER_LINE_STARTS = re.compile(rb"(?<=\n)(?!\Z|\r(?!\n))|\r(?!\n|\Z)")
_ERASE_LINE = b"\r\x1b[K"


@dataclass(slots=True, eq=False)
class Author:
    """One stream of one worker. ``held``: the start of a line that is not yet on the console.

    ``mid_line``: its last output did not end with a line break.
    """

    prefix: bytes = b""
    held: bytes = b""
    mid_line: bool = False


class Screen:
    """One console. ``terminal``: whether the console can erase a line, as progress bars need."""

    def __init__(self, *, terminal: bool) -> None:
        self._terminal = terminal
        self._open: Author | None = None
        self._open_is_bar = False

    def feed(self, author: Author, data: bytes) -> bytes:
        """Return the bytes to write now: whole lines. The rest is held until its line ends, or until
        ``flush``."""
        author.held += data
        end = author.held.rfind(b"\n") + 1
        whole, author.held = author.held[:end], author.held[end:]
        out = self._put(author, whole)
        if len(author.held) > _HELD_BYTES_MAX:
            out += self.flush(author)
        return out

    def flush(self, author: Author) -> bytes:
        """Return the bytes of an unfinished line, such as a prompt or a progress bar."""
        rest, author.held = author.held, b""
        return self._put(author, rest)

    def _put(self, author: Author, chunk: bytes) -> bytes:
        if not chunk:
            return b""
        out = b""
        if self._open is not None and self._open is not author:
            out = _ERASE_LINE if self._terminal and self._open_is_bar else b"\n"
            self._open.mid_line = False
        out += self._prefixed(author, chunk)
        author.mid_line = not chunk.endswith(b"\n")
        self._open = author if author.mid_line else None
        self._open_is_bar = author.mid_line and b"\r" in chunk[chunk.rfind(b"\n") + 1 :]
        return out

    def _prefixed(self, author: Author, chunk: bytes) -> bytes:
        if not author.prefix:
            return chunk
        starts = _LATER_LINE_STARTS if author.mid_line else _LINE_STARTS
        return starts.sub(lambda start: start[0] + author.prefix, chunk)
