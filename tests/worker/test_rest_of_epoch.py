"""A script that counts samples continues with the samples that are left, in a world of any size."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from elasticd.worker import rest_of_epoch

Batches = list[list[int]]


def loader_of(
    samples: int, world: int, rank: int, batch: int = 1, epoch: int = 0, **cut: Any
) -> DataLoader[Any]:
    """Return the loader of a rank, whose samples are their own numbers."""
    ends = {"drop_last": cut.pop("drop_last_batch", False)}
    sampler = DistributedSampler(range(samples), world, rank, **cut)
    sampler.set_epoch(epoch)
    return DataLoader(range(samples), batch_size=batch, sampler=sampler, **ends)


def read(loader: DataLoader[Any]) -> Batches:
    return [batch.tolist() for batch in loader]


def rests(used: int, *, world: int, **cut: Any) -> list[Batches]:
    """Return the batches that are left for each rank after so many samples."""
    return [read(rest_of_epoch(loader_of(rank=rank, world=world, **cut), used)) for rank in range(world)]


CUTS = st.fixed_dictionaries(
    {
        "samples": st.integers(1, 60),
        "batch": st.integers(1, 4),
        "epoch": st.integers(0, 2),
        "seed": st.integers(0, 2),
        "shuffle": st.booleans(),
        "drop_last": st.booleans(),
    }
)


@pytest.mark.parametrize(
    ("used", "world", "drop_last", "left"),
    [
        (0, 2, False, [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [9]]]),
        (4, 2, False, [[[4, 6], [8]], [[5, 7], [9]]]),
        # a script that skips whole batches would repeat 0 to 3
        (4, 3, False, [[[4, 7]], [[5, 8]], [[6, 9]]]),
        # the last batch is filled up with samples of the epoch's beginning
        (3, 2, False, [[[3, 5], [7, 9]], [[4, 6], [8, 0]]]),
        (3, 2, True, [[[3, 5], [7]], [[4, 6], [8]]]),
        (9, 4, False, [[[9]], [[0]], [[1]], [[2]]]),
        (9, 4, True, [[], [], [], []]),
        (10, 3, False, [[], [], []]),
        (12, 3, False, [[], [], []]),  # an epoch whose last batch was filled up
    ],
)
def test_the_ranks_go_on_after_the_used_samples(
    used: int, world: int, drop_last: bool, left: list[Batches]
) -> None:
    assert rests(used, samples=10, world=world, batch=2, shuffle=False, drop_last=drop_last) == left


@settings(max_examples=60)
@given(
    cut=CUTS,
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), max_size=4),
    last=st.integers(1, 5),
)
def test_through_any_worlds_each_sample_of_an_epoch_is_used_once(
    cut: dict[str, Any], worlds: list[tuple[int, int]], last: int
) -> None:
    samples, batch = cut["samples"], cut["batch"]
    used, found, world = 0, [], last
    for world, steps in [*worlds, (last, samples)]:
        ranks = rests(used, world=world, **cut)
        assert len({tuple(map(len, batches)) for batches in ranks}) == 1, "all ranks make the same steps"
        made = [sample for batches in ranks for taken in batches[:steps] for sample in taken]
        found += made
        used += batch * world * min(steps, len(ranks[0]))
        if used >= samples:
            break
    lost, repeated = samples - len({*found}), len(found) - len({*found})
    if cut["drop_last"]:
        assert lost < world and not repeated
    else:
        assert repeated < world and not lost


@settings(max_examples=60)
@given(cut=CUTS, drop_last_batch=st.booleans(), world=st.integers(1, 5), steps=st.integers(0, 9))
def test_in_a_world_of_the_same_size_the_batches_are_those_of_the_loader(
    cut: dict[str, Any], drop_last_batch: bool, world: int, steps: int
) -> None:
    for rank in range(world):
        loader = loader_of(world=world, rank=rank, drop_last_batch=drop_last_batch, **cut)
        assert read(rest_of_epoch(loader, steps * cut["batch"] * world)) == read(loader)[steps:]


def test_samples_that_were_used_are_not_read_again() -> None:
    class Noting(list[int]):
        def __getitem__(self, number: Any) -> Any:
            asked.append(number)
            return super().__getitem__(number)

    asked: list[int] = []
    dataset = Noting(range(9))
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset, 1, 0))
    assert len(read(rest_of_epoch(loader, 6))) == len(asked) == 3


def test_the_rest_is_loaded_as_the_loader_loads() -> None:
    sampler = DistributedSampler(range(9), 1, 0)
    loader = DataLoader(range(9), batch_size=4, sampler=sampler, collate_fn=sum)
    rest = rest_of_epoch(loader, 4)
    assert rest.collate_fn is sum and rest.batch_size == 4 and rest.dataset is loader.dataset


@pytest.mark.parametrize(
    ("loader", "used", "error", "said"),
    [
        (DataLoader(range(3)), 0, TypeError, "has a SequentialSampler"),
        (DataLoader(range(3), sampler=RandomSampler(range(3))), 1, TypeError, "has a RandomSampler"),
        (loader_of(3, world=1, rank=0), -1, ValueError, "used is -1"),
    ],
)
def test_what_it_cannot_continue_is_refused(
    loader: DataLoader[Any], used: int, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        rest_of_epoch(loader, used)
