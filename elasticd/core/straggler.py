"""Is a worker slower than its peers, and which? From each worker's own time for a step.

In lock-step training all ranks take the same time for a step, whoever is slow: the others wait for it.
So what is compared is the time without what was spent waiting for other ranks. One period's own times
say little; a worker is named when it was slower than its peers for most of a window of them.

Nor does the time count in which a worker was ready to run and other processes had the processors: on a
machine that has too few, chance decides who waits longest for one, and nobody is slow by itself. Where a
quota of the workers' control group held them up, the time counts: elsewhere they would not be held up. A
quota holds up all workers of its node, so each is charged alike, with no more than any of them was delayed.

Nothing here depends on a clock: a period is what the caller says is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

Place = tuple[str, int]  # node and slot

PERIODS = 12  # of a window
MOST = 0.75  # of them in which it must have been slower
MAD_TO_SIGMA = 1.4826
SURE = 3.0  # standard errors of the median


@dataclass(frozen=True, slots=True)
class Strides:
    """A worker's steps up to now. ``at``: when the last was made; ``wait_s``: how long it has waited for
    other ranks in all these, as far as that was measured, ``waits`` times; ``delay_s``: for how long it was
    ready to run, outside these waits, and had no processor."""

    steps: int
    at: float
    wait_s: float
    waits: int
    delay_s: float = 0.0


def own_times(
    before: Mapping[int, Strides], after: Mapping[int, Strides], throttled_s: float
) -> dict[int, float]:
    """Of the workers of one node, by slot, as far as they are known. ``throttled_s``: for how long a
    quota has held up anything on this node meanwhile."""
    charged_s = min([throttled_s, *(after[slot].delay_s - before[slot].delay_s for slot in after)])
    known = {slot: own_s(before[slot], after[slot], charged_s) for slot in after}
    return {slot: s for slot, s in known.items() if s is not None}


def own_s(before: Strides, after: Strides, charged_s: float = 0.0) -> float | None:
    """Its own time for one of the steps between; None where there was none, or no wait was measured:
    then its time is not known from the others'. ``charged_s``: of its delay, what counts."""
    steps = after.steps - before.steps
    if steps < 1 or after.waits <= before.waits:
        return None
    took_s, waited_s = after.at - before.at, after.wait_s - before.wait_s
    return max(0.0, took_s - waited_s - (after.delay_s - before.delay_s) + charged_s) / steps


@dataclass(frozen=True, slots=True)
class Tolerance:
    """``ratio``: to its peers' time, from which a worker is a straggler."""

    ratio: float = 1.1

    @property
    def calm(self) -> float:
        """Below this it is none any more."""
        return 1 + (self.ratio - 1) / 2


@dataclass(frozen=True, slots=True)
class Watch:
    """The periods of the window, oldest first: each the own times of all workers; and who is named."""

    periods: tuple[Mapping[Place, float], ...] = ()
    named: frozenset[Place] = frozenset()
    tolerance: Tolerance = field(default_factory=Tolerance)

    def see(self, times: Mapping[Place, float]) -> Watch:
        """After one period more. Workers come and go together: another set of them is another world, and
        nothing is known of it yet."""
        before = self.periods if self.periods and self.periods[-1].keys() == times.keys() else ()
        periods = (*before, times)[-PERIODS:]
        named = self.named if before else frozenset()
        return Watch(periods, _judge(periods, named, self.tolerance), self.tolerance)

    @property
    def ratios(self) -> dict[Place, float]:
        """Of each worker's own time to its peers' of late."""
        if not self.periods or len(self.periods[-1]) < 2:
            return {}
        return {place: median(_over_time(self.periods, place)) for place in self.periods[-1]}


def _judge(
    periods: tuple[Mapping[Place, float], ...], named: frozenset[Place], tolerance: Tolerance
) -> frozenset[Place]:
    if len(periods) < PERIODS or len(periods[-1]) < 2:
        return frozenset()
    slow = set()
    for place in periods[-1]:
        over_time = _over_time(periods, place)
        ratio = median(over_time)
        spread = MAD_TO_SIGMA * median(abs(r - ratio) for r in over_time)
        error = 1.2533 * spread / math.sqrt(len(over_time))
        often = sum(r >= tolerance.calm for r in over_time) >= MOST * len(over_time)
        surely = ratio >= tolerance.ratio and ratio - 1 >= SURE * error
        if (often and surely) or (place in named and ratio >= tolerance.calm):
            slow.add(place)
    # Where it is half of them or more, the machines are of two kinds, and nobody lags behind.
    return frozenset(slow) if 2 * len(slow) < len(periods[-1]) or len(slow) == 1 else frozenset()


def _over_time(periods: tuple[Mapping[Place, float], ...], place: Place) -> list[float]:
    return [_ratio(times, place) for times in periods]


def _ratio(times: Mapping[Place, float], place: Place) -> float:
    peers = median(s for other, s in times.items() if other != place)
    return times[place] / peers if peers > 0 else 1.0
