"""Hundreds of schedules of worlds and failures: each epoch's samples are used once, weighted alike.

The reference knows nothing of worlds: it shuffles a list, cuts it, and goes through it.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from itertools import count
from typing import Protocol

import pytest

from elasticd.data.dealing import next_batch, parts_of
from elasticd.data.order import Order, Sequential, Shuffled, Weighted

Used = tuple[int, Fraction]  # a sample, and what it counted for


@dataclass
class Job:
    length: int
    batch: int
    virtual_ranks: int
    accumulate: int
    epochs: int
    drop_last: bool
    grows: bool  # ``batch`` is each worker's
    order: Order


@dataclass
class Training:
    """What was committed: of each step the epoch, the size of the world, and the samples."""

    epoch: int = 0
    position: int = 0
    steps: list[tuple[int, int, list[Used]]] = field(default_factory=list)
    saved: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])  # where each step began

    undone: int = 0

    def go_back_to(self, step: int) -> None:
        self.undone += len(self.steps) - step
        self.epoch, self.position = self.saved[step]
        del self.steps[step:], self.saved[step + 1 :]


class Fate(Protocol):
    """What becomes of a training."""

    def world(self) -> int:
        """The next world's size."""
        ...

    def strikes(self, parts: int) -> int | None:
        """After how many of a step's parts its world ends without a commit; None: it commits."""
        ...

    def passes(self, steps: int) -> tuple[bool, int]:
        """After a commit: whether the world ends, and which step is gone on from: ``steps``, or an earlier
        one that is on disk, if all have died."""
        ...


class Random(Fate):
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def world(self) -> int:
        return self.chance.randint(1, 12)

    def strikes(self, parts: int) -> int | None:
        return self.chance.randint(0, parts) if self.chance.random() < 0.3 else None

    def passes(self, steps: int) -> tuple[bool, int]:
        if self.chance.random() < 0.02:
            return True, self.chance.randint(0, steps)
        return self.chance.random() < 0.2, steps


class Once(Fate):
    """One strike, and another world thereafter. ``struck``: whether it came to that."""

    def __init__(self, step: int, point: int, worlds: tuple[int, int]) -> None:
        self.left, self.point, self.worlds = step, point, list(worlds)
        self.struck = False

    def world(self) -> int:
        return self.worlds.pop(0)

    def strikes(self, parts: int) -> int | None:
        self.left -= 1
        if self.left != -1 or self.point > parts:
            return None
        self.struck = True
        return self.point

    def passes(self, steps: int) -> tuple[bool, int]:
        return False, steps


def draw(chance: random.Random) -> Job:
    virtual_ranks, accumulate = chance.randint(1, 9), chance.choice([1, 1, 1, 2, 3])
    grows = chance.random() < 0.25
    batch = chance.randint(1, 8) if grows else virtual_ranks * accumulate + chance.choice([0, 0, 1, 5, 17])
    drop_last = chance.random() < 0.2
    length = chance.choice([1, 2, batch - 1, batch, batch + 1, 3 * batch, chance.randint(1, 120)])
    length = max(length, 1) + (12 * batch if drop_last else 0)
    seed = chance.getrandbits(64)
    orders = [Shuffled(length, seed), Shuffled(length, seed), Sequential(length)]
    orders += [Weighted([chance.random() for _ in range(length)], seed)]
    order = chance.choice(orders)
    return Job(length, batch, virtual_ranks, accumulate, chance.randint(1, 3), drop_last, grows, order)


def train(job: Job, fate: Fate) -> Training:
    """The job in worlds that end at any point. A step that is abandoned, before or after any of its parts,
    is made anew in another world, from what is committed."""
    done = Training()
    world = fate.world()
    while True:
        size = job.batch * world if job.grows else job.batch
        ranks = world if job.grows else job.virtual_ranks
        batch = next_batch(done.epoch, done.position, length=job.length, size=size, drop_last=job.drop_last)
        if batch.epoch == job.epochs:
            return done
        shares = [
            parts_of(rank, world, samples=batch.samples, virtual_ranks=ranks, accumulate=job.accumulate)
            for rank in range(world)
        ]
        struck_after = fate.strikes(sum(map(len, shares)))
        used: list[Used] = []
        for number, part in enumerate(part for share in shares for part in share):
            if struck_after == number:
                break
            positions = range(batch.first + part.samples.start, batch.first + part.samples.stop)
            each = Fraction(part.weight).limit_denominator(10**6) / len(part.samples)
            used += [(sample, each) for sample in job.order.at(batch.epoch, positions)]
        if struck_after is not None:
            world = fate.world()
            continue
        done.steps.append((batch.epoch, world, used))
        done.epoch, done.position = batch.epoch, batch.end
        done.saved.append((done.epoch, done.position))
        ends, goes_on_from = fate.passes(len(done.steps))
        done.go_back_to(goes_on_from)
        if ends:
            world = fate.world()


def assert_sound(job: Job, done: Training, why: object) -> None:
    """The obvious way: an epoch is a list, from which each step has taken the next batch."""
    for epoch in range(job.epochs):
        rest = job.order.at(epoch, range(job.length))
        assert isinstance(job.order, Weighted) or sorted(rest) == list(range(job.length)), why
        for at, world, used in done.steps:
            if at == epoch:
                size = job.batch * world if job.grows else job.batch
                batch, rest = rest[:size], rest[size:]
                assert used == [(sample, Fraction(1, len(batch))) for sample in batch], why
        assert not rest or (job.drop_last and len(rest) < job.batch * (12 if job.grows else 1)), why
    assert [epoch for epoch, _, _ in done.steps] == sorted(epoch for epoch, _, _ in done.steps), why


SEEDS = 250


@cache
def trained(seed: int) -> tuple[Job, Training]:
    chance = random.Random(seed)
    job = draw(chance)
    return job, train(job, Random(chance))


@pytest.mark.parametrize("block", range(4))
def test_each_sample_of_an_epoch_is_used_once_and_weighs_the_same_as_its_neighbours(block: int) -> None:
    for seed in range(block, SEEDS, 4):
        assert_sound(*trained(seed), seed)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("grows", [False, True])
def test_a_world_may_end_at_every_single_point_and_become_any_other(grows: bool, accumulate: int) -> None:
    job = Job(9, 2 if grows else 6, 3, accumulate, 2, False, grows, Shuffled(9, 5))
    points = 0
    for worlds in ((1, 2), (2, 5), (5, 1), (5, 5)):
        for step in count():
            tried = [Once(step, point, worlds) for point in range(12)]
            for fate in tried:
                assert_sound(job, train(job, fate), (worlds, step, fate.point))
            points += sum(fate.struck for fate in tried)
            if not any(fate.struck for fate in tried):
                break  # there is no such step
    assert points > 50


def test_the_schedules_have_every_kind_of_thing_in_them():
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        job, done = trained(seed)
        sizes = {len(used) for _, _, used in done.steps}
        seen["grows"] += job.grows
        seen["a last batch that is short"] += not job.grows and len(sizes) > 1
        seen["left over"] += job.drop_last and len(done.steps[0][2]) > 0 and job.length % job.batch > 0
        seen["idle workers"] += any(world > len(used) for _, world, used in done.steps)
        seen["several worlds"] += len({world for _, world, _ in done.steps}) > 1
        seen["several epochs"] += job.epochs > 1
        seen["steps undone"] += done.undone > 0
    assert min(seen.values()) > 10 and len(seen) == 7, seen


def test_an_epoch_without_a_single_batch_is_refused():
    with pytest.raises(ValueError, match="an epoch of 5 samples has no whole batch of 8"):
        next_batch(0, 0, length=5, size=8, drop_last=True)
