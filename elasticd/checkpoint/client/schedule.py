"""When a training saves: every N steps, every N seconds, or at the best interval. All ranks decide the same,
with as little communication as possible."""

from __future__ import annotations

import math
import os
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from elasticd.checkpoint.client.collectives import RankGroup

BELIEVED_S: Final = 6 * 3600.0  # the assumed time between failures, before the first failure
LEAST_S: Final = 1.0
_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}
_NOT_MINE: Final = 1 << 62  # larger than rank 0's numbers, so that ``minimum`` returns rank 0's numbers


@dataclass(frozen=True, slots=True)
class EverySteps:
    steps: int


@dataclass(frozen=True, slots=True)
class EverySeconds:
    seconds: float


@dataclass(frozen=True, slots=True)
class Auto:
    """The interval at which the cost of saving and the cost of lost work are least together."""


Cadence = EverySteps | EverySeconds | Auto


def parse_cadence(text: str) -> Cadence:
    """Return the cadence of ``100`` (steps), ``90s``, ``10m``, ``1h`` or ``auto``. Raises ValueError with a
    clause for people."""
    if text == "auto":
        return Auto()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is neither a number of steps (100), a time (90s, 10m, 1h) nor auto")
    if match[2]:
        return EverySeconds(max(LEAST_S, float(match[1]) * _SECONDS[match[2]]))
    if "." in match[1]:
        raise ValueError(f"{text} is no whole number of steps; for a time, say {text}s")
    return EverySteps(int(match[1]))


def between_failures_s(failures: int, over_s: float) -> float:
    """Return the mean time between failures after ``failures`` failures in ``over_s`` seconds. The assumed
    time counts like one failure."""
    return (BELIEVED_S + max(0.0, over_s)) / (1 + failures)


def best_interval_s(cost_s: float, between_s: float) -> float:
    """Return the best time between two saves, in seconds of training: Daly's refinement of Young's sqrt(2 C
    M).

    ``cost_s``: how long a save holds up training. ``between_s``: the mean time between failures.
    """
    cost_s, between_s = max(cost_s, 1e-6), max(between_s, LEAST_S)
    if cost_s >= 2 * between_s:
        return max(LEAST_S, between_s)
    x = cost_s / (2 * between_s)
    return max(LEAST_S, math.sqrt(2 * cost_s * between_s) * (1 + math.sqrt(x) / 3 + x / 9) - cost_s)


def interval_s(cadence: EverySeconds | Auto, cost_s: float, durable_s: float, between_s: float) -> float:
    """Return the time from one save to the next. ``durable_s``: how long the last checkpoint took until its
    commit. No save is due before the last one can be committed."""
    if isinstance(cadence, EverySeconds):
        return cadence.seconds
    return max(best_interval_s(cost_s, between_s), durable_s)


@dataclass(frozen=True, slots=True)
class CadenceLook:
    """Whether to save now, and the step at which to ask again."""

    save: bool
    next: int


def look(step: int, now: float, due: float, step_s: float | None) -> CadenceLook:
    """Decide whether to save at this step.

    All ranks must save at the same step, so one rank's clock decides for all. To keep that cheap, the answer
    says when to ask again, at about half of the time left. ``step_s``: the time of a step, if it is known.
    """
    if step_s is None:
        return CadenceLook(False, step + 1)
    left = (due - now) / max(step_s, 1e-9)
    if left < 0.5:
        return CadenceLook(True, step + 1)
    return CadenceLook(False, step + max(1, int(left / 2)))


@dataclass(slots=True)
class Schedule:
    """When to save. Call ``due`` with each step, and ``begin`` after a change of world. ``cost_s`` and
    ``durable_s``: the measured times of the last save."""

    cadence: Cadence
    cost_s: float = 0.0
    durable_s: float = 0.0
    _since: float = field(default_factory=time.monotonic)
    _next: int = 0  # the step at which to ask again
    _mark: tuple[int, float] | None = None  # a step, and the time when it was made
    _asked: tuple[int, int] | None = None  # the last two steps that ``due`` was called with

    def begin(self) -> None:
        self._next, self._mark, self._asked = 0, None, None

    def due(self, step: int, ranks: RankGroup) -> bool:
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
        if ranks.rank == 0:
            interval = interval_s(self.cadence, self.cost_s, self.durable_s, _between_failures_s())
            step_s = None
            if self._mark is not None and step > self._mark[0]:
                step_s = (now - self._mark[1]) / (step - self._mark[0])
            answer = look(step, now, self._since + interval, step_s)
            mine = [int(answer.save), answer.next]
            self._mark = (step, now)
        save, self._next = ranks.minimum(mine)
        if save:
            self._since = now
        return bool(save)


def _between_failures_s() -> float:
    """Return this job's mean time between failures, on all its nodes."""
    began = float(os.environ.get("ELASTICD_BEGAN", "0")) or time.time()
    return between_failures_s(int(os.environ.get("ELASTICD_FAILURES", "0")), time.time() - began)
