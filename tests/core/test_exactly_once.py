"""Thousands of schedules of worlds and failures: each epoch's samples are used once, weighted alike.

The reference knows nothing of worlds: it shuffles a list, cuts it, and goes through it.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

import pytest

from elasticd.core.dealing import next_batch, parts_of
from elasticd.core.order import Order, Sequential, Shuffled, Weighted

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


def train(job: Job, chance: random.Random) -> Training:
    """The job in worlds that change at any point. A step that is abandoned, before or after any of its
    parts, is made anew in another world, from what is committed."""
    done = Training()
    world = chance.randint(1, 12)
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
        fails_after = chance.randint(0, sum(map(len, shares))) if chance.random() < 0.3 else None
        used: list[Used] = []
        for part in (part for share in shares for part in share):
            if fails_after == len(used):
                break
            positions = range(batch.first + part.samples.start, batch.first + part.samples.stop)
            each = Fraction(part.weight).limit_denominator(10**6) / len(part.samples)
            used += [(sample, each) for sample in job.order.at(batch.epoch, positions)]
        if fails_after is None:
            done.steps.append((batch.epoch, world, used))
            done.epoch, done.position = batch.epoch, batch.end
        if fails_after is not None or chance.random() < 0.2:
            world = chance.randint(1, 12)


@pytest.mark.parametrize("block", range(20))
def test_each_sample_of_an_epoch_is_used_once_and_weighs_the_same_as_its_neighbours(block):
    for seed in range(block * 150, block * 150 + 150):
        chance = random.Random(seed)
        job = draw(chance)
        done = train(job, chance)
        for epoch in range(job.epochs):
            rest = job.order.at(epoch, range(job.length))
            assert isinstance(job.order, Weighted) or sorted(rest) == list(range(job.length)), seed
            for at, world, used in done.steps:
                if at == epoch:
                    size = job.batch * world if job.grows else job.batch
                    batch, rest = rest[:size], rest[size:]
                    assert used == [(sample, Fraction(1, len(batch))) for sample in batch], seed
            assert not rest or (job.drop_last and len(rest) < job.batch * (12 if job.grows else 1)), seed
        assert [epoch for epoch, _, _ in done.steps] == sorted(epoch for epoch, _, _ in done.steps)


def test_the_schedules_have_every_kind_of_thing_in_them():
    seen: Counter[str] = Counter()
    for seed in range(300):
        chance = random.Random(seed)
        job = draw(chance)
        done = train(job, chance)
        sizes = {len(used) for _, _, used in done.steps}
        seen["grows"] += job.grows
        seen["a last batch that is short"] += not job.grows and len(sizes) > 1
        seen["left over"] += job.drop_last and len(done.steps[0][2]) > 0 and job.length % job.batch > 0
        seen["idle workers"] += any(world > len(used) for _, world, used in done.steps)
        seen["several worlds"] += len({world for _, world, _ in done.steps}) > 1
        seen["several epochs"] += job.epochs > 1
    assert min(seen.values()) > 10 and len(seen) == 6, seen


def test_an_epoch_without_a_single_batch_is_refused():
    with pytest.raises(ValueError, match="an epoch of 5 samples has no whole batch of 8"):
        next_batch(0, 0, length=5, size=8, drop_last=True)
