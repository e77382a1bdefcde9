"""Heartbeats: one page of shared memory per worker. elasticd/worker/boot writes the page; this module reads
it."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from elasticd.core import page_layout as at
from elasticd.core.page_layout import PageContents, Use
from elasticd.procs.cleanup import make_owned_dir

PAGE_BYTES = 4096  # after the page, the file holds the worker's stacks if the agent has requested them
STACKS_BYTES_MAX = 1 << 22
_ALL_USES = sum(Use)
MAGIC = b"ELASTICD"
VERSION = 1
HEAD = struct.Struct("=8s4Q")  # magic, version, pid, steps, and the time of the last step
# At the end of the page: the times of the last 256 steps, in ns of CLOCK_MONOTONIC.
TIMES = struct.Struct("=256Q")
VARIABLE = "ELASTICD_PAGE"
BOOT_DIR = str(Path(__file__).parents[1] / "worker" / "boot")


def recorder_of(page: Path) -> Path:
    """Return the path of the socket where the worker of this page serves its flight recorder."""
    return page.with_name(f"{page.name}.recorder")


def shared_memory_dir() -> Path:
    """Make a folder that only this user may enter, in memory if possible."""
    for place in ("/dev/shm", None):  # noqa: S108  # the folder is new and has mode 0700
        with contextlib.suppress(OSError):
            return make_owned_dir(place, VARIABLE)
    raise OSError("neither /dev/shm nor the temporary folder can be written")


def _values(data: bytes, doubles: memoryview[float]) -> Iterator[tuple[str, float]]:
    if not data[at.VALUES * 8 :].strip(b"\0"):  # of most workers
        return
    for first in range(at.VALUES, at.WORDS, at.VALUE_WORDS):
        name = data[first * 8 : (first + at.NAME_WORDS) * 8].rstrip(b"\0").decode(errors="replace")
        if name.isidentifier():
            yield name, doubles[first + at.NAME_WORDS]


class Page:
    """The agent's side of one page. The page is read with pread and not mapped: a worker that truncates the
    file must not kill the agent with SIGBUS.

    ``again``: open an existing page a second time, for a thread that must not see the first descriptor
    closed.
    """

    def __init__(self, path: Path, *, again: bool = False) -> None:
        self.path = path
        self._owned = not again
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags if again else flags | os.O_CREAT | os.O_EXCL, 0o600)
        if self._owned:
            os.ftruncate(self._fd, PAGE_BYTES)
            os.pwrite(self._fd, HEAD.pack(MAGIC, VERSION, 0, 0, 0), 0)

    def step_times(self, after: int) -> tuple[int, tuple[float, ...]]:
        """Return the number of steps, and the times of the steps after ``after``, oldest first, in seconds of
        CLOCK_MONOTONIC. At most the last 250 steps are returned."""
        steps = self.contents().steps
        data = os.pread(self._fd, TIMES.size, PAGE_BYTES - TIMES.size)
        if len(data) < TIMES.size:
            return after, ()
        times = TIMES.unpack(data)
        first = max(after, steps - 250, 0) + 1
        return steps, tuple(times[n & 255] / 1e9 for n in range(first, steps + 1))

    def contents(self) -> PageContents:
        """Return the heartbeat and the worker's report of its training."""
        data = os.pread(self._fd, at.WORDS * 8, 0)
        if len(data) < at.WORDS * 8:
            return PageContents()
        with memoryview(data) as whole, whole.cast("Q") as words, whole.cast("d") as doubles:
            fatal = words[at.FATAL]
            return PageContents(
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
                measured=words[at.MEASURED],
                measured_s=words[at.MEASURED_NS] / 1e9,
                wait_s=words[at.WAIT_NS] / 1e9,
                waits=words[at.WAITS],
                shard_bytes=words[at.SHARD_BYTES],
                copies_bytes=words[at.COPIES_BYTES],
                delay_s=words[at.DELAY_NS] / 1e9,
                fatal=at.FATALS[fatal] if fatal < len(at.FATALS) else None,
                astray=words[at.ASTRAY] - 1 if words[at.ASTRAY] else None,
                commits=words[at.COMMITS],
                uses=Use(words[at.USES] & _ALL_USES),
                made=words[at.MADE] - 1 if words[at.MADE] else None,
                stacks_fd=words[at.STACKS] - 1,
                ended_well=words[at.ENDED_WELL] == 1,
                values=tuple(_values(data, doubles)),
            )

    def forget_stacks(self) -> None:
        os.ftruncate(self._fd, PAGE_BYTES)

    def stacks(self) -> bytes:
        """Return the stacks that the worker wrote since ``forget_stacks``."""
        size = os.fstat(self._fd).st_size - PAGE_BYTES
        return os.pread(self._fd, min(max(0, size), STACKS_BYTES_MAX), PAGE_BYTES)

    def close(self) -> None:
        os.close(self._fd)
        if self._owned:
            for path in (self.path, recorder_of(self.path)):
                with contextlib.suppress(OSError):
                    path.unlink()
