"""The output of workers: to files, to the console, or to both. One thread moves it.

A worker writes a redirected stream to the file itself. A stream that goes only to the agent's terminal is a
pseudo-terminal, so that workers behave as on a terminal. Any other stream is a pipe.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import selectors
import signal
import termios
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

from elasticd.procs.errorfile import TAIL_BYTES
from elasticd.procs.linux import is_ready
from elasticd.procs.logdest import STDERR, STDOUT
from elasticd.procs.merged_console import MergedConsole, WorkerStream

_CHUNK_BYTES = 1 << 16
_LINE_BYTES_MAX = 1 << 20  # the longest line to filter; a longer line is split
_READS_MAX = 64  # more than a pipe or a terminal holds
_PARTIAL_S = 0.1  # how long an unfinished line is held back before it is shown


class Console(Protocol):
    """Where workers' output is shown. ``stream`` is 1 or 2. Methods may block."""

    def write(self, stream: int, data: bytes) -> None: ...

    def is_terminal(self, stream: int) -> bool: ...


class StdConsole:
    """The agent's own stdout and stderr. Output to a closed stream is dropped."""

    def __init__(self) -> None:
        self._closed: set[int] = set()

    def write(self, stream: int, data: bytes) -> None:
        if stream not in self._closed:
            try:
                _write_all(stream, data)
            except OSError:
                self._closed.add(stream)

    def is_terminal(self, stream: int) -> bool:
        with contextlib.suppress(OSError):
            return os.isatty(stream)
        return False


class Filtered:
    """The file for filtered lines, shared by the workers of a round. The file is closed with the last
    reference to this object."""

    def __init__(self, path: str, needles: Sequence[str]) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._needles = [needle.encode() for needle in needles]

    def write(self, lines: Sequence[bytes], prefix: bytes) -> None:
        """Write the lines that contain one of the filters."""
        chosen = [prefix + line + b"\n" for line in lines if any(n in line for n in self._needles)]
        if chosen:
            with contextlib.suppress(OSError):
                _write_all(self._fd, b"".join(chosen))

    def __del__(self) -> None:
        if hasattr(self, "_fd"):  # missing if the open failed
            os.close(self._fd)


@dataclass(slots=True, eq=False)
class Feed:
    """One output stream of a worker. ``drained`` is set once the stream has ended and all bytes were passed
    on. After a call of ``Output.drain``, it is set once all bytes were passed on that had arrived by then."""

    stream: int
    source: int
    console_stream: WorkerStream
    copies: list[int]
    filtered: Filtered | None = None
    tail: bytes = b""
    partial_since: float | None = None
    unfiltered: bytes = b""
    drained: threading.Event = field(default_factory=threading.Event)

    def discard(self) -> None:
        """Close the source and the copies."""
        self.filtered = None
        for fd in (self.source, *self.copies):
            os.close(fd)
        self.copies.clear()


class Output:
    """Moves the output of all workers."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or StdConsole()
        shared = _same_file(STDOUT, STDERR)
        out = MergedConsole(terminal=self._console.is_terminal(STDOUT))
        err = out if shared else MergedConsole(terminal=self._console.is_terminal(STDERR))
        self._screens = {STDOUT: out, STDERR: err}
        self._feeds: dict[int, Feed] = {}
        self._added: list[Feed] = []
        self._to_drain: list[Feed] = []
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------ called by other threads

    def open(self, stream: int, *, prefix: bytes, copies: Sequence[int], terminal: bool) -> tuple[int, Feed]:
        """Return a descriptor for a worker to print to, and its feed. The feed owns ``copies``.

        ``terminal``: open a pseudo-terminal if the console is a terminal.
        """
        source, target = _open_pipe_or_terminal(
            stream if terminal and self._console.is_terminal(stream) else None
        )
        return target, Feed(stream, source, WorkerStream(prefix), list(copies))

    def carry(self, feeds: Sequence[Feed]) -> None:
        """Start to pass on the output of the feeds."""
        with self._lock:
            self._added += feeds
            if self._thread is None:
                self._thread = threading.Thread(target=self._pump, name="elasticd-output", daemon=True)
                self._thread.start()
        os.eventfd_write(self._wake, 1)

    def drain(self, feeds: Sequence[Feed], timeout_s: float) -> None:
        """Wait until all output that has arrived on these feeds is passed on. The feeds may stay open after
        the worker has ended."""
        with self._lock:
            self._to_drain += feeds
        os.eventfd_write(self._wake, 1)
        for feed in feeds:
            feed.drained.wait(timeout_s)

    def resized(self) -> None:
        """Set the size of the workers' terminals to the console's."""
        for feed in list(self._feeds.values()):
            _copy_window_size(feed.stream, feed.source)

    def follow_window_size(self) -> None:
        """Call ``resized`` at each SIGWINCH. Only for the main thread."""
        before = signal.getsignal(signal.SIGWINCH)

        def handle(number: int, frame: FrameType | None) -> None:
            self.resized()
            if callable(before):
                before(number, frame)

        signal.signal(signal.SIGWINCH, handle)

    def close(self, timeout_s: float = 5.0) -> None:
        """Pass on the output that has arrived, and stop."""
        with self._lock:
            self._closing = True
            thread = self._thread
        os.eventfd_write(self._wake, 1)
        if thread is not None:
            thread.join(timeout_s)

    # ------------------------------------------------------------ the thread

    def _pump(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(self._until_next_partial()):
                    if key.fd == self._wake:
                        os.eventfd_read(self._wake)
                    elif not self._pass_on(feed := self._feeds[key.fd]):
                        selector.unregister(key.fd)
                        self._finish(feed)
                self._drain(selector)
                self._show_partials()
                if self._closing:
                    self._admit(selector)
                    for feed in list(self._feeds.values()):
                        self._pass_on_all(feed)
                        self._finish(feed)
                    return

    def _admit(self, selector: selectors.BaseSelector) -> None:
        with self._lock:
            added, self._added = self._added, []
        for feed in added:
            os.set_blocking(feed.source, False)
            self._feeds[feed.source] = feed
            selector.register(feed.source, selectors.EVENT_READ)

    def _drain(self, selector: selectors.BaseSelector) -> None:
        with self._lock:
            feeds, self._to_drain = self._to_drain, []
        self._admit(selector)  # admit new feeds first, since they may be among the feeds to drain
        for feed in feeds:
            if self._feeds.get(feed.source) is feed:
                self._pass_on_all(feed)
                self._end_line(feed)
            feed.drained.set()

    def _pass_on_all(self, feed: Feed) -> None:
        """Pass on the output that has arrived, in a limited number of chunks, so that a process that never
        stops writing does not hold up other feeds."""
        for _ in range(_READS_MAX):
            if not (is_ready(feed.source, select.POLLIN, 0) and self._pass_on(feed)):
                return

    def _pass_on(self, feed: Feed) -> bool:
        """Pass on one chunk. Return False at the end of the stream."""
        try:
            data = os.read(feed.source, _CHUNK_BYTES)
        except BlockingIOError:
            return True
        except OSError:  # EIO: no process has the terminal open any more
            return False
        if not data:
            return False
        feed.tail = (feed.tail + data)[-TAIL_BYTES:]
        for copy in list(feed.copies):
            try:
                _write_all(copy, data)
            except OSError as error:  # a full disk must not stop the worker; report it once
                feed.copies.remove(copy)
                os.close(copy)
                self._show(feed, f"elasticd: a worker's log ends here: {error.strerror}\n".encode())
        self._filter(feed, data)
        self._show(feed, data)
        return True

    def _show(self, feed: Feed, data: bytes) -> None:
        out = self._screens[feed.stream].feed(feed.console_stream, data)
        if out:
            self._console.write(feed.stream, out)
        if not feed.console_stream.held:
            feed.partial_since = None
        elif feed.partial_since is None:
            feed.partial_since = time.monotonic()

    def _flush(self, feed: Feed) -> None:
        feed.partial_since = None
        if out := self._screens[feed.stream].flush(feed.console_stream):
            self._console.write(feed.stream, out)

    def _filter(self, feed: Feed, data: bytes) -> None:
        if feed.filtered is None:
            return
        feed.unfiltered += data
        *lines, feed.unfiltered = feed.unfiltered.split(b"\n")
        if len(feed.unfiltered) > _LINE_BYTES_MAX:
            lines.append(feed.unfiltered)
            feed.unfiltered = b""
        feed.filtered.write(lines, feed.console_stream.prefix)

    def _finish(self, feed: Feed) -> None:
        self._end_line(feed)
        del self._feeds[feed.source]
        feed.discard()
        feed.drained.set()

    def _end_line(self, feed: Feed) -> None:
        """Pass on an unfinished last line."""
        self._flush(feed)
        if feed.unfiltered:
            self._filter(feed, b"\n")

    def _until_next_partial(self) -> float | None:
        since = [feed.partial_since for feed in self._feeds.values() if feed.partial_since is not None]
        return max(0.0, min(since) + _PARTIAL_S - time.monotonic()) if since else None

    def _show_partials(self) -> None:
        now = time.monotonic()
        for feed in list(self._feeds.values()):
            if feed.partial_since is not None and now >= feed.partial_since + _PARTIAL_S:
                self._flush(feed)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # another process made the console non-blocking
            is_ready(fd, select.POLLOUT)


def _open_pipe_or_terminal(like: int | None) -> tuple[int, int]:
    """Return the read end and the write end of a pipe. If a terminal ``like`` is given, return
    those of a new pseudo-terminal of the same size if possible."""
    if like is not None:
        with contextlib.suppress(OSError):
            source, target = os.openpty()
            attributes = termios.tcgetattr(target)
            attributes[1] &= ~termios.OPOST  # the console's terminal converts the line ends
            termios.tcsetattr(target, termios.TCSANOW, attributes)
            _copy_window_size(like, source)
            return source, target
    return os.pipe()


def _copy_window_size(of: int, to: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.ioctl(to, termios.TIOCSWINSZ, fcntl.ioctl(of, termios.TIOCGWINSZ, b"\0" * 8))


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False
