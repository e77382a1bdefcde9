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
class WorkerStream:
    """One stream of one worker. ``held``: the start of a line that is not yet on the console.

    ``mid_line``: the last output of the stream did not end with a line break.
    """

    prefix: bytes = b""
    held: bytes = b""
    mid_line: bool = False


class MergedConsole:
    """One console. ``terminal``: whether the console can erase a line, as progress bars need."""

    def __init__(self, *, terminal: bool) -> None:
        self._terminal = terminal
        self._open: WorkerStream | None = None
        self._open_is_bar = False

    def feed(self, stream: WorkerStream, data: bytes) -> bytes:
        """Return the bytes to write now: whole lines. The rest is held until its line ends, or until
        ``flush``."""
        stream.held += data
        end = stream.held.rfind(b"\n") + 1
        whole, stream.held = stream.held[:end], stream.held[end:]
        out = self._put(stream, whole)
        if len(stream.held) > _HELD_BYTES_MAX:
            out += self.flush(stream)
        return out

    def flush(self, stream: WorkerStream) -> bytes:
        """Return the bytes of an unfinished line, such as a prompt or a progress bar."""
        rest, stream.held = stream.held, b""
        return self._put(stream, rest)

    def _put(self, stream: WorkerStream, chunk: bytes) -> bytes:
        if not chunk:
            return b""
        out = b""
        if self._open is not None and self._open is not stream:
            out = _ERASE_LINE if self._terminal and self._open_is_bar else b"\n"
            self._open.mid_line = False
        out += self._prefixed(stream, chunk)
        stream.mid_line = not chunk.endswith(b"\n")
        self._open = stream if stream.mid_line else None
        self._open_is_bar = stream.mid_line and b"\r" in chunk[chunk.rfind(b"\n") + 1 :]
        return out

    def _prefixed(self, stream: WorkerStream, chunk: bytes) -> bytes:
        if not stream.prefix:
            return chunk
        starts = _LATER_LINE_STARTS if stream.mid_line else _LINE_STARTS
        return starts.sub(lambda start: start[0] + stream.prefix, chunk)
