"""The events of a run: one line of JSON each, in the run's folder. Write, read and follow them.

A line is ``{"at": seconds since the epoch, "event": dotted name, "level", "job", "node", "text": a sentence,
...fields}``. Names and fields are the log's (``describe.event``). An agent's first event is
``agent.started``, which names the agent's process. Its last event is ``agent.ended``, unless the agent died.

A second file in the folder holds the timeline of the run: measurements that ``daemon.timeline`` takes at
intervals.
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
from typing import Annotated, Any, Required, Self, TypedDict

import msgspec

from elasticd.core.reasons import Reason
from elasticd.telemetry import describe

_log = logging.getLogger(__name__)

FILE = "events.jsonl"
TIMELINE = "course.jsonl"
STARTED, ENDED = "agent.started", "agent.ended"
WAITING_MAX = 10_000  # lines that wait for the disk; further lines are dropped, so that training goes on
LAST_S = 2.0  # how long to wait for the last lines at the end

Event = dict[str, Any]
_Time = Annotated[float, msgspec.Meta(ge=0, lt=253_402_300_800)]  # until the year 9999
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _EventLine(TypedDict, total=False):
    """The fields of events that this program reads again. A line may have more."""

    at: Required[_Time]
    event: Required[str]
    level: str
    job: str
    node: str
    text: str
    version: str
    script: str
    pid: _Count
    pid_started: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    round: _Count | None
    world_size: _Count
    slots: _Count | list[_Count]
    slot: int | None
    rank: int | None
    failed_node: str | None
    log: str | None
    min: _Count
    max: _Count
    code: int | None
    outcome: str | None
    time: dict[str, dict[str, float]] | None


class _Limits(TypedDict, total=False):
    min: _Count
    max: _Count


class _Slot(TypedDict, total=False):
    steps: Annotated[float, msgspec.Meta(ge=0, lt=1 << 53)]  # a value of a metric, such as 20.0
    spent: dict[str, float]


class _TimelineLine(TypedDict, total=False):
    """The fields of the timeline that this program reads again."""

    at: Required[_Time]
    round: Required[_Count]
    phase: str
    world_size: _Count
    limits: _Limits | None
    slots: dict[Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")], _Slot]


def event(reason: Reason, at: float, job: str, node: str, **more: object) -> Event:
    """Return the event for a decision that was made ``at`` (seconds since the epoch)."""
    told = describe.event(reason)
    text = describe.sentence(reason, at)
    head = {"at": round(at, 6), "event": told.name, "level": told.level, "job": job, "node": node}
    return {**head, "text": text, **told.fields, **more}


def of_agent(what: str, at: float, job: str, node: str, text: str, **fields: object) -> Event:
    """Return an event that is no decision, such as the first or the last of an agent."""
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
    """Write events and the run's timeline in a thread, since a disk may be slow or unavailable.

    ``folder`` returns the run's folder, or None while the folder is unknown. The thread calls ``opened``
    once, with the folder, after it has written the first events. ``opened`` may raise OSError.
    """

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

    def note(self, measured: Mapping[str, Any]) -> None:
        """Write a line of the timeline."""
        self._put(TIMELINE, measured)

    def _put(self, name: str, what: Mapping[str, Any] | None) -> None:
        with suppress(queue.Full):
            self._queue.put_nowait((name, what, self._folder()))

    def nudge(self) -> None:
        """Write the events that waited for the folder, without a new event. Call it from time to time."""
        if not self._placed and self._folder() is not None:
            self._placed = True
            self._put(FILE, None)

    def _run(self) -> None:
        waiting: dict[str, list[bytes]] = {FILE: [], TIMELINE: []}
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
                    del lines[1:-WAITING_MAX]  # the disk may get room again; line 0 may be half written
                    if not troubled:
                        troubled = True
                        _log.warning("events cannot be written for now: %s", error)
        for file in files.values():
            os.close(file)


def _append(file: int, lines: list[bytes]) -> None:
    """Write the lines and remove them from the list. A full disk may cut a line: the rest of the line then
    stays in the list. Raises OSError when the disk is full."""
    while lines:
        written = os.write(file, b"".join(lines))
        while lines and written >= len(lines[0]):
            written -= len(lines.pop(0))
        if written:
            lines[0] = lines[0][written:]


# ---------------------------------------------------------------- reading


def read(folders: Sequence[Path]) -> list[Event]:
    """Return all events in these folders, sorted by time."""
    found: list[Event] = []
    for folder in folders:
        with suppress(OSError), (folder / FILE).open("rb") as file:
            found += _parsed(file.read(), _EventLine)
    return sorted(found, key=lambda e: float(e["at"]))


def read_timeline(folder: Path) -> list[dict[str, Any]]:
    """Return the timeline that one agent wrote. Lines that are not valid are left out."""
    with suppress(OSError), (folder / TIMELINE).open("rb") as file:
        return _parsed(file.read(), _TimelineLine)
    return []


def follow(
    folders: Callable[[], Sequence[Path]], parent: Path, process: Callable[[Event], int | None]
) -> Iterator[Event]:
    """Yield all events, and each new event as it is written, until no agent writes any more.

    ``folders`` is called again after every change in ``parent``, where new folders become known. ``process``
    takes an agent's first event and returns a pidfd, which this function closes, or None if the agent has
    ended.
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
                    fresh += _parsed(whole, _EventLine)
            for event in fresh:
                if event["event"] == STARTED and (end := process(event)) is not None:
                    writing.add(end)
                    cleanup.callback(os.close, end)
            yield from sorted(fresh, key=lambda e: float(e["at"]))
            if not writing:
                if over:
                    return
                over = True  # read once more: an agent may have written its last events after the read
                continue
            over = False
            writing -= notices.wait(writing)


def _no_number(word: str) -> float:
    raise ValueError(word)


def _parsed(data: bytes, kind: type[_EventLine | _TimelineLine]) -> list[dict[str, Any]]:
    """Return the valid lines. A crash may have left the last line half written."""
    found = []
    for line in data.splitlines():
        with suppress(msgspec.MsgspecError, ValueError, RecursionError):
            what = json.loads(line, parse_constant=_no_number)
            msgspec.convert(what, kind)
            found.append(what)
    return found


class _Notices:
    """Linux's inotify: wait for a change in the watched folders."""

    _MASK = 0x2 | 0x100 | 0x80  # IN_MODIFY, IN_CREATE, IN_MOVED_TO

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.inotify_init1(os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def watch(self, folder: Path) -> None:
        self._libc.inotify_add_watch(self._fd, os.fsencode(folder), self._MASK)

    def wait(self, others: Collection[int]) -> set[int]:
        """Wait until a watched folder changes or another descriptor is readable. Return the readable
        descriptors."""
        ready, _, _ = select.select([self._fd, *others], [], [])
        if self._fd in ready:
            os.read(self._fd, 65536)
        return set(ready) - {self._fd}

    def close(self) -> None:
        os.close(self._fd)
