"""The data of a training: each sample of an epoch is used once, in any sequence of worlds.

The position in the data is part of a State's commit. Samples that were fetched ahead but not committed are
fetched again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch.utils.data import DataLoader

from elasticd.core.page_layout import Fatal, Use
from elasticd.data.dealing import Batch, next_batch
from elasticd.worker.agent_link import agentpage
from elasticd.worker.gradients.rates import Rule, check, factor
from elasticd.worker.samples import loading
from elasticd.worker.samples.loading import Cutting, Fetched, Indexed, Requests, Share, Stream
from elasticd.worker.samples.sampling import Sampler, SamplerOrder, order_of
from elasticd.worker.values.numbers import whole_number
from elasticd.worker.world.group import world_size

WORLD_MAX = "ELASTICD_WORLD_MAX"  # has the value of --max of elasticd run


class DataChanged(ValueError):
    """The data differs from the data that the training was committed with. The message says in a sentence
    what differs."""


class Data:
    """The data of a training. Give it to the State: ``State(..., data=Data(dataset, global_batch=256,
    seed=0))``.

    * dataset: map-style or iterable. Every worker reads an iterable dataset as a whole, and Data deals the
      samples out. So the dataset must give the same samples each time, to each worker. ``get_worker_info()``
      reports one process, so sharding by it does no harm. Sharding by rank raises DataChanged.
    * global_batch: samples per step of all workers together, in any world. The batch is cut into
      ``virtual_ranks`` (by default ``--max``, or the number of workers at the start), which are dealt to the
      workers.
    * accumulate: each virtual rank's samples come in this many batches.
    * consistent: a step computes the same bits in a world of any size. Gradients are added up in one order,
      and each virtual rank has its own random numbers and buffers (the buffers of the last one stay). Two
      jobs end alike if they have the same virtual_ranks, the same OMP_NUM_THREADS and deterministic kernels
      (see torch.use_deterministic_algorithms), whether or not the model is sharded.
    * worker_batch: samples per step of each worker, in place of global_batch: the batch grows with the world.
      With ``State(split=...)`` the workers of a unit get the same samples, and a unit counts as one worker.
    * rate: how learning rates follow a growing batch: "linear", "sqrt", "none", or a function from the growth
      of the batch to the factor of the rates. The optimizer's rates are right for a batch of ``rate_batch``,
      by default the first world's batch. Schedulers see the rates without the factor.
    * shuffle: shuffle each epoch anew by ``seed``; otherwise samples come in the dataset's order.
    * weights: draw with replacement by one weight for each sample, ``draws`` times an epoch.
    * sampler: your own order of the samples. Either a function from the number of an epoch to the indices of
      its samples, or an iterable of indices, whose ``set_epoch`` is called if there is one. The order must be
      the same each time.
    * epochs: the number of epochs; None: without end.
    * drop_last: leave out the rest of an epoch after its whole batches. Otherwise the rest is a smaller
      batch, whose samples count the same.
    * loader: further options of torch's DataLoader: num_workers, collate_fn, pin_memory, ...

    Raises TypeError and ValueError for wrong arguments. The training raises DataChanged if it resumes with
    other data than it was committed with.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int | None = None,
        worker_batch: int | None = None,
        rate: Rule | None = None,
        rate_batch: int = 0,
        virtual_ranks: int | None = None,
        accumulate: int = 1,
        consistent: bool = False,
        seed: int = 0,
        shuffle: bool | None = None,
        weights: Sequence[float] | None = None,
        draws: int | None = None,
        sampler: Sampler | None = None,
        epochs: int | None = 1,
        drop_last: bool = False,
        **loader: Any,
    ) -> None:
        agentpage.uses(Use.DATA)
        if taken := sorted(loader.keys() & set(loading.OURS)):
            raise TypeError(
                f"Data decides on {taken[0]} itself: leave it out, or see help(elasticd.worker.Data)"
            )
        if (global_batch is None) == (worker_batch is None):
            raise TypeError(
                "give Data either global_batch, the samples of a step in any world, or worker_batch, the "
                "samples of a step per worker"
            )
        if virtual_ranks is not None and global_batch is None:
            raise TypeError("virtual_ranks are the parts of a global_batch: leave them out with worker_batch")
        if consistent and global_batch is None:
            raise TypeError(
                "with worker_batch the global batch changes with the world, so training cannot be "
                "consistent: give Data global_batch"
            )
        if (rate is not None or rate_batch) and global_batch is not None:
            raise TypeError("rate and rate_batch are for a batch that grows: give Data worker_batch for them")
        self._rate = check(rate) if global_batch is None else None
        self._asked_rate_batch = self._rate_batch = rate_batch
        batch = global_batch if global_batch is not None else worker_batch
        for name, number in (("the batch", batch), ("accumulate", accumulate), ("epochs", epochs)):
            if number is not None and whole_number(number, name) < 1:
                raise ValueError(f"{name} is {number}: give a number that is 1 or more")
        self._global_batch, self._worker_batch = global_batch, worker_batch
        self._accumulate = accumulate
        self.seed, self.epochs, self.consistent, self._drop_last = seed, epochs, consistent, drop_last
        self._asked_ranks = virtual_ranks
        self.unit, self._evens = 1, False
        self.virtual_ranks = self._ranks()
        self._check_ranks()
        self._collate = loading.collate_of(loader)
        self._options = loader
        self._dataset = dataset
        self._order = order_of(dataset, seed, shuffle, weights, draws, sampler)
        if self._order is not None:
            self._loader: DataLoader[Any] | None = None
            self._requests = Requests()
            if drop_last:
                next_batch(0, 0, length=self._order.length, size=batch or 0, drop_last=True)
        self._epoch = self._position = 0
        self.read = (
            0  # a digest of the first samples read from a stream in this world; 0 before the first share
        )

    def divide(self, *, unit: int, evens: bool) -> None:
        """Set how batches are divided, before the first world. ``unit``: the number of neighbouring workers
        that get the same samples, since they hold one model together. ``evens``: all workers get equally many
        batches, of which some may not count, since they compute together.

        Raises ValueError."""
        self.unit, self._evens = unit, evens
        self.virtual_ranks = self._ranks()
        self._check_ranks()

    def _ranks(self) -> int:
        """Return the number of virtual ranks: by default one for each worker, or each unit, of the largest
        world."""
        largest = int(os.environ.get(WORLD_MAX) or os.environ.get("WORLD_SIZE") or 1)
        return self._asked_ranks or max(1, largest // self.unit)

    @property
    def epoch(self) -> int:
        """The epoch of the next uncommitted sample: after an epoch's last commit, the next epoch. With an
        iterable dataset, the epoch changes only once the dataset's end has been read."""
        return self._next[0]

    @property
    def position(self) -> int:
        """The number of committed samples in ``epoch``."""
        return self._next[1]

    @property
    def committed(self) -> tuple[int, int]:
        """The end of the last committed batch: its epoch, and the committed samples of that epoch."""
        return self._epoch, self._position

    @property
    def _next(self) -> tuple[int, int]:
        if self._order is None:
            return self.committed
        size, length = self._size(world_size()), self._order.length
        batch = next_batch(*self.committed, length=length, size=size, drop_last=self._drop_last)
        return batch.epoch, batch.first

    def _size(self, world: int) -> int:
        """Return the size of a whole batch in a world of ``world`` workers."""
        return self._global_batch or (self._worker_batch or 0) * max(1, world // self.unit)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that identify this data, its order and its batches, in JSON's types."""
        order = self._order.facts if self._order is not None else {"kind": "stream"}
        batches = {
            "global_batch": self._global_batch or 0,
            "worker_batch": self._worker_batch or 0,
            "virtual_ranks": self.virtual_ranks if self._global_batch else 0,
        }
        return {"order": dict(order), **batches, "drop_last": self._drop_last}

    # ------------------------------------------------------------ what a State uses

    def state_dict(self) -> dict[str, Any]:
        digest = self._order.digest(self._epoch) if isinstance(self._order, SamplerOrder) else ""
        return {
            "v": 1,
            "epoch": self._epoch,
            "position": self._position,
            "digest": digest,
            "rate_batch": self._rate_batch,
            **self.facts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a committed position. Raises DataChanged."""
        if self._asked_ranks is None and self._global_batch:
            self.virtual_ranks = state["virtual_ranks"] or self.virtual_ranks
        mine, theirs = self.facts, {name: state[name] for name in self.facts}
        if mine != theirs:
            raise DataChanged(_difference(mine, theirs))
        self._check_ranks()
        if isinstance(self._order, SamplerOrder) and self._order.digest(state["epoch"]) != state["digest"]:
            raise DataChanged(
                f"the sampler gives another order of epoch {state['epoch']} than the training was committed "
                "with: it must be a function of the epoch alone"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._rate_batch = self._asked_rate_batch or state["rate_batch"]

    @property
    def grows(self) -> bool:
        return self._rate is not None

    def growth(self, world: int) -> tuple[int, float]:
        """Return the batch size in a world of ``world`` workers, and the factor of its learning rates. Raises
        ValueError."""
        batch = self._size(world)
        self._rate_batch = self._rate_batch or batch
        return batch, factor(self._rate or "none", batch / self._rate_batch)

    def shares(self, rank: int, world: int) -> Iterator[Share]:
        """Yield a worker's share of each step, from the committed position on. A share that is not passed to
        ``advance`` comes again after a change of world."""
        cutting = self._cutting(rank, world)
        return self._shares_of_stream(cutting) if self._order is None else self._shares_of_indices(cutting)

    def _cutting(self, rank: int, world: int) -> Cutting:
        unit, units = rank // self.unit, world // self.unit
        ranks = self.virtual_ranks if self._global_batch else units
        size = self._size(world)
        return Cutting(unit, units, size, ranks, self._accumulate, self._drop_last, self._evens)

    @property
    def is_stream(self) -> bool:
        return self._order is None

    def portions(self, batch: Batch, world: int) -> tuple[int, ...]:
        """Return the number of parts of the batch that each worker, or each unit, of a world of this size
        has."""
        return self._cutting(0, world).counts(batch.samples)

    def advance(self, batch: Batch) -> None:
        """Note that this batch and all before it are used."""
        self._epoch, self._position = batch.epoch, batch.end

    # ------------------------------------------------------------ batches

    def _shares_of_indices(self, cutting: Cutting) -> Iterator[Share]:
        order, epochs, committed = self._order, self.epochs, self.committed
        assert order is not None

        # The loader calls these functions ahead of time and keeps them, so they must not refer to self.
        def batches() -> Iterator[Batch]:
            at, size, drop_last = committed, cutting.size, cutting.drop_last
            while True:
                batch = next_batch(*at, length=order.length, size=size, drop_last=drop_last)
                if epochs is not None and batch.epoch >= epochs:
                    return
                yield batch
                at = batch.epoch, batch.end

        def requests() -> Iterator[Fetched]:
            for batch in batches():
                for part in cutting.parts(batch.samples):
                    positions = range(batch.first + part.samples.start, batch.first + part.samples.stop)
                    ids = order.at(batch.epoch, positions)
                    yield Fetched(batch.epoch, batch.first, batch.samples, part, ids)

        self._requests.begin = requests
        if self._loader is None:
            indexed = Indexed(self._dataset, self._collate, self.seed)
            self._loader = loading.loader_of_indexed(indexed, self._requests, self._options)
        loaded = loading.iterator_of(self._loader)
        for batch in batches():
            yield Share(batch, cutting.parts(batch.samples), loaded)
        self._loader = None  # without the loader, its processes can end

    def _shares_of_stream(self, cutting: Cutting) -> Iterator[Share]:
        if self.epochs is not None and self._epoch >= self.epochs:
            return
        stream = Stream(
            self._dataset,
            self._collate,
            self.seed,
            epoch=self._epoch,
            position=self._position,
            cutting=cutting,
        )
        self.read = 0
        loader = loading.loader_of_stream(stream, self._options)
        loaded = map(self._same_read, loading.iterator_of(loader))
        for first in loaded:
            if not first.samples:  # the part marks the end of an epoch
                if self.epochs is not None and first.epoch + 1 >= self.epochs:
                    return
                continue
            yield Share(first.batch, cutting.parts(first.samples), chain([first], loaded))

    def _same_read(self, fetched: Fetched) -> Fetched:
        if fetched.read and self.read and fetched.read != self.read:
            raise _read_unlike("two loading processes of a worker")
        self.read = self.read or fetched.read
        return fetched

    def check_read(self, reads: Sequence[int]) -> None:
        """Compare the digests of the first samples that each rank has read. Raises DataChanged if they
        differ."""
        if len(set(reads)) > 1:
            other = next(rank for rank, read in enumerate(reads) if read != reads[0])
            raise _read_unlike(f"ranks 0 and {other}")

    def _check_ranks(self) -> None:
        if self._global_batch is None:
            return
        least = self.virtual_ranks * self._accumulate
        if self._global_batch < least:
            times = f" in {self._accumulate} pieces each" if self._accumulate > 1 else ""
            raise ValueError(
                f"global_batch is {self._global_batch}, too few for {self.virtual_ranks} virtual ranks"
                f"{times}: give a larger one, or fewer virtual_ranks (by default as many as --max)"
            )


# ---------------------------------------------------------------- what has changed


def _read_unlike(who: str) -> DataChanged:
    agentpage.fatal(Fatal.BAD_DATA)  # a restart would fail the same way
    return DataChanged(
        f"{who} read different samples at the same position of the dataset, so some samples would be used "
        "twice and others never: an iterable dataset must give the same samples to each process that reads "
        "it. Remove sharding by rank or worker, since Data deals samples out, and seed random numbers"
    )


_MEANINGS = {
    "kind": "the kind of order",
    "length": "samples in an epoch",
    "samples": "samples in the dataset",
    "seed": "the seed",
    "weights": "the weights' digest",
    "global_batch": "global_batch",
    "worker_batch": "worker_batch",
    "virtual_ranks": "virtual_ranks",
    "drop_last": "drop_last",
}


def _difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Return the first difference, in a sentence."""
    now, then = ({**facts["order"], **facts} for facts in (mine, theirs))
    for name, meaning in _MEANINGS.items():
        if now.get(name) != then.get(name):
            return (
                f"{meaning}: {now.get(name, 'none')} now, and {then.get(name, 'none')} when the training was "
                "committed: give Data the same data and batches as then, or start a new training"
            )
    return f"the data is {mine} now, and was {theirs} when the training was committed"
