"""What happened, a line of JSON each, in the folder of the run: written here, and read and followed.

A line is ``{"at": seconds since the epoch, "event": dotted name, "level", "job", "node", "text": a
sentence, ...fields}``. Names and fields are those of the log (``words.event``). The first of an agent is
``agent.started``, which says what process it is; the last, unless it died, ``agent.ended``.

Beside them lies the course of the run: what ``telemetry.course`` measures, a line now and then.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import queue
import select
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from elasticd.core.reasons import Reason
from elasticd.telemetry import words

_log = logging.getLogger(__name__)

FILE = "events.jsonl"
COURSE = "course.jsonl"
STARTED, ENDED = "agent.started", "agent.ended"
WAITING_MAX = 10_000  # lines that cannot be written yet; the rest is lost, training is not
LAST_S = 2.0  # for what is still to be written at the end

Event = dict[str, Any]


def event(reason: Reason, at: float, job: str, node: str, **more: object) -> Event:
    """The event of a decision made ``at`` (seconds since the epoch)."""
    told = words.event(reason)
    text = words.sentence(reason, at)
    head = {"at": round(at, 6), "event": told.name, "level": told.level, "job": job, "node": node}
    return {**head, "text": text, **told.fields, **more}


def of_agent(what: str, at: float, job: str, node: str, text: str, **fields: object) -> Event:
    """The first or the last event of an agent, or one that is nobody's decision."""
    return {
        "at": round(at, 6),
        "event": what,
        "level": "info",
        "job": job,
        "node": node,
        "text": text,
        **fields,
    }


class EventFile:
    """Writes events, and the run's course, in a thread of its own, as a disk may be slow or gone.
    ``folder`` says where to, once that is known; ``opened`` is then told so, in that thread, when the
    first events are there. It may raise OSError."""

    def __init__(self, folder: Callable[[], Path | None], opened: Callable[[Path], None]) -> None:
        self._folder = folder
        self._opened = opened
        self._queue: queue.Queue[tuple[str, Mapping[str, Any] | None, Path | None] | None] = queue.Queue(
            WAITING_MAX
        )
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
        self._put(FILE, what)

    def note(self, course: Mapping[str, Any]) -> None:
        """A line of the run's course."""
        self._put(COURSE, course)

    def _put(self, name: str, what: Mapping[str, Any] | None) -> None:
        with suppress(queue.Full):
            self._queue.put_nowait((name, what, self._folder()))

    def nudge(self) -> None:
        """Call from time to time: events from before the folder was known need not wait for the next."""
        if not self._placed and self._folder() is not None:
            self._placed = True
            self._put(FILE, None)

    def _run(self) -> None:
        waiting: dict[str, list[bytes]] = {FILE: [], COURSE: []}
        files: dict[str, int] = {}
        known = troubled = False
        while (item := self._queue.get()) is not None:
            name, what, folder = item
            if what is not None:
                waiting[name].append(f"{json.dumps(what, default=str)}\n".encode(errors="replace"))
            for name, lines in waiting.items():
                try:
                    if lines and name not in files and folder is not None:
                        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                        files[name] = os.open(folder / name, flags, 0o644)
                    if lines and name in files:
                        _append(files[name], lines)
                    if not known and name in files and folder is not None:
                        known = True
                        self._opened(folder)
                except OSError as error:
                    del lines[1:-WAITING_MAX]  # a full disk may be emptied; the first may be half written
                    if not troubled:
                        troubled = True
                        _log.warning("what happens cannot be noted for now: %s", error)
        for file in files.values():
            os.close(file)


def _append(file: int, lines: list[bytes]) -> None:
    """Write the lines and take them off the list; a line that a full disk has cut stays there with what
    of it is left to write. Raises OSError when there is no more room."""
    while lines:
        written = os.write(file, b"".join(lines))
        while lines and written >= len(lines[0]):
            written -= len(lines.pop(0))
        if written:
            lines[0] = lines[0][written:]


# ---------------------------------------------------------------- reading


def read(folders: Sequence[Path]) -> list[Event]:
    """All events in these folders, in the order of their times."""
    found: list[Event] = []
    for folder in folders:
        with suppress(OSError), (folder / FILE).open("rb") as file:
            found += [line for line in _parsed(file.read()) if "event" in line]
    return sorted(found, key=lambda e: float(e["at"]))


def read_course(folder: Path) -> list[dict[str, Any]]:
    """The course of one agent's part, as far as it was written."""
    with suppress(OSError), (folder / COURSE).open("rb") as file:
        return _parsed(file.read())
    return []


def follow(
    folders: Callable[[], Sequence[Path]], parent: Path, process: Callable[[Event], int | None]
) -> Iterator[Event]:
    """All events, and each new one as it is written, until no agent is left that writes any.

    ``folders`` is asked again when anything changes in ``parent``, where they become known. ``process``
    takes the first event of an agent, and gives a descriptor (a pidfd, ours from then on) that is
    readable once that agent has ended; None if it has.
    """
    with ExitStack() as cleanup:
        notices = _Notices()
        cleanup.callback(notices.close)
        notices.watch(parent)
        offsets: dict[Path, int] = {}
        writing: set[int] = set()
        over = False
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
                    fresh += [line for line in _parsed(whole) if "event" in line]
            for event in fresh:
                if event["event"] == STARTED and (end := process(event)) is not None:
                    writing.add(end)
                    cleanup.callback(os.close, end)
            yield from sorted(fresh, key=lambda e: float(e["at"]))
            if not writing:
                if over:
                    return
                over = True  # look once more: what was written before the end, but after we had read
                continue
            over = False
            writing -= notices.wait(writing)


def _parsed(data: bytes) -> list[Event]:
    """The lines that are whole; the last may be half written, after a crash."""
    found = []
    for line in data.splitlines():
        with suppress(ValueError):
            what = json.loads(line)
            if isinstance(what, dict) and isinstance(what.get("at"), int | float):
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

    def wait(self, others: Collection[int]) -> set[int]:
        """Until something has changed, or one of the other descriptors can be read: which can."""
        ready, _, _ = select.select([self._fd, *others], [], [])
        if self._fd in ready:
            os.read(self._fd, 65536)
        return set(ready) - {self._fd}

    def close(self) -> None:
        os.close(self._fd)
