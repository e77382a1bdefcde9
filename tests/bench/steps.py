"""Reads what the measured job writes, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StepMade:
    """``at``: seconds of CLOCK_MONOTONIC."""

    at: float
    rank: int
    world: int
    pid: int
    step: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark of a process's progress towards its first step. ``at``: as of a step."""

    at: float
    what: str
    pid: int


class Steps:
    """The job's step file, read while the job writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self._file = path.open()
        self._partial = ""
        self.made: list[StepMade] = []
        self.marks: list[Mark] = []

    def read(self) -> None:
        lines = (self._partial + self._file.read()).split("\n")
        self._partial = lines.pop()
        for line in lines:
            at, *rest = line.split()
            if len(rest) == 2:
                self.marks.append(Mark(float(at), rest[0], int(rest[1])))
            else:
                rank, world, pid, step = map(int, rest)
                self.made.append(StepMade(float(at), rank, world, pid, step))

    def first(self, wanted: Callable[[StepMade], bool], timeout_s: float, since: int = 0) -> StepMade | None:
        """Return the first wanted step after index ``since``; None after the timeout. The job's own times
        are measured, so it does not matter how often this looks."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.read()
            for made in self.made[since:]:
                if wanted(made):
                    return made
            since = len(self.made)
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)

    def close(self) -> None:
        self._file.close()
