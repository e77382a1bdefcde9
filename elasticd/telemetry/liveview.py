"""The output on the terminal: what workers print, and the live view below it.

``open_view`` returns a ``LiveView`` on a terminal, unless the user declines it, else a ``PlainView``, which
passes bytes on unchanged. Any thread may call either of them.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import IO, Self

from rich.text import Text

from elasticd.telemetry import footer
from elasticd.telemetry.lines import LineBuffer
from elasticd.telemetry.log import takes_colors
from elasticd.telemetry.status import JobStatus

REPAINT_S = 0.05  # the time between two repaints, short for the eye and cheap while workers print much
PENDING_MAX_CHARS = 1 << 20  # writers wait while more characters than this are not printed yet
PARTIALS_MAX = 4  # the most progress bars shown at once

_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"
_SYNC, _UNSYNC = "\x1b[?2026h", "\x1b[?2026l"  # terminals that support this draw a frame at once


class TerminalView(ABC):
    """The destination of a run's output.

    ``live``: whether workers must write through ``write``; otherwise they may inherit the streams.
    """

    live: bool

    @abstractmethod
    def show(self, status: JobStatus) -> None:
        """Replace what the live view shows. Never blocks."""

    @abstractmethod
    def write(self, stream: int, data: bytes, source: Hashable = None) -> None:
        """Print a worker's output. ``stream`` is 1 or 2; ``source`` identifies the writer.

        Blocks while the terminal is slower than the writers.
        """

    @abstractmethod
    def line(self, text: str) -> None:
        """Print a log line to stderr. The live view never blocks here."""

    @abstractmethod
    def close(self) -> None:
        """Print everything and remove the live view. A second call does nothing."""

    def finish(self, text: str) -> None:
        """``close``, then print the last screen to stderr."""
        self.close()
        if text:
            self.line(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_view(*, plain: bool = False, environ: Mapping[str, str] = os.environ) -> TerminalView:
    """Return the live view, or a PlainView if ``--plain`` or NO_COLOR is set or stderr is no capable
    terminal."""
    if plain or not takes_colors(environ) or not sys.stderr.isatty():
        return PlainView()
    return LiveView()


class PlainView(TerminalView):
    """A view that passes bytes on unchanged."""

    live = False

    def __init__(self) -> None:
        self._terminals = {n for n in (1, 2) if os.isatty(n)}
        self._mid_line = False  # a worker's last line on the terminal has no end yet

    def show(self, status: JobStatus) -> None:
        pass

    def write(self, stream: int, data: bytes, source: Hashable = None) -> None:
        if stream in self._terminals and data:
            self._mid_line = not data.endswith(b"\n")
        _write(stream, data)

    def line(self, text: str) -> None:
        # Do not print into the middle of a progress bar.
        start = "\n" if self._mid_line and 2 in self._terminals else ""
        self._mid_line = False
        _write(2, f"{start}{text}\n".encode(errors="replace"))

    def close(self) -> None:
        pass


class LiveView(TerminalView):
    """A few lines at the bottom of the terminal; all other output is printed above them.

    One thread paints; other threads hand over their lines. The thread starts with the first status: the
    agent forks before that, and should have no threads then. Before the start and after ``close``, output
    passes unchanged. Output to a stream that is no terminal (``> log.txt``) always does.
    """

    live = True

    def __init__(self) -> None:
        self._piped = {n for n in (1, 2) if not os.isatty(n)}
        self._wake = threading.Condition()
        self._pending: list[str] = []
        self._pending_chars = 0
        # Stdout and stderr have one buffer, since both are the same terminal.
        self._buffers: dict[Hashable, LineBuffer] = {}
        self._status: JobStatus | None = None
        self._dirty = False
        self._closed = False
        self._broken = False
        # Only the painter uses the following fields.
        self._painted: list[int] = []  # the width of each footer line, in cells
        self._rendered: tuple[JobStatus | None, tuple[int, int], list[str]] | None = None
        self._stdio = (sys.stdout, sys.stderr)
        self._painter: threading.Thread | None = None

    def show(self, status: JobStatus) -> None:
        with self._wake:
            self._status = status
            if self._painter is None and not self._closed:
                self._start()
            self._touch()

    def _start(self) -> None:
        self._stdio = (sys.stdout, sys.stderr)
        if 1 not in self._piped:
            sys.stdout = _Redirected(self, 1, sys.stdout)
        sys.stderr = _Redirected(self, 2, sys.stderr)
        self._painter = threading.Thread(target=self._paint_until_closed, name="elasticd-view", daemon=True)
        self._painter.start()

    def write(self, stream: int, data: bytes, source: Hashable = None) -> None:
        if stream in self._piped or self._painter is None or self._closed:
            _write(stream, data)
            return
        with self._wake:
            while self._pending_chars > PENDING_MAX_CHARS and not (self._closed or self._broken):
                self._wake.wait()
            self._print(self._buffers.setdefault(source, LineBuffer()).feed(data))

    def line(self, text: str) -> None:
        with self._wake:
            if self._painter is not None and not self._closed:
                self._print(text.split("\n"))
                return
        _write(2, (text + "\n").encode(errors="replace"))

    def close(self) -> None:
        with self._wake:
            if not self._closed:
                self._closed = True
                self._print([rest for b in self._buffers.values() if (rest := b.close())])
                self._wake.notify_all()
        if self._painter is not None:
            self._painter.join()
            sys.stdout, sys.stderr = self._stdio

    # ---------------------------------------------------------------- with the lock held

    def _print(self, lines: list[str]) -> None:
        self._pending += lines
        self._pending_chars += sum(map(len, lines))
        self._touch()

    def _touch(self) -> None:
        self._dirty = True
        self._wake.notify_all()

    # ---------------------------------------------------------------- the painter

    def _paint_until_closed(self) -> None:
        while True:
            with self._wake:
                while not (self._dirty or self._closed):
                    self._wake.wait()
                lines, self._pending, self._pending_chars = self._pending, [], 0
                closed, self._dirty = self._closed, False
                partials = [p for b in self._buffers.values() if (p := b.partial)][-PARTIALS_MAX:]
                status = self._status
                self._wake.notify_all()
            try:
                _write_all(
                    2,
                    self._frame(lines, partials, status, closed).encode(errors="replace"),
                )
            except OSError:
                # The terminal is gone, so nobody sees the view. Training goes on.
                with self._wake:
                    self._broken = True
            if closed:
                return
            with self._wake:
                self._wake.wait_for(lambda: self._closed, REPAINT_S)

    def _frame(
        self,
        lines: list[str],
        partials: list[str],
        status: JobStatus | None,
        closed: bool,
    ) -> str:
        """Return the bytes that change the screen from one state to the next, to be written at once."""
        size = shutil.get_terminal_size() if not os.isatty(2) else os.get_terminal_size(2)
        width, height = size.columns or 80, size.lines or 24
        # A terminal that was narrowed has wrapped the painted lines.
        above = sum(max(1, -(-cells // width)) for cells in self._painted)
        # Clear each line: after "clear to the end" from the top of the screen, tmux keeps the cleared text in
        # its history.
        erase = "\r" + "\x1b[1A\x1b[2K" * above
        printed = "".join(f"{line}\r\n" for line in lines)
        bottom = (
            [] if closed else [_crop(p, width - 1) for p in partials] + self._footer(status, width, height)
        )
        self._painted = [_cells(line) for line in bottom]
        painted = "".join(f"{line}\r\n" for line in bottom)
        return f"{_SYNC}{_HIDE}{erase}{printed}{painted}{_SHOW}{_UNSYNC}"

    def _footer(self, status: JobStatus | None, width: int, height: int) -> list[str]:
        if status is None:
            return []
        size = (width, height)
        if self._rendered is None or self._rendered[0] is not status or self._rendered[1] != size:
            self._rendered = (status, size, footer.render(status, width, height))
        return self._rendered[2]


class _Redirected:
    """A replacement of sys.stdout or sys.stderr that sends what this process prints through the view."""

    def __init__(self, view: LiveView, stream: int, original: IO[str]) -> None:
        self._view, self._stream, self._original = view, stream, original

    def write(self, text: str) -> int:
        self._view.write(self._stream, text.encode(errors="replace"), source=self._original)
        return len(text)

    def flush(self) -> None:
        pass

    def __getattr__(self, name: str) -> object:
        return getattr(self._original, name)


def _crop(text: str, width: int) -> str:
    if _cells(text) <= width:
        return text
    plain = Text.from_ansi(text)
    plain.truncate(max(1, width), overflow="ellipsis")
    return plain.plain


def _cells(text: str) -> int:
    return Text.from_ansi(text).cell_len if text else 0


def _write(stream: int, data: bytes) -> None:
    """Write the data, and ignore a closed reader (``elasticd run ... | head``): training goes on."""
    with suppress(OSError):
        _write_all(stream, data)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # another process made the stream non-blocking
            select.select([], [fd], [])
