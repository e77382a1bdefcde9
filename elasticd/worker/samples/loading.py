"""Load samples with torch's DataLoader and its processes, which get a request for each part of a batch.

A loaded part names its batch and its samples' indices. Random numbers during loading come from a seed for
each batch, so they are the same in any process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker

from elasticd.data.dealing import Batch, Portion, counts_of, parts_in_turns, parts_of
from elasticd.data.order import transform_seed
from elasticd.worker.values.plaindata import number_of
from elasticd.worker.values.randomness import OwnRandomness

OURS = ("batch_size", "batch_sampler", "drop_last", "generator", "in_order", "sampler", "shuffle")
_KEPT: Final = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


class Fetched(NamedTuple):
    """A loaded part of a global batch.

    ``epoch``, ``first``, ``samples``: the global batch. With an iterable dataset, ``samples`` 0 marks the end
    of an epoch. ``part``: None if the worker has no part. ``ids``: the indices of the samples in the dataset,
    or their positions in an iterable dataset. ``read``: in the first parts from each process that reads an
    iterable dataset, a digest of the first global batch that the process read.
    """

    epoch: int
    first: int
    samples: int
    part: Portion | None
    ids: Sequence[int]
    values: Any = None
    read: int = 0

    @property
    def batch(self) -> Batch:
        return Batch(self.epoch, self.first, self.samples)


@dataclass(slots=True)
class Share:
    """One worker's parts of a global batch. ``loaded``: an iterator whose next items are these parts."""

    batch: Batch
    parts: list[Portion]
    loaded: Iterator[Fetched]

    def fetch(self) -> Iterator[Fetched]:
        for part in self.parts:
            fetched = next(self.loaded)
            if (fetched.batch, fetched.part) != (self.batch, part):
                raise RuntimeError(
                    f"asked for {part} of {self.batch}, and got {fetched.part} of {fetched.batch}"
                )
            yield fetched


class Indexed(Dataset[Any]):
    """A map-style dataset that loads a whole part at a time."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset, self._collate, self._seed = dataset, collate, seed

    def __getitems__(self, asked: Fetched) -> Fetched:  # torch calls it with the sampler's items
        assert asked.part is not None
        indices = list(asked.ids)
        with OwnRandomness(transform_seed(self._seed, asked.epoch, asked.first + asked.part.samples.start)):
            if callable(getattr(self.dataset, "__getitems__", None)):
                samples = self.dataset.__getitems__(indices)
            else:
                samples = [self.dataset[index] for index in indices]
            return asked._replace(ids=indices, values=self._collate(samples))


@dataclass(frozen=True, slots=True)
class Cutting:
    """The rule by which global batches of ``size`` samples are cut into parts, and this worker's ``rank``.
    ``evens``: all workers have equally many parts, some of which may not count: see ``parts_in_turns``."""

    rank: int
    world: int
    size: int
    virtual_ranks: int
    accumulate: int
    drop_last: bool
    evens: bool = False

    def parts(self, samples: int) -> list[Portion]:
        """Return this worker's parts of a batch of ``samples`` samples."""
        cut = {"samples": samples, "virtual_ranks": self.virtual_ranks, "accumulate": self.accumulate}
        return (parts_in_turns if self.evens else parts_of)(self.rank, self.world, **cut)

    def counts(self, samples: int) -> tuple[int, ...]:
        """Return the number of parts of a batch of ``samples`` samples that each worker has, by rank."""
        cut = {"samples": samples, "virtual_ranks": self.virtual_ranks, "accumulate": self.accumulate}
        if self.evens:
            return (len(parts_in_turns(0, self.world, **cut)),) * self.world
        return counts_of(self.world, **cut)


class Stream(IterableDataset[Any]):
    """An iterable dataset. Each process reads the whole dataset from ``position`` in ``epoch`` on, and keeps
    its own parts.

    The dataset sees a single process, so it does not shard itself. A dataset may have ``set_epoch(epoch)``,
    and ``iter_from(position)``, which begins in the middle without reading the samples before.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        collate: Callable[[list[Any]], Any],
        seed: int,
        *,
        epoch: int,
        position: int,
        cutting: Cutting,
    ) -> None:
        self.dataset, self._collate, self._seed = dataset, collate, seed
        self._epoch, self._position, self._cutting = epoch, position, cutting
        self._read = 0

    def __iter__(self) -> Iterator[Fetched]:
        """Yield this process's parts. The loading processes take turns."""
        info = get_worker_info()
        mine, processes = (info.id, info.num_workers) if info is not None else (0, 1)
        if info is not None:
            worker._worker_info = _as_the_only_one(info, self.dataset)
        for turn, (bare, samples) in enumerate(self._all()):
            if turn % processes == mine:
                made = self._made(bare, samples)
                yield made._replace(read=self._read) if turn < processes else made

    def _made(self, bare: Fetched, samples: list[Any]) -> Fetched:
        if bare.part is None:
            return bare
        with OwnRandomness(transform_seed(self._seed, bare.epoch, bare.ids[0])):
            return bare._replace(values=self._collate(samples))

    def _all(self) -> Iterator[tuple[Fetched, list[Any]]]:
        epoch, position = self._epoch, self._position
        while True:
            for first, samples in self._batches(epoch, position):
                position = first + len(samples)
                head = Fetched(epoch, first, len(samples), None, ())
                parts = self._cutting.parts(len(samples))
                for p in parts:
                    ids = tuple(range(first + p.samples.start, first + p.samples.stop))
                    yield head._replace(part=p, ids=ids), samples[p.samples.start : p.samples.stop]
                if not parts:
                    yield head, []
            if not position:
                raise ValueError(
                    f"the dataset has not a single batch in epoch {epoch}: give one with samples, or, "
                    "if it has fewer than global_batch, leave out drop_last=True"
                )
            yield Fetched(epoch, position, 0, None, ()), []
            epoch, position = epoch + 1, 0

    def _batches(self, epoch: int, position: int) -> Iterator[tuple[int, list[Any]]]:
        randomness = OwnRandomness(transform_seed(self._seed, epoch, -1))
        with randomness:
            stream = _stream(self.dataset, epoch, position)
        while True:
            with randomness:
                samples = list(islice(stream, self._cutting.size))
            self._read = self._read or digest(samples)
            if not samples or (self._cutting.drop_last and len(samples) < self._cutting.size):
                return
            yield position, samples
            position += len(samples)


def digest(samples: Any) -> int:
    """Return a digest of 63 bits of the data's numbers, tensors, arrays and texts."""
    summary = hashlib.blake2b(digest_size=8)

    def take(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            plain = value.detach().cpu()
            if plain.layout is torch.strided and not plain.is_quantized:
                summary.update(plain.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif hasattr(value, "__array__") and hasattr(value, "tobytes"):
            summary.update(value.tobytes())
        elif isinstance(value, str | bytes | int | float):
            summary.update(repr(value).encode())
        elif isinstance(value, dict):
            take(list(value.values()))
        elif isinstance(value, list | tuple):
            summary.update(len(value).to_bytes(8, "little"))
            for item in value:
                take(item)

    take(samples)
    return number_of(summary) or 1


class StreamInit:
    """Calls the script's ``worker_init_fn`` in a process that reads an iterable dataset."""

    def __init__(self, init: Callable[[int], None], dataset: Any) -> None:
        self._init, self._dataset = init, dataset

    def __call__(self, number: int) -> None:
        info = worker._worker_info
        assert info is not None
        worker._worker_info = _as_the_only_one(info, self._dataset)
        try:
            self._init(number)
        finally:
            worker._worker_info = info


def _as_the_only_one(info: worker.WorkerInfo, dataset: Any) -> worker.WorkerInfo:
    """Return worker info with one process, so that a dataset that shards itself by process gives all
    samples."""
    return worker.WorkerInfo(id=0, num_workers=1, seed=info.seed, dataset=dataset)


def _stream(dataset: Any, epoch: int, position: int) -> Iterator[Any]:
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    if position and hasattr(dataset, "iter_from"):
        return iter(dataset.iter_from(position))
    stream: Iterator[Any] = iter(dataset)
    passed = sum(1 for _ in islice(stream, position))
    if passed < position:
        raise ValueError(
            f"the dataset ends after {passed} samples of epoch {epoch}, of which {position} were used "
            "before: an iterable dataset must give the same samples each time"
        )
    return stream


class Requests:
    """A batch sampler for torch's DataLoader that yields the next parts to fetch. ``begin`` returns the
    iterator over the parts."""

    def __init__(self) -> None:
        self.begin: Callable[[], Iterator[Fetched]] = lambda: iter(())

    def __iter__(self) -> Iterator[Any]:  # torch's type hints expect lists of indices
        return self.begin()


def loader_of_indexed(dataset: Indexed, requests: Requests, options: dict[str, Any]) -> DataLoader[Any]:
    """Return a loader whose processes stay from world to world."""
    if options.get("num_workers"):
        options = {"persistent_workers": True, **options}
    return DataLoader(
        dataset, batch_sampler=requests, collate_fn=_as_it_is, generator=torch.Generator(), **options
    )


def loader_of_stream(dataset: Stream, options: dict[str, Any]) -> DataLoader[Any]:
    """Return a loader for one world: its processes know where to continue reading."""
    if options.get("worker_init_fn") is not None:
        init = StreamInit(options["worker_init_fn"], dataset.dataset)
        options = {**options, "worker_init_fn": init}
    return DataLoader(
        dataset,
        batch_size=None,
        collate_fn=_as_it_is,
        generator=torch.Generator(),
        **{**options, "persistent_workers": False},
    )


def iterator_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return an iterator over the loader. Its first random number comes from the loader's generator, which is
    on the CPU, whatever torch's default device is."""
    with torch.device("cpu"):
        return iter(loader)


def collate_of(options: dict[str, Any]) -> Callable[[list[Any]], Any]:
    """Remove the collate function from the DataLoader's options and return it. elasticd calls it itself."""
    return options.pop("collate_fn", None) or default_collate


def _as_it_is(fetched: Any) -> Any:
    return fetched


def loader_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments that make a DataLoader like this one, without those of its batches."""
    return {name: getattr(loader, name) for name in _KEPT}
