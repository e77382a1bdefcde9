"""A step uses the same samples in a world of any size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from elasticd.data.order import Sequential, Shuffled
from elasticd.integrations.batches import GlobalBatches, order_of


def step_samples(world: int, number: int, **cut: int) -> list[int]:
    """Return the samples of all workers in a step, in the order of the dataset's positions."""
    found = []
    for rank in range(world):
        batches = GlobalBatches(Shuffled(cut["samples"], 0), rank=rank, world=world, **{
            k: v for k, v in cut.items() if k != "samples"
        })  # fmt: skip
        mine = list(batches)[number * batches.pieces : (number + 1) * batches.pieces]
        assert all(len(batch) > 0 for batch in mine)
        found += [sample for batch in mine for sample in batch]
    return found


@settings(max_examples=40)
@given(
    samples=st.integers(8, 80),
    worker_batch=st.integers(1, 4),
    largest=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_each_sample_of_an_epoch_is_used_once_in_any_world(samples, worker_batch, largest, drop_last):
    global_batch = worker_batch * largest
    steps = samples // global_batch if drop_last else -(-samples // global_batch)
    if not steps or samples // steps < largest:
        return  # is refused
    cut = {
        "samples": samples,
        "global_batch": global_batch,
        "worker_batch": worker_batch,
        "drop_last": drop_last,
    }
    used = [step_samples(1 + number % largest, number, **cut) for number in range(steps)]
    assert used == [step_samples(1, number, **cut) for number in range(steps)]
    flat = [sample for step in used for sample in step]
    assert len(set(flat)) == len(flat) == (steps * global_batch if drop_last else samples)


def test_no_batch_is_larger_than_a_worker_takes():
    for world in (1, 2, 3, 4):
        batches = GlobalBatches(Shuffled(103, 0), global_batch=16, worker_batch=4, rank=0, world=world)
        assert max(map(len, batches)) <= 4
        assert len(batches) == len(list(batches)) == batches.steps * batches.pieces


def test_epochs_have_orders_of_their_own():
    batches = GlobalBatches(Shuffled(53, 0), global_batch=8, worker_batch=8, rank=0, world=1)
    first = list(batches)
    batches.set_epoch(1)
    assert list(batches) != first


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"global_batch": 8, "worker_batch": 1, "world": 8},
            "a step of 7 samples has none for some of 8 workers",
        ),
        (
            {"global_batch": 64, "worker_batch": 8, "world": 2, "drop_last": True},
            "fewer than a global batch of 64",
        ),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        GlobalBatches(Shuffled(53, 0), rank=0, **settings)


class EasyFirst(SequentialSampler):
    """Overrides the order."""

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(8), key=lambda number: -number))


class Evens(RandomSampler):
    """Leaves out every second sample."""

    def __iter__(self) -> Iterator[int]:
        return (number for number in super().__iter__() if number % 2 == 0)


@pytest.mark.parametrize("kind", [EasyFirst, Evens])
def test_the_order_of_a_sampler_of_the_script_s_own_is_not_known_ahead(kind: type[Sampler[int]]) -> None:
    data = list(range(8))
    assert order_of(data, kind(data), 0) is None  # type: ignore[call-arg]
    assert isinstance(order_of(data, SequentialSampler(data), 0), Sequential)
    assert isinstance(order_of(data, RandomSampler(data), 0), Shuffled)
