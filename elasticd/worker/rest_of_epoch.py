"""The rest of an epoch, for a script that keeps its own loop over torch's DistributedSampler."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from elasticd.core.page_layout import Use
from elasticd.worker.agent_link import agentpage
from elasticd.worker.samples.loading import loader_options


def rest_of_epoch(loader: DataLoader[Any], used: int) -> DataLoader[Any]:
    """Return a loader of the samples of an epoch that no worker has used yet.

    The script keeps the epoch, and how many of its samples were used, with its snapshot::

        for epoch in range(epoch, epochs):
            sampler.set_epoch(epoch)
            for batch in worker.rest_of_epoch(loader, used):
                ...
                used += batch_size * world_size
            used = 0

    * loader: a DataLoader with a ``DistributedSampler(dataset)``, to which ``set_epoch`` was applied.
    * used: the samples of this epoch that all workers together have used, in worlds of any size.

    One worker gets each sample that is left, once, and no other sample is read. All workers get the same
    number of samples. To that end DistributedSampler repeats some samples from the beginning of the epoch,
    fewer than the world has workers; with ``drop_last=True`` it leaves the last samples out instead. With the
    same number of workers the batches are those with which ``loader`` would have continued.

    Raises TypeError for a loader with another sampler, and ValueError for a negative number.
    """
    sampler = loader.sampler
    if type(sampler) is not DistributedSampler:
        raise TypeError(
            f"the loader has a {type(sampler).__qualname__}, whose order is not known here: give a "
            "DataLoader whose sampler is torch's DistributedSampler"
        )
    if used < 0:
        raise ValueError(f"used is {used}: give the number of samples that were used, 0 or more")
    agentpage.uses(Use.PLACE)
    if not used:
        return loader
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=_left(sampler, used),
        drop_last=loader.drop_last,
        **loader_options(loader),
    )


def _left(sampler: DistributedSampler[Any], used: int) -> list[int]:
    """Return this rank's samples after ``used`` samples of the sampler's epoch.

    The sampler deals the samples of an epoch to the ranks in turn, in an order that depends on seed and epoch
    only. So after each batch, the workers of a world have together used the beginning of that order.
    """
    whole: DistributedSampler[Any] = DistributedSampler(
        sampler.dataset, 1, 0, shuffle=sampler.shuffle, seed=sampler.seed
    )
    whole.set_epoch(sampler.epoch)
    order = [*whole]
    left, world = order[used:], sampler.num_replicas
    over = len(left) % world
    if over and sampler.drop_last:
        left = left[:-over]
    elif over:
        left += islice(cycle(order), world - over)
    return left[sampler.rank :: world]
