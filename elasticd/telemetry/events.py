"""What happened, a line of JSON each, in the folder of the run: written here, and read and followed.

A line is ``{"at": seconds since the epoch, "event": dotted name, "level", "job", "node", "text": a
sentence, ...fields}``. Names and fields are those of the log (``words.event``).
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from elasticd.core.reasons import Reason
from elasticd.telemetry import words

FILE = "events.jsonl"
WAITING_MAX = 10_000  # lines that cannot be written yet; the rest is lost, training is not
LAST_S = 2.0  # for what is still to be written at the end

Event = dict[str, Any]


def event(reason: Reason, at: float, job: str, node: str, **more: object) -> Event:
    """The event of a decision made ``at`` (seconds since the epoch)."""
    told = words.event(reason)
    text = words.sentence(reason, at)
    head = {"at": round(at, 6), "event": told.name, "level": told.level, "job": job, "node": node}
    return {**head, "text": text, **told.fields, **more}


class EventFile:
    """Writes events in a thread of its own, as a disk may be slow or gone. ``folder`` says where to, once
    that is known; ``opened`` is then told so, in that thread. It may raise OSError."""

    def __init__(self, folder: Callable[[], Path | None], opened: Callable[[Path], None]) -> None:
        self._folder = folder
        self._opened = opened
        self._queue: queue.Queue[tuple[Event | None, Path | None] | None] = queue.Queue(WAITING_MAX)
        self._placed = False
        self._thread = threading.Thread(target=self._run, name="elasticd-events", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(LAST_S)

    def write(self, what: Event) -> None:
        with suppress(queue.Full):
            self._queue.put_nowait((what, self._folder()))

    def nudge(self) -> None:
        """Call from time to time: events from before the folder was known need not wait for the next."""
        if not self._placed and (folder := self._folder()) is not None:
            self._placed = True
            with suppress(queue.Full):
                self._queue.put_nowait((None, folder))

    def _run(self) -> None:
        waiting: list[str] = []
        file: int | None = None
        while (item := self._queue.get()) is not None:
            what, folder = item
            if what is not None:
                waiting.append(json.dumps(what, default=str))
            try:
                if file is None and folder is not None:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                    file = os.open(folder / FILE, flags, 0o644)
                    self._opened(folder)
                if file is not None:
                    os.write(file, "".join(f"{line}\n" for line in waiting).encode(errors="replace"))
                    waiting.clear()
            except OSError:
                del waiting[:-WAITING_MAX]  # a full disk may be emptied
        if file is not None:
            os.close(file)


# ---------------------------------------------------------------- reading


def read(folders: Sequence[Path]) -> list[Event]:
    """All events in these folders, in the order of their times."""
    found: list[Event] = []
    for folder in folders:
        with suppress(OSError), (folder / FILE).open("rb") as file:
            found += _parsed(file.read())
    return sorted(found, key=lambda e: float(e["at"]))


def follow(folders: Callable[[], Sequence[Path]], parent: Path) -> Iterator[Event]:
    """All events, and each new one as it is written. ``folders`` is asked again when anything changes in
    ``parent``, where they become known. Does not end by itself."""
    with ExitStack() as cleanup:
        notices = _Notices()
        cleanup.callback(notices.close)
        notices.watch(parent)
        offsets: dict[Path, int] = {}
        while True:
            fresh: list[Event] = []
            for folder in folders():
                if folder not in offsets:
                    offsets[folder] = 0
                    notices.watch(folder)
                with suppress(OSError), (folder / FILE).open("rb") as file:
                    file.seek(offsets[folder])
                    whole, newline, _ = file.read().rpartition(b"\n")
                    offsets[folder] += len(whole) + len(newline)
                    fresh += _parsed(whole)
            yield from sorted(fresh, key=lambda e: float(e["at"]))
            notices.wait()


def _parsed(data: bytes) -> list[Event]:
    """The lines that are events; the last may be half written, after a crash."""
    found = []
    for line in data.splitlines():
        with suppress(ValueError):
            what = json.loads(line)
            if isinstance(what, dict) and isinstance(what.get("at"), int | float) and "event" in what:
                found.append(what)
    return found


class _Notices:
    """Linux's inotify: wakes who waits when something changes in the folders it watches."""

    _MASK = 0x2 | 0x100 | 0x80  # IN_MODIFY, IN_CREATE, IN_MOVED_TO

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.inotify_init1(os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def watch(self, folder: Path) -> None:
        self._libc.inotify_add_watch(self._fd, os.fsencode(folder), self._MASK)

    def wait(self) -> None:
        select.select([self._fd], [], [])
        os.read(self._fd, 65536)

    def close(self) -> None:
        os.close(self._fd)
