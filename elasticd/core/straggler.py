"""Find workers that are slower than their peers, from each worker's own time for a step.

In lock-step training all ranks take the same time for a step, since the fast ranks wait for the slow one. So
a worker's own time leaves out its waits for other ranks. A straggler is a worker that was slower than its
peers in most periods of a window.

A worker's own time also leaves out the time in which the worker was ready to run but had no CPU. On a machine
with too few CPUs, chance decides which worker waits longest for a CPU. But this delay counts if a quota of
the workers' control group caused it, since another machine would not cause it. A quota delays all workers of
its node, so the same delay counts for all of them: at most the delay of the least delayed worker.

Nothing here reads a clock: the caller decides how long a period is.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

Place = tuple[str, int]  # node and slot

PERIODS = 12  # periods in a window
MOST = 0.75  # the share of periods in which a straggler must have been slower
MAD_TO_SIGMA = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
SURE = 3.0  # how many standard errors of the median a straggler's ratio must lie above 1


@dataclass(frozen=True, slots=True)
class Strides:
    """A worker's steps so far.

    ``at``: the time of the last step. ``wait_s``: the total measured wait for other ranks, in ``waits``
    waits. ``delay_s``: how long it was ready to run but had no CPU, outside its waits.
    """

    steps: int
    at: float
    wait_s: float
    waits: int
    delay_s: float = 0.0


def own_times(
    before: Mapping[int, Strides], after: Mapping[int, Strides], throttled_s: float
) -> dict[int, float]:
    """Return the own time for a step of each worker of one node, where it is known, by slot. ``throttled_s``:
    how long a quota has delayed any process on this node meanwhile."""
    charged_s = min([throttled_s, *(after[slot].delay_s - before[slot].delay_s for slot in after)])
    known = {slot: own_s(before[slot], after[slot], charged_s) for slot in after}
    return {slot: s for slot, s in known.items() if s is not None}


def own_s(before: Strides, after: Strides, charged_s: float = 0.0) -> float | None:
    """Return the worker's own time for one step between the two.

    Return None if there was no step, or no measured wait: the time may then include waits for other ranks.
    ``charged_s``: the part of its delay that counts.
    """
    steps = after.steps - before.steps
    if steps < 1 or after.waits <= before.waits:
        return None
    took_s, waited_s = after.at - before.at, after.wait_s - before.wait_s
    return max(0.0, took_s - waited_s - (after.delay_s - before.delay_s) + charged_s) / steps


@dataclass(frozen=True, slots=True)
class Watch:
    """The last periods, and the stragglers. ``periods``: oldest first, each with the ratio of every worker's
    own time to its peers'. ``usual_s``: the median of all own times in the last period. ``named``: the
    stragglers. ``limit``: the least ratio of a straggler."""

    periods: tuple[Mapping[Place, float], ...] = ()
    usual_s: float = 0.0
    named: frozenset[Place] = frozenset()
    limit: float = 1.1

    def see(self, times: Mapping[Place, float]) -> Watch:
        """Return the watch after one more period. Another set of workers is another world, of which nothing
        is known yet."""
        before = self.periods if self.periods and self.periods[-1].keys() == times.keys() else ()
        periods = (*before, peer_ratios(times))[-PERIODS:]
        named = _judge(periods, self.named if before else frozenset(), self.limit)
        return Watch(periods, median(times.values()) if times else 0.0, named, self.limit)

    @property
    def ratios(self) -> dict[Place, float]:
        """The recent ratio of each worker's own time to its peers'."""
        if not self.periods or len(self.periods[-1]) < 2:
            return {}
        return {place: median(_over_time(self.periods, place)) for place in self.periods[-1]}


def peer_ratios(times: Mapping[Place, float]) -> dict[Place, float]:
    """Return the ratio of each worker's own time to the median of its peers'. Workers are sorted once, as
    there may be many."""
    ordered = sorted(times.values())
    peers = len(ordered) - 1

    def ratio(own_s: float) -> float:
        mine = bisect_left(ordered, own_s)
        low, high = ((ordered[n + (n >= mine)]) for n in ((peers - 1) // 2, peers // 2))
        return 2 * own_s / (low + high) if low + high > 0 else 1.0

    return {place: ratio(own_s) if peers else 1.0 for place, own_s in times.items()}


def _judge(
    periods: tuple[Mapping[Place, float], ...], named: frozenset[Place], limit: float
) -> frozenset[Place]:
    if len(periods) < PERIODS or len(periods[-1]) < 2:
        return frozenset()
    slow, calm = set(), 1 + (limit - 1) / 2  # below ``calm`` a worker no longer counts
    for place in periods[-1]:
        over_time = _over_time(periods, place)
        ratio = median(over_time)
        spread = MAD_TO_SIGMA * median(abs(r - ratio) for r in over_time)
        error = 1.2533 * spread / math.sqrt(len(over_time))
        often = sum(r >= calm for r in over_time) >= MOST * len(over_time)
        surely = ratio >= limit and ratio - 1 >= SURE * error
        if (often and surely) or (place in named and ratio >= calm):
            slow.add(place)
    # If half of the workers or more are slow, there are two kinds of machines, and no stragglers.
    return frozenset(slow) if 2 * len(slow) < len(periods[-1]) or len(slow) == 1 else frozenset()


def _over_time(periods: tuple[Mapping[Place, float], ...], place: Place) -> list[float]:
    return [ratios[place] for ratios in periods]
