"""Plan a save: which rank writes which part of the state, each part once, and where the part lies in the
shard. Rank 0 gives each rank its share; each rank lays its share out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import chain
from math import prod
from typing import Final, TypeVar

import msgspec

from elasticd.checkpoint.format.frames import ALIGNMENT, tensor_frame
from elasticd.checkpoint.format.manifest import Blob, Chunk, Index, Tensor, shard_name

_frame = lru_cache(maxsize=4096)(tensor_frame)
_RANKS_NAMED: Final = 8
WHOLE_BELOW: Final = 256 * 1024  # bytes; smaller tensors are not cut, since cutting them gains nothing
# Bytes; a frame's length has 32 bits, and several threads can read the parts of a tensor.
PART_MAX: Final = 1 << 30
# A world of more ranks than ``WRITERS`` has further writers only if each of them has ``SHARE_MIN`` bytes:
# each rank may read the files of all writers. The other ranks write no file.
WRITERS: Final = 64
SHARE_MIN: Final = 16 << 20


class TensorPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
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
        sizes = (count, *self.sizes[1:])
        return TensorPart(self.key, self.dtype, self.itemsize, self.shape, offsets, sizes)


class RankContent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The content of a rank's state: its parts of tensors, and its objects with the bytes to reserve for
    each. ``buffers``: the tensors that are buffers of modules."""

    parts: tuple[TensorPart, ...]
    rooms: dict[str, int]
    paths: dict[str, tuple[str | int, ...]]
    buffers: tuple[str, ...] = ()


class RankShare(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one rank writes: parts of tensors, and objects with the bytes to reserve for each."""

    parts: tuple[TensorPart, ...] = ()
    rooms: tuple[tuple[str, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.parts or self.rooms)


@dataclass(slots=True)
class Shard:
    """The shard that one rank writes. ``parts``: each with the offset of its data. ``blobs``: each with its
    offset and reserved bytes. ``fixed``: bytes that never change."""

    size: int = 0
    parts: list[tuple[TensorPart, int]] = field(default_factory=list)
    blobs: list[tuple[str, int, int]] = field(default_factory=list)
    fixed: list[tuple[int, bytes]] = field(default_factory=list)


def share_out(held: Sequence[RankContent]) -> list[RankShare]:
    """Return the shares by rank. Raises ValueError, with the entry and the ranks, if an entry differs between
    ranks.

    ``held``: by rank. What ranks have alike is looked at once if it is one object (``RankGroup.collect``).
    """
    kinds = _alike(held)
    _require_alike(kinds)
    rooms: dict[int, list[tuple[str, int]]] = {}
    seen: set[str] = set()
    for its, ranks in kinds:
        for key, room in its.rooms.items():
            if key not in seen:  # objects of one name are the same, and the first rank writes them
                seen.add(key)
                rooms.setdefault(ranks[0], []).append((key, room))
    buffers = {key for its, _ in kinds for key in its.buffers}
    dealt = deal([h.parts for h in held], buffers)
    return [RankShare(parts, tuple(rooms.get(rank, ()))) for rank, parts in enumerate(dealt)]


def index_of(held: Sequence[RankContent], shares: Sequence[RankShare]) -> Index:
    """Return the index of all shards. ``held`` and ``shares``: by rank, as of ``share_out``."""
    index = Index([shard_name(rank) for rank in range(len(shares))], {}, {}, {})
    for its, _ in _alike(held):
        for key, path in its.paths.items():
            index.paths.setdefault(key, path)
    for rank, share in enumerate(shares):
        if share:
            lay_out(rank, share, index)
    return index


def lay_out(rank: int, share: RankShare, index: Index | None = None) -> Shard:
    """Return the shard that the rank writes, and add the shard to the index, if one is given."""
    shard = Shard()
    for key, room in share.rooms:
        shard.blobs.append((key, shard.size, room))
        shard.size += _aligned(room)
    for part in share.parts:
        head, tail = _frame(part.dtype, part.sizes, part.size)
        item, at = shard.size, shard.size + len(head)
        end = at + part.size
        shard.parts.append((part, at))
        shard.fixed += ((item, head), (end, tail))
        shard.size = _aligned(end + len(tail))
        if index is not None:
            tensor = index.tensors.get(part.key)
            if tensor is None:
                tensor = index.tensors[part.key] = Tensor(part.dtype, part.shape, [])
            tensor.chunks.append(Chunk(rank, at, part.offsets, part.sizes, item, end + len(tail) - item))
    if index is not None:
        index.blobs.update({key: Blob(rank, at, room) for key, at, room in shard.blobs})
    return shard


_Kind = TypeVar("_Kind")


def _alike(held: Sequence[_Kind]) -> list[tuple[_Kind, list[int]]]:
    """Return each object once, with its ranks, in the order of the first ranks."""
    found: dict[int, tuple[_Kind, list[int]]] = {}
    for rank, its in enumerate(held):
        found.setdefault(id(its), (its, []))[1].append(rank)
    return list(found.values())


_Form = tuple[str, tuple[int, ...]]  # the type and the shape of a tensor


def _require_alike(kinds: Iterable[tuple[RankContent, list[int]]]) -> None:
    said: dict[str, dict[_Form | None, list[list[int]]]] = {}
    for its, ranks in kinds:
        forms: dict[str, _Form | None] = {part.key: (part.dtype, part.shape) for part in its.parts}
        for key, form in (*forms.items(), *((key, None) for key in its.rooms)):
            said.setdefault(key, {}).setdefault(form, []).append(ranks)
    for key, by_form in said.items():
        if len(by_form) > 1:
            where = {_said(form): sorted(chain.from_iterable(ranks)) for form, ranks in by_form.items()}
            each = " and ".join(f"{form} on {_ranks(ranks)}" for form, ranks in where.items())
            raise ValueError(
                f"{key} cannot be saved, as it is {each}: make it alike on all ranks, or put the rank into "
                'its name, such as f"seen{rank}"'
            )


def _said(form: _Form | None) -> str:
    return f"{form[0]} {list(form[1])}" if form is not None else "no tensor"


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
    everywhere = []
    for part, groups in holders.items():
        if part.key in together:
            first = groups[0][0]
            load[first] += part.size
            dealt[first] += _bounded(part)
    begun = load[0] if world > 1 else 0
    some: dict[tuple[int, ...], list[TensorPart]] = {}  # parts by the first ranks of their groups
    for part, groups in holders.items():
        if part.key in together:
            continue
        if len(groups) == 1 and len(groups[0]) == 1:  # of a large sharded model, nearly all parts
            rank = groups[0][0]
            load[rank] += part.size
            dealt[rank] += _bounded(part)
        elif sum(map(len, groups)) == world:
            everywhere.append(part)
        else:
            some.setdefault(tuple(ranks[0] for ranks in groups), []).append(part)
    for its in some.values():
        ranks = [*chain.from_iterable(holders[its[0]])]
        chosen = writers(ranks, world, sum(part.size for part in its))
        heap = [(load[rank], rank) for rank in chosen]
        heapify(heap)
        for part in its:
            rank = heap[0][1]
            load[rank] += part.size
            heapreplace(heap, (load[rank], rank))
            dealt[rank] += _bounded(part)
    for rank, part in _sliced(everywhere, world, begun):
        dealt[rank] += _bounded(part)
    return tuple(map(tuple, dealt))


def writers(ranks: Sequence[int], world: int, size: int) -> Sequence[int]:
    """Return those of the ranks that write ``size`` bytes which all of them hold, spread over the ranks."""
    count = min(len(ranks), max(size // SHARE_MIN, WRITERS * len(ranks) // world, 1))
    return [ranks[n * len(ranks) // count] for n in range(count)]


def _sliced(parts: Sequence[TensorPart], world: int, begun: int) -> Iterator[tuple[int, TensorPart]]:
    """Yield the pieces of the replicated parts with their ranks. ``begun``: bytes that rank 0 already
    writes."""
    total = begun + sum(part.size for part in parts)
    chosen = writers(range(world), world, total)
    at = begun  # the number of bytes before this part
    for part in parts:
        for number, piece in _cut(part, at, total, len(chosen)):
            yield chosen[number], piece
        at += part.size


def _cut(part: TensorPart, at: int, total: int, count: int) -> Iterator[tuple[int, TensorPart]]:
    """Yield the pieces of the part with the numbers of their writers. ``at``: how many of the ``total`` bytes
    are before the part. ``count``: of writers."""
    size = part.size
    if size < WHOLE_BELOW or not part.sizes or part.sizes[0] == 1:
        yield min(count - 1, (2 * at + size) * count // (2 * total) if total else 0), part
        return
    rows, row = part.sizes[0], size // part.sizes[0]
    first, number = 0, max(0, at * count // total - 1)  # the writers before have their share
    while first < rows:
        end = total * (number + 1) // count
        until = rows if number == count - 1 else min(rows, max(first, round((end - at) / row)))
        if until > first:
            yield number, part.rows(first, until - first)
            first = until
        number += 1


def _bounded(part: TensorPart) -> Sequence[TensorPart]:
    if part.size <= PART_MAX or not part.sizes or part.sizes[0] == 1:
        return (part,)
    rows = part.sizes[0]
    most = max(1, PART_MAX // (part.size // rows))
    return [part.rows(first, min(most, rows - first)) for first in range(0, rows, most)]
