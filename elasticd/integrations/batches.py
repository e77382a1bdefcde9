"""The batches of one worker, cut so that a step uses the same samples in a world of any size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from elasticd.data.order import Order, Sequential, Shuffled, transform_seed
from elasticd.worker.data import WORLD_MAX
from elasticd.worker.samples.loading import iterator_of, loader_options

# Whose kinds of RandomSampler only choose the seed.
_SEEDED = ("accelerate.data_loader",)


class GlobalBatches(Sampler[list[int]]):
    """A batch sampler for torch's DataLoader, over this worker's part of each step.

    A step uses ``global_batch`` samples in any world, so the number of steps made says which samples were
    used. The steps of an epoch differ by at most one sample: an epoch of 103 samples and a global batch of 8
    has 12 steps of 8 samples and one of 7. With ``drop_last`` all steps have ``global_batch`` samples, and an
    epoch leaves the rest out.

    ``steps``: the number of steps in an epoch. ``pieces``: the number of batches that each worker uses in a
    step, the same in all workers. A batch has at most ``worker_batch`` samples, except where a step is too
    small to give each worker as many pieces. ``epoch``: the epoch to iterate, from the step ``first``.

    Raises ValueError if a step has fewer samples than the world has workers.
    """

    def __init__(
        self,
        order: Order,
        *,
        global_batch: int,
        worker_batch: int,
        rank: int,
        world: int,
        drop_last: bool = False,
    ) -> None:
        whole, rest = divmod(order.length, global_batch)
        self.steps = whole if drop_last else whole + (rest > 0)
        if not self.steps:
            raise ValueError(
                f"the dataset has {order.length} samples, fewer than a global batch of {global_batch}: leave "
                "drop_last out"
            )
        self._order, self._rank, self._world = order, rank, world
        self._used = whole * global_batch if drop_last else order.length
        least = self._used // self.steps
        if least < world:
            raise ValueError(
                f"a step of {least} samples has none for some of {world} workers: give a larger batch, or "
                "drop the last samples of an epoch"
            )
        self.pieces = min(-(-global_batch // (worker_batch * world)), least // world)
        self.epoch = self.first = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def samples(self, step: int) -> int:
        """Return the number of samples that all workers use in a step of an epoch."""
        return len(_part(range(self._used), step, self.steps))

    def __len__(self) -> int:
        """The number of this worker's batches in an epoch."""
        return self.steps * self.pieces

    @property
    def seed(self) -> int:
        """A seed for random numbers of this worker, from the place where the epoch is begun."""
        return transform_seed(torch.initial_seed(), self.epoch, self.first * self._world + self._rank)

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first, self.steps):
            mine = _part(_part(range(self._used), step, self.steps), self._rank, self._world)
            for piece in range(self.pieces):
                yield self._order.at(self.epoch, _part(mine, piece, self.pieces))


def largest_world(present: int = 0) -> int:
    """Return the size of the largest world of this job, at least ``present``; 0 outside ``elasticd run`` if
    none is given."""
    return max(present, int(os.environ.get(WORLD_MAX, "0")))


def order_of(dataset: Any, sampler: object, seed: int) -> Order | None:
    """Return the order in which a sampler of torch draws from a dataset, shuffled by ``seed`` in place of the
    sampler's generator; None if the order is not known ahead."""
    if isinstance(dataset, IterableDataset):
        return None
    kind = type(sampler)
    if isinstance(sampler, RandomSampler) and (kind is RandomSampler or kind.__module__ in _SEEDED):
        whole = not sampler.replacement and sampler.num_samples == len(dataset)
        return Shuffled(len(dataset), seed) if whole else None
    return Sequential(len(dataset)) if kind is SequentialSampler else None


def order_of_loader(loader: DataLoader[Any], seed: int) -> Order:
    """Return the order of a loader's samples. Raises TypeError if it is not known ahead."""
    order = order_of(loader.dataset, loader.sampler, seed)
    if order is None or loader.batch_size is None:
        raise TypeError(
            "the order of the loader's samples is not known ahead: give a loader of a map-style dataset, "
            "with a batch_size, and without a sampler of its own"
        )
    return order


def cut(
    loader: DataLoader[Any], order: Order, *, global_batch: int, rank: int, world: int
) -> tuple[GlobalBatches, DataLoader[Any]]:
    """Return this worker's batches of a loader, and a loader of them."""
    assert loader.batch_size is not None
    batches = GlobalBatches(
        order,
        global_batch=global_batch,
        worker_batch=loader.batch_size,
        rank=rank,
        world=world,
        drop_last=loader.drop_last,
    )
    options = loader_options(loader) | {"generator": torch.Generator()}
    return batches, DataLoader(loader.dataset, batch_sampler=batches, **options)


def begun(loader: DataLoader[Any], batches: GlobalBatches, epoch: int, first: int) -> Iterator[Any]:
    """Return an iterator over the loader of these batches, from a step of an epoch. It draws no random number
    of the training."""
    batches.epoch, batches.first = epoch, first
    assert loader.generator is not None
    loader.generator.manual_seed(batches.seed)
    return iterator_of(loader)


def _part(whole: range, number: int, of: int) -> range:
    """Return one of ``of`` parts of a range, whose sizes differ by at most one."""
    return whole[len(whole) * number // of : len(whole) * (number + 1) // of]
