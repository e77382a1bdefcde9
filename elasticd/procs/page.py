"""Heartbeats: one page of shared memory per worker, written there (elasticd/worker/boot), read here."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from elasticd.core import page as at
from elasticd.core.page import Told, Use
from elasticd.procs.leftovers import make_owned_dir

PAGE_BYTES = 4096  # what the file is longer is the stacks of a worker that was asked for them
STACKS_BYTES_MAX = 1 << 22
_ALL_USES = sum(Use)
MAGIC = b"ELASTICD"
VERSION = 1
# magic, version, pid, steps, CLOCK_MONOTONIC ns of the last step, phase, 1 + the descriptor that it
# writes its stacks to, 1 if its script ended well: native order, 8 bytes each; and in the second half
# the ns of the last 256 steps
LAYOUT = struct.Struct("=8s7Q")
TIMES = struct.Struct("=256Q")
VARIABLE = "ELASTICD_PAGE"
BOOT_DIR = str(Path(__file__).parents[1] / "worker" / "boot")


class WorkerPhase(IntEnum):
    UNSEEN = 0  # not a Python program, or not there yet
    STARTED = 1
    IMPORTED = 2  # torch is there
    STEPPING = 3


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a worker wrote. ``at``: of its last step, seconds since the epoch; 0 for never.
    ``stacks_fd``: the descriptor that it writes its stacks to; -1 if it cannot. ``ended_well``: its
    script ran to its end, and all that it wanted done at its end is done; only Python's own end, whose
    status is 0, was still to come."""

    pid: int
    steps: int
    at: float
    phase: WorkerPhase
    stacks_fd: int = -1
    ended_well: bool = False


def recorder_of(page: Path) -> Path:
    """The socket at which the worker of this page gives its flight recorder away, once it may."""
    return page.with_name(f"{page.name}.recorder")


def shared_memory_dir() -> Path:
    """Make a folder only its owner may enter, in memory where there is such a place."""
    for place in ("/dev/shm", None):  # noqa: S108  # what is made there is new, and of mode 0700
        with contextlib.suppress(OSError):
            return make_owned_dir(place, VARIABLE)
    raise OSError("neither /dev/shm nor the temporary folder can be written")


def _values(data: bytes, doubles: memoryview[float]) -> Iterator[tuple[str, float]]:
    for first in range(at.VALUES, at.WORDS, at.VALUE_WORDS):
        name = data[first * 8 : (first + at.NAME_WORDS) * 8].rstrip(b"\0").decode(errors="replace")
        if name.isidentifier():
            yield name, doubles[first + at.NAME_WORDS]


class Page:
    """The agent's side of one page. Read with pread, not mapped: a worker that truncates its page
    must not be able to kill the agent with SIGBUS.

    ``again``: a page that is there, for another thread, which must not see its descriptor closed.
    """

    def __init__(self, path: Path, *, again: bool = False) -> None:
        self.path = path
        self._owned = not again
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags if again else flags | os.O_CREAT | os.O_EXCL, 0o600)
        if self._owned:
            os.ftruncate(self._fd, PAGE_BYTES)
            os.pwrite(self._fd, LAYOUT.pack(MAGIC, VERSION, 0, 0, 0, 0, 0, 0), 0)

    def read(self) -> Heartbeat:
        data = os.pread(self._fd, LAYOUT.size, 0)
        if len(data) < LAYOUT.size:
            return Heartbeat(0, 0, 0.0, WorkerPhase.UNSEEN)
        _, _, pid, steps, last_ns, phase, stacks, ended_well = LAYOUT.unpack(data)
        when = time.time() - (time.monotonic_ns() - last_ns) / 1e9 if last_ns else 0.0
        stage = WorkerPhase(min(phase, max(WorkerPhase)))
        return Heartbeat(pid, steps, when, stage, stacks - 1, ended_well == 1)

    def step_times(self, after: int) -> tuple[int, tuple[float, ...]]:
        """How many steps there were by now, and when those after the given one were, oldest first, in
        seconds of CLOCK_MONOTONIC; of more than 250 steps the first are not told."""
        steps = self.read().steps
        data = os.pread(self._fd, TIMES.size, PAGE_BYTES - TIMES.size)
        if len(data) < TIMES.size:
            return after, ()
        times = TIMES.unpack(data)
        first = max(after, steps - 250, 0) + 1
        return steps, tuple(times[n & 255] / 1e9 for n in range(first, steps + 1))

    def told(self) -> Told:
        """What the worker says of its training, and what is measured of it."""
        data = os.pread(self._fd, at.WORDS * 8, 0)
        if len(data) < at.WORDS * 8:
            return Told()
        with memoryview(data) as whole, whole.cast("Q") as words, whole.cast("d") as doubles:
            fatal = words[at.FATAL]
            return Told(
                pid=words[at.PID],
                steps=words[at.STEPS],
                samples=words[at.SAMPLES],
                committed=words[at.COMMITTED] - 1 if words[at.COMMITTED] else None,
                nonfinite=words[at.NONFINITE],
                held_s=words[at.HELD_NS] / 1e9,
                held=words[at.HELD],
                base=words[at.BASE] - 1 - words[at.BASE_STEPS] if words[at.BASE] else None,
                loss=doubles[at.LOSS] if words[at.LOSSES] else None,
                stepped_at=words[at.LAST_NS] / 1e9,
                wait_s=words[at.WAIT_NS] / 1e9,
                waits=words[at.WAITS],
                delay_s=words[at.DELAY_NS] / 1e9,
                fatal=at.FATALS[fatal] if fatal < len(at.FATALS) else None,
                astray=words[at.ASTRAY] - 1 if words[at.ASTRAY] else None,
                commits=words[at.COMMITS],
                uses=Use(words[at.USES] & _ALL_USES),
                made=words[at.MADE] - 1 if words[at.MADE] else None,
                values=tuple(_values(data, doubles)),
            )

    def forget_stacks(self) -> None:
        os.ftruncate(self._fd, PAGE_BYTES)

    def stacks(self) -> bytes:
        """What the worker wrote since they were forgotten."""
        size = os.fstat(self._fd).st_size - PAGE_BYTES
        return os.pread(self._fd, min(max(0, size), STACKS_BYTES_MAX), PAGE_BYTES)

    def close(self) -> None:
        os.close(self._fd)
        if self._owned:
            for path in (self.path, recorder_of(self.path)):
                with contextlib.suppress(OSError):
                    path.unlink()
