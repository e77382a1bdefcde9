"""Plan a save: which rank writes which part of the state, each part once, and where the part lies in the
shard. Every rank computes the same plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import chain
from math import prod
from typing import Final, TypeVar

from elasticd.checkpoint.format.frames import ALIGNMENT, tensor_frame
from elasticd.checkpoint.format.manifest import Blob, Chunk, Index, Tensor, shard_name

_frame = lru_cache(maxsize=4096)(tensor_frame)
_RANKS_NAMED: Final = 8
WHOLE_BELOW: Final = 256 * 1024  # bytes; smaller tensors are not cut, since cutting them gains nothing
# Bytes; a frame's length has 32 bits, and several threads can read the parts of a tensor.
PART_MAX: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A box of a tensor: its start in the whole tensor and its length, in each dimension."""

    key: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The size in bytes."""
        return prod(self.sizes) * self.itemsize

    def rows(self, first: int, count: int) -> TensorPart:
        """Return ``count`` rows of the part, from row ``first`` of the part."""
        offsets = (self.offsets[0] + first, *self.offsets[1:])
        return replace(self, offsets=offsets, sizes=(count, *self.sizes[1:]))


@dataclass(frozen=True, slots=True)
class RankContent:
    """The content of a rank's state: its parts of tensors, and its objects with the bytes to reserve for
    each. ``buffers``: the tensors that are buffers of modules."""

    parts: tuple[TensorPart, ...]
    rooms: Mapping[str, int]
    paths: Mapping[str, tuple[str | int, ...]]
    buffers: tuple[str, ...] = ()


@dataclass(slots=True)
class Shard:
    """The shard that one rank writes. ``parts``: each with the offset of its data. ``blobs``: each with its
    offset and reserved bytes. ``fixed``: bytes that never change."""

    size: int = 0
    parts: list[tuple[TensorPart, int]] = field(default_factory=list)
    blobs: list[tuple[str, int, int]] = field(default_factory=list)
    fixed: list[tuple[int, bytes]] = field(default_factory=list)


def lay_out(held: Sequence[RankContent]) -> tuple[list[Shard], Index]:
    """Return the shards by rank, and their common index. Raises ValueError, with the entry and the ranks, if
    an entry differs between ranks.

    ``held``: by rank. What ranks have alike is looked at once if it is one object (``gather_alike``).
    """
    kinds = _alike(held)
    _require_alike(kinds)
    index = Index([shard_name(rank) for rank in range(len(held))], {}, {}, {})
    shards = [Shard() for _ in held]
    for its, ranks in kinds:
        for key, path in its.paths.items():
            index.paths.setdefault(key, path)
        for key, room in its.rooms.items():
            if key not in index.blobs:  # objects of one name are the same, and the first rank writes them
                shard = shards[ranks[0]]
                index.blobs[key] = Blob(ranks[0], shard.size, room)
                shard.blobs.append((key, shard.size, room))
                shard.size += _aligned(room)
    buffers = {key for its, _ in kinds for key in its.buffers}
    for rank, parts in enumerate(deal([h.parts for h in held], buffers)):
        shard = shards[rank]
        for part in parts:
            head, tail = _frame(part.dtype, part.sizes, part.size)
            item, at = shard.size, shard.size + len(head)
            end = at + part.size
            tensor = index.tensors.setdefault(part.key, Tensor(part.dtype, part.shape, []))
            chunk = Chunk(rank, at, part.offsets, part.sizes, item, end + len(tail) - item)
            tensor.chunks.append(chunk)
            shard.parts.append((part, at))
            shard.fixed += ((item, head), (end, tail))
            shard.size = _aligned(end + len(tail))
    return shards, index


_Kind = TypeVar("_Kind")


def _alike(held: Sequence[_Kind]) -> list[tuple[_Kind, list[int]]]:
    """Return each object once, with its ranks, in the order of the first ranks."""
    found: dict[int, tuple[_Kind, list[int]]] = {}
    for rank, its in enumerate(held):
        found.setdefault(id(its), (its, []))[1].append(rank)
    return list(found.values())


def _require_alike(kinds: Iterable[tuple[RankContent, list[int]]]) -> None:
    said: dict[str, dict[str, list[list[int]]]] = {}
    for its, ranks in kinds:
        entries = {part.key: f"{part.dtype} {list(part.shape)}" for part in its.parts}
        for key, kind in (*entries.items(), *((key, "no tensor") for key in its.rooms)):
            said.setdefault(key, {}).setdefault(kind, []).append(ranks)
    for key, by_kind in said.items():
        if len(by_kind) > 1:
            where = {kind: sorted(chain.from_iterable(ranks)) for kind, ranks in by_kind.items()}
            each = " and ".join(f"{kind} on {_ranks(ranks)}" for kind, ranks in where.items())
            raise ValueError(
                f"{key} cannot be saved, as it is {each}: make it alike on all ranks, or put the rank into "
                'its name, such as f"seen{rank}"'
            )


def _ranks(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:_RANKS_NAMED]))
    return f"rank{'s' * (len(ranks) > 1)} {some}{' and more' if len(ranks) > _RANKS_NAMED else ''}"


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def deal(
    held: Sequence[Sequence[TensorPart]], together: AbstractSet[str] = frozenset()
) -> tuple[tuple[TensorPart, ...], ...]:
    """Return the parts that each rank writes, from the parts that each rank holds.

    Parts that all ranks hold (replicas) are laid end to end and cut between rows into equal pieces. A part
    that some ranks hold goes to the one of these ranks with the fewest bytes so far. ``together``: keys of
    tensors that may differ between ranks; the first rank that holds such a tensor writes all of it.
    """
    holders: dict[TensorPart, list[list[int]]] = {}  # the ranks, by what they have alike
    for parts, ranks in _alike(held):
        for part in parts:
            holders.setdefault(part, []).append(ranks)
    world = len(held)
    dealt: list[list[TensorPart]] = [[] for _ in held]
    load = [0] * world
    lightest: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # heaps of loads and ranks
    everywhere = []
    for part, groups in holders.items():
        if part.key in together:
            first = groups[0][0]
            load[first] += part.size
            dealt[first] += _bounded(part)
    begun = load[0] if world > 1 else 0
    for part, groups in holders.items():
        if part.key in together:
            continue
        if sum(map(len, groups)) == world > 1:
            everywhere.append(part)
            continue
        heap = lightest.setdefault(tuple(ranks[0] for ranks in groups), [])
        if not heap:
            heap += [(load[rank], rank) for rank in chain.from_iterable(groups)]
            heapify(heap)
        while heap[0][0] < load[heap[0][1]]:  # another heap has given the rank more since
            heapreplace(heap, (load[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        load[rank] += part.size
        dealt[rank] += _bounded(part)
    for rank, part in _sliced(everywhere, world, begun):
        dealt[rank] += _bounded(part)
    return tuple(map(tuple, dealt))


def _sliced(parts: Sequence[TensorPart], world: int, begun: int) -> Iterator[tuple[int, TensorPart]]:
    """Yield the pieces of the replicated parts with their ranks. ``begun``: bytes that rank 0 already
    writes."""
    total = begun + sum(part.size for part in parts)
    at = begun  # the number of bytes before this part
    for part in parts:
        size = part.size
        if size < WHOLE_BELOW or not part.sizes or part.sizes[0] == 1:
            yield min(world - 1, (2 * at + size) * world // (2 * total) if total else 0), part
        else:
            rows, row = part.sizes[0], size // part.sizes[0]
            first, rank = 0, max(0, at * world // total - 1)  # the ranks before have their share
            while first < rows:
                end = total * (rank + 1) // world
                until = rows if rank == world - 1 else min(rows, max(first, round((end - at) / row)))
                if until > first:
                    yield rank, part.rows(first, until - first)
                    first = until
                rank += 1
        at += size


def _bounded(part: TensorPart) -> Iterator[TensorPart]:
    if part.size <= PART_MAX or not part.sizes or part.sizes[0] == 1:
        yield part
        return
    rows = part.sizes[0]
    most = max(1, PART_MAX // (part.size // rows))
    for first in range(0, rows, most):
        yield part.rows(first, min(most, rows - first))
