"""Heartbeats: one page of shared memory per worker, written there (elasticd/worker/boot), read here."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from elasticd.procs.leftovers import make_owned_dir

PAGE_BYTES = 4096
MAGIC = b"ELASTICD"
VERSION = 1
# magic, version, pid, steps, CLOCK_MONOTONIC ns of the last step, phase: native order, 8 bytes each
LAYOUT = struct.Struct("=8s5Q")
VARIABLE = "ELASTICD_PAGE"
BOOT_DIR = str(Path(__file__).parents[1] / "worker" / "boot")


class WorkerPhase(IntEnum):
    UNSEEN = 0  # not a Python program, or not there yet
    STARTED = 1
    IMPORTED = 2  # torch is there
    STEPPING = 3


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a worker wrote. ``at``: of its last step, seconds since the epoch; 0 for never."""

    pid: int
    steps: int
    at: float
    phase: WorkerPhase


def shared_memory_dir() -> Path:
    """Make a folder only its owner may enter, in memory where there is such a place."""
    for place in ("/dev/shm", None):  # noqa: S108  # what is made there is new, and of mode 0700
        with contextlib.suppress(OSError):
            return make_owned_dir(place, VARIABLE)
    raise OSError("neither /dev/shm nor the temporary folder can be written")


class Page:
    """The agent's side of one page. Read with pread, not mapped: a worker that truncates its page
    must not be able to kill the agent with SIGBUS."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o600)
        os.ftruncate(self._fd, PAGE_BYTES)
        os.pwrite(self._fd, LAYOUT.pack(MAGIC, VERSION, 0, 0, 0, 0), 0)

    def read(self) -> Heartbeat:
        data = os.pread(self._fd, LAYOUT.size, 0)
        if len(data) < LAYOUT.size:
            return Heartbeat(0, 0, 0.0, WorkerPhase.UNSEEN)
        _, _, pid, steps, last_ns, phase = LAYOUT.unpack(data)
        at = time.time() - (time.monotonic_ns() - last_ns) / 1e9 if last_ns else 0.0
        return Heartbeat(pid, steps, at, WorkerPhase(min(phase, max(WorkerPhase))))

    def close(self) -> None:
        os.close(self._fd)
        with contextlib.suppress(OSError):
            self.path.unlink()
