"""How a script scales, from the times of its workers' steps. Pure.

A worker waits at the end of a step until the gradients are added up. The worker that waits least in a step
waits for the communication alone; what the others wait longer, they wait for that worker.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from elasticd.core.straggler import PERIODS, Watch

WARM_UP_S = 2.0  # the first steps do not count: they allocate, compile, and start the processes of loaders
STEPS_MIN = PERIODS  # as many steps are needed to compare workers
SLOW = 1.2  # a slow worker's own time for a step over its peers'


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A worker's sums at the end of a step, since its process began. ``at_s``: seconds of CLOCK_MONOTONIC.
    ``no_cpu_s``: how long the worker was ready to run but had no CPU. ``parameter_bytes``: their gradients
    are as large."""

    rank: int
    step: int
    at_s: float
    wait_s: float
    data_s: float
    no_cpu_s: float
    samples: int
    parameter_bytes: int


StepsOfWorkers = Mapping[int, Sequence[StepRecord]]  # by rank; the first record is of step 1


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What the time of a step goes into, in seconds, as the average of all workers."""

    data_s: float
    compute_s: float
    communication_s: float
    waiting_s: float
    no_cpu_s: float

    @property
    def step_s(self) -> float:
        return self.data_s + self.compute_s + self.communication_s + self.waiting_s + self.no_cpu_s

    def share(self, seconds: float) -> float:
        return seconds / self.step_s if self.step_s else 0.0


@dataclass(frozen=True, slots=True)
class WorldMeasured:
    """What one launcher did with one number of workers. ``steps``: how many steps of each worker were
    measured. ``steps_per_s``, ``samples_per_s``: of all workers together; no samples are known if
    ``samples_per_s`` is 0. ``slow``: the ranks of slow workers, each with its own time over its peers'."""

    launcher: str
    world: int
    steps: int
    steps_per_s: float
    samples_per_s: float
    costs: StepCosts
    slow: Mapping[int, float]
    parameter_bytes: int

    @property
    def throughput(self) -> float:
        """Samples per second; if they are unknown, steps of all workers per second."""
        return self.samples_per_s or self.steps_per_s

    @property
    def batch(self) -> float:
        """A worker's samples in a step; 0 if they are unknown."""
        return self.samples_per_s / self.steps_per_s


def counted(made: StepsOfWorkers, world: int, warm_up: int) -> range:
    """Return the steps that count: each worker has made them, after its first ``warm_up`` steps and its first
    ``WARM_UP_S``. Empty if there are none."""
    if len(made) < world:
        return range(0)
    warm = [bisect_left(steps, steps[0].at_s + WARM_UP_S, key=_at) + 1 for steps in made.values()]
    return range(max(warm_up, *warm) + 1, min(map(len, made.values())) + 1)


def spent_s(made: StepsOfWorkers, steps: range) -> float:
    """Return how long these steps took, in the worker that took least."""
    return min(_took_s(of, steps) for of in made.values()) if steps else 0.0


def measure(launcher: str, made: StepsOfWorkers, steps: range) -> WorldMeasured:
    """Return what the workers did in these steps, at least one."""
    took = {rank: _took_s(of, steps) for rank, of in made.items()}
    samples = {rank: of[steps[-1] - 1].samples - of[steps[0] - 2].samples for rank, of in made.items()}
    return WorldMeasured(
        launcher=launcher,
        world=len(made),
        steps=len(steps),
        steps_per_s=sum(len(steps) / s for s in took.values()),
        samples_per_s=sum(samples[rank] / s for rank, s in took.items()),
        costs=_costs(made, steps),
        slow=_slow(made, steps),
        parameter_bytes=max(of[-1].parameter_bytes for of in made.values()),
    )


def speed_up(one: WorldMeasured, baseline: WorldMeasured) -> float:
    return one.throughput / baseline.throughput


def efficiency(one: WorldMeasured, baseline: WorldMeasured) -> float:
    """Return the throughput per worker, as a share of the baseline's."""
    return speed_up(one, baseline) * baseline.world / one.world


def _at(record: StepRecord) -> float:
    return record.at_s


def _took_s(of: Sequence[StepRecord], steps: range) -> float:
    return max(of[steps[-1] - 1].at_s - of[steps[0] - 2].at_s, 1e-9)


def _costs(made: StepsOfWorkers, steps: range) -> StepCosts:
    each: list[StepCosts] = []
    for step in steps:
        ends = [(of[step - 2], of[step - 1]) for of in made.values()]
        least_s = min(after.wait_s - before.wait_s for before, after in ends)
        each += [_cost(before, after, least_s) for before, after in ends]
    return StepCosts(
        *(
            fmean(getattr(cost, name) for cost in each)
            for name in ("data_s", "compute_s", "communication_s", "waiting_s", "no_cpu_s")
        )
    )


def _cost(before: StepRecord, after: StepRecord, communication_s: float) -> StepCosts:
    waited_s = after.wait_s - before.wait_s
    data_s, no_cpu_s = after.data_s - before.data_s, after.no_cpu_s - before.no_cpu_s
    compute_s = max(0.0, after.at_s - before.at_s - waited_s - data_s - no_cpu_s)
    return StepCosts(data_s, compute_s, communication_s, waited_s - communication_s, no_cpu_s)


def _slow(made: StepsOfWorkers, steps: range) -> dict[int, float]:
    """Return the ranks that are slower than their peers in most parts of the measurement, as the leader of a
    job judges stragglers."""
    if len(steps) < PERIODS or sorted(made) != list(range(len(made))):
        return {}
    ends = [steps[0] - 2 + math.floor(len(steps) * part / PERIODS) for part in range(PERIODS + 1)]
    watch = Watch(limit=SLOW)
    for first, last in pairwise(ends):
        watch = watch.see([_own_s(made[rank][first], made[rank][last]) for rank in sorted(made)])
    return {rank: watch.ratio(rank) for rank in sorted(watch.named)}


def _own_s(before: StepRecord, after: StepRecord) -> float:
    took_s = after.at_s - before.at_s
    return max(0.0, took_s - (after.wait_s - before.wait_s) - (after.no_cpu_s - before.no_cpu_s))
