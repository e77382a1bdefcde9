"""Find workers that are slower than their peers, from each worker's own time for a step.

In lock-step training all ranks take the same time for a step, since the fast ranks wait for the slow one. So
a worker's own time leaves out its waits for other ranks. A straggler is a worker that was slower than its
peers in most periods of a window.

A worker's own time also leaves out the time in which the worker was ready to run but had no CPU. On a machine
with too few CPUs, chance decides which worker waits longest for a CPU. But this delay counts if a quota of
the workers' control group caused it, since another machine would not cause it. A quota delays all workers of
its node, so the same delay counts for all of them: at most the delay of the least delayed worker.

A worker measures all its steps if they are long, and some of them if they are short.

Nothing here reads a clock: the caller decides how long a period is.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, count
from operator import le
from statistics import median

from elasticd.core.page_layout import PageContents

PERIODS = 12  # periods in a window
MOST = 0.75  # the share of periods in which a straggler must have been slower
MAD_TO_SIGMA = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
MEDIAN_ERROR = 1.2533  # a median's standard error over that of a mean of the same values
SURE = 3.0  # how many standard errors of the median a straggler's ratio must lie above 1


def own_times(
    before: Mapping[int, PageContents], after: Mapping[int, PageContents], throttled_s: float
) -> dict[int, float]:
    """Return the own time for a step of each worker of one node, where it is known, by slot. ``before``,
    ``after``: the workers' pages. ``throttled_s``: how long a quota has delayed any process on this node
    meanwhile."""
    each = [(before[slot], after[slot]) for slot in after]
    delays_s = (min(throttled_s * _measured(a, b), b.delay_s - a.delay_s) for a, b in each)
    charged_s = min(delays_s, default=0.0)
    known = {slot: own_s(before[slot], after[slot], charged_s) for slot in after}
    return {slot: s for slot, s in known.items() if s is not None}


def own_s(before: PageContents, after: PageContents, charged_s: float = 0.0) -> float | None:
    """Return the worker's own time for one step between the two.

    Return None if there was no measured step, or no measured wait: the time may then include waits for other
    ranks. ``charged_s``: the part of the delay in the measured steps that counts.
    """
    steps = after.measured - before.measured
    if steps < 1 or after.waits <= before.waits:
        return None
    took_s, waited_s = after.measured_s - before.measured_s, after.wait_s - before.wait_s
    return max(0.0, took_s - waited_s - (after.delay_s - before.delay_s) + charged_s) / steps


def _measured(before: PageContents, after: PageContents) -> float:
    """Return the share of the worker's steps between the two that were measured."""
    return min(1.0, (after.measured - before.measured) / max(1, after.steps - before.steps))


@dataclass(frozen=True, slots=True)
class Period:
    """The own times of all workers in one period, by rank; sorted once, as there may be many.

    ``middle``: the two middle times of all workers but the slowest (one time twice if their number is odd),
    each with the next longer time. ``ratio`` takes the next longer time for a worker that is itself among the
    faster half. ``usual_s``: the median of all. ``behind``: the ranks that were at least ``calm`` times as
    slow as their peers.
    """

    own: array[float]
    middle: tuple[tuple[float, float], tuple[float, float]]
    usual_s: float
    behind: frozenset[int]

    @classmethod
    def of(cls, own: Sequence[float], calm: float) -> Period:
        ordered = sorted(own)
        peers = len(ordered) - 1
        if not peers:
            return cls(array("d", own), ((0.0, 0.0), (0.0, 0.0)), ordered[0], frozenset())
        low, high = (peers - 1) // 2, peers // 2
        middle = (ordered[low], ordered[low + 1]), (ordered[high], ordered[high + 1])
        usual_s = (ordered[peers // 2] + ordered[(peers + 1) // 2]) / 2
        period = cls(array("d", own), middle, usual_s, frozenset())
        least_s = calm * (middle[0][0] + middle[1][0]) / 2 * (1 - 1e-9)
        maybe = compress(count(), map(partial(le, least_s), own))
        return replace(period, behind=frozenset(rank for rank in maybe if period.ratio(rank) >= calm))

    def ratio(self, rank: int) -> float:
        """Return the ratio of a worker's own time to the median of its peers', all other workers."""
        own_s = self.own[rank]
        peers_s = sum(longer_s if own_s <= s else s for s, longer_s in self.middle)
        return 2 * own_s / peers_s if peers_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Watch:
    """The last periods, oldest first. ``named``: the ranks of the stragglers. ``limit``: the least ratio of a
    straggler."""

    periods: tuple[Period, ...] = ()
    named: frozenset[int] = frozenset()
    limit: float = 1.1

    @property
    def calm(self) -> float:
        """The ratio below which a worker no longer counts as slow."""
        return 1 + (self.limit - 1) / 2

    @property
    def usual_s(self) -> float:
        """The median of all own times in the last period; 0 before the first."""
        return self.periods[-1].usual_s if self.periods else 0.0

    def see(self, own: Sequence[float]) -> Watch:
        """Return the watch after one more period, in which the workers had these own times, by rank."""
        watch = replace(self, periods=(*self.periods, Period.of(own, self.calm))[-PERIODS:])
        return replace(watch, named=watch._judge())

    def ratio(self, rank: int) -> float:
        """Return the recent ratio of a worker's own time to its peers'."""
        return median(period.ratio(rank) for period in self.periods)

    def _judge(self) -> frozenset[int]:
        world = len(self.periods[-1].own)
        if len(self.periods) < PERIODS or world < 2:
            return frozenset()
        behind = Counter(rank for period in self.periods for rank in period.behind)
        often = {rank for rank, times in behind.items() if times >= MOST * len(self.periods)}
        slow = {rank for rank in often if self._is_surely_slow(rank)}
        slow |= {rank for rank in self.named if self.ratio(rank) >= self.calm}
        # If half of the workers or more are slow, there are two kinds of machines, and no stragglers.
        return frozenset(slow) if 2 * len(slow) < world or len(slow) == 1 else frozenset()

    def _is_surely_slow(self, rank: int) -> bool:
        over_time = [period.ratio(rank) for period in self.periods]
        ratio = median(over_time)
        spread = MAD_TO_SIGMA * median(abs(r - ratio) for r in over_time)
        error = MEDIAN_ERROR * spread / math.sqrt(len(over_time))
        return ratio >= self.limit and ratio - 1 >= SURE * error
