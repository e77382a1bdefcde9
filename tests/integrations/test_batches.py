"""A step uses the same samples in a world of any size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.data.order import Shuffled
from elasticd.integrations.batches import GlobalBatches


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
