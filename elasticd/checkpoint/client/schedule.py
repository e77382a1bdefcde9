"""Decide when a training saves: the same answer on all ranks, with as little communication as possible."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Final

from elasticd.core.cadence import Cadence, EverySteps, between_failures_s, interval_s, look
from elasticd.worker.world.collectives import Together

_NOT_MINE: Final = 1 << 62  # larger than any number of rank 0's


@dataclass(slots=True)
class Schedule:
    """When to save. Call ``due`` with each step, and ``begin`` after a change of world. ``cost_s`` and
    ``durable_s``: the measured times of the last save."""

    cadence: Cadence
    cost_s: float = 0.0
    durable_s: float = 0.0
    _since: float = field(default_factory=time.monotonic)
    _next: int = 0  # the step at which to ask again
    _mark: tuple[int, float] | None = None  # a step and its time
    _asked: tuple[int, int] | None = None  # the last two steps that ``due`` was called with

    def begin(self) -> None:
        self._next, self._mark, self._asked = 0, None, None

    def due(self, step: int, together: Together) -> bool:
        """Whether to save at this step. Raises as collectives do."""
        if isinstance(self.cadence, EverySteps):
            before, last = self._asked or (step - 1, step)
            if step != last:
                before = last
            self._asked = before, step
            return step > 0 and step // self.cadence.steps > before // self.cadence.steps
        if step < self._next:
            return False
        now = time.monotonic()
        mine = [_NOT_MINE, _NOT_MINE]
        if together.rank == 0:
            interval = interval_s(self.cadence, self.cost_s, self.durable_s, _between_failures_s())
            step_s = None
            if self._mark is not None and step > self._mark[0]:
                step_s = (now - self._mark[1]) / (step - self._mark[0])
            answer = look(step, now, self._since + interval, step_s)
            mine = [int(answer.save), answer.next]
            self._mark = (step, now)
        save, self._next = together.least(mine)
        if save:
            self._since = now
        return bool(save)


def _between_failures_s() -> float:
    """Return this job's mean time between failures, on all its nodes."""
    began = float(os.environ.get("ELASTICD_BEGAN", "0")) or time.time()
    return between_failures_s(int(os.environ.get("ELASTICD_FAILURES", "0")), time.time() - began)
