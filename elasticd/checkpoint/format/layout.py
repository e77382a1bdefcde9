"""The layout of the shards of a plan: what each rank has, what it writes, and where that lies in its shard.

A rank lays out its own shard. The saver that commits gets what all ranks have and write, and makes the index
while training goes on: in a large sharded job that takes seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Final

import msgspec

from elasticd.checkpoint.format import metadata
from elasticd.checkpoint.format.frames import ALIGNMENT, tensor_frame
from elasticd.checkpoint.format.manifest import (
    BadCheckpoint,
    Blob,
    Chunk,
    Index,
    Tensor,
    encode_index,
    shard_name,
    wrong_with_index,
)

# Bytes; a frame's length has 32 bits, and several threads can read the parts of a tensor.
PART_MAX: Final = 1 << 30
_PART_LIMIT: Final = 1 << 50  # bytes; no memory has as many
_frame = lru_cache(maxsize=4096)(tensor_frame)
_Path = tuple[str | int, ...]

# Which part of a tensor a rank has: where the part begins in the tensor, and then its lengths, by dimension,
# such as "24,0,24,2048". Text, since rank 0 compares the boxes of all ranks, and reads few of them.
Box = str


def box_of(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    return ",".join(map(str, (*offsets, *sizes)))


class TensorForm(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor of the state, the same on all ranks that have a part of it. ``path``: its place in the nested
    state."""

    key: str
    path: _Path
    dtype: str
    itemsize: int
    shape: tuple[int, ...]

    def part(self, box: Box) -> TensorPart:
        """Raises ValueError if the box is not of this tensor."""
        numbers = tuple(map(int, box.split(","))) if box else ()
        dims = len(self.shape)
        part = TensorPart(self.key, self.dtype, self.itemsize, self.shape, numbers[:dims], numbers[dims:])
        within = zip(part.offsets, part.sizes, self.shape, strict=False)
        if len(numbers) != 2 * dims or any(min(at, n) < 0 or at + n > whole for at, n, whole in within):
            raise ValueError(f"{box!r} is no part of {self.key}, whose shape is {list(self.shape)}")
        if part.size > _PART_LIMIT:
            raise ValueError(f"a part of {self.key} has {part.size} bytes")
        return part


class StateForm(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What most ranks have alike of their state: its tensors, and which of the tensors are buffers of
    modules."""

    tensors: tuple[TensorForm, ...]
    buffers: tuple[str, ...] = ()


class Holding(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a rank has of its state: its part of each tensor of the ``StateForm``, or None; and its objects,
    each with the bytes to reserve and its place in the nested state."""

    boxes: tuple[Box | None, ...]
    objects: dict[str, tuple[int, _Path]]


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


class RankShare(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a rank writes. ``own``: the numbers of the tensors of which the rank writes all that it has, and
    ``parts``: of other tensors. ``rooms``: objects with the bytes to reserve for each."""

    own: tuple[int, ...] = ()
    parts: tuple[TensorPart, ...] = ()
    rooms: tuple[tuple[str, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.own or self.parts or self.rooms)


class _Shares(msgspec.Struct, frozen=True):
    """What the ranks have and write. ``ranks``: by rank, the numbers of its form, holding and share."""

    forms: Sequence[StateForm]
    holdings: Sequence[Holding]
    shares: Sequence[RankShare]
    ranks: Sequence[tuple[int, int, int]]


class _EncodedShares(msgspec.Struct, frozen=True):
    """``_Shares`` as rank 0 writes them, without a second encoding of what the ranks sent."""

    forms: Sequence[msgspec.Raw]
    holdings: Sequence[msgspec.Raw]
    shares: Sequence[msgspec.Raw]
    ranks: Sequence[tuple[int, int, int]]


# Made before any thread starts: see ``manifest``.
_SHARES: Final = msgspec.json.Decoder(_Shares)
_NOTHING: Final = msgspec.json.encode(RankShare())


@dataclass(slots=True)
class Shard:
    """The shard that one rank writes. ``parts``: each with the offset of its data. ``blobs``: each with its
    offset and reserved bytes. ``fixed``: bytes that never change."""

    size: int = 0
    parts: list[tuple[TensorPart, int]] = field(default_factory=list)
    blobs: list[tuple[str, int, int]] = field(default_factory=list)
    fixed: list[tuple[int, bytes]] = field(default_factory=list)


class Layout:
    """Where the tensors and objects of all checkpoints of a plan are. ``shares``: what all ranks have and
    write (``encode_shares``). Empty except from rank 0, whose saver commits."""

    def __init__(self, shares: bytes) -> None:
        self.shares = shares
        self._described: tuple[bytes, bytes] | str | None = None
        self._lock = threading.Lock()  # the index is made once, whichever thread needs it first

    @classmethod
    def of_index(cls, index: bytes) -> Layout:
        """Return a layout of which only the encoded index is known."""
        made = cls(index)
        made._described = index, b""
        return made

    @property
    def index(self) -> bytes:
        """The encoded ``Index`` of all shards, or empty without shares. To make it takes seconds in a large
        job. Raises BadCheckpoint if the shares are not valid."""
        return self._describe()[0] if self.shares else b""

    @property
    def metadata(self) -> bytes:
        """DCP's ``.metadata`` of the shards. Takes as long. Raises BadCheckpoint if the shares are not
        valid."""
        return self._describe()[1]

    def _describe(self) -> tuple[bytes, bytes]:
        with self._lock:
            if self._described is None:
                try:
                    index = index_of(self.shares)
                    self._described = encode_index(index), metadata.made_of(index)
                except (ValueError, LookupError, OverflowError, RecursionError) as error:
                    self._described = f"the index of its shards cannot be made: {error}"
            if isinstance(self._described, str):
                raise BadCheckpoint(self._described)
            return self._described


def encode_shares(forms: Sequence[bytes], holdings: Sequence[bytes], shares: Sequence[bytes]) -> bytes:
    """Return what all ranks have and write, encoded. Each argument: encoded, by rank. A rank that writes
    nothing may have an empty share."""
    all_forms, form_numbers = _numbered(forms)
    all_holdings, holding_numbers = _numbered(holdings)
    all_shares, share_numbers = _numbered([its or _NOTHING for its in shares])
    ranks = [*zip(form_numbers, holding_numbers, share_numbers, strict=True)]
    return msgspec.json.encode(_EncodedShares(all_forms, all_holdings, all_shares, ranks))


def _numbered(each: Sequence[bytes]) -> tuple[list[msgspec.Raw], list[int]]:
    """Return the different items, and for each item its number among them."""
    numbers = {raw: number for number, raw in enumerate(dict.fromkeys(each))}
    return [*map(msgspec.Raw, numbers)], [numbers[raw] for raw in each]


def index_of(raw: bytes) -> Index:
    """Return the index of all shards. ``raw``: of ``encode_shares``. Raises ValueError or IndexError if it is
    not valid."""
    its = _SHARES.decode(raw)
    paths: dict[str, _Path] = {}
    for tensor in chain.from_iterable(form.tensors for form in its.forms):
        paths[tensor.key] = tensor.path
    for holding in its.holdings:
        paths.update((key, path) for key, (_, path) in holding.objects.items())
    index = Index([shard_name(rank) for rank in range(len(its.ranks))], {}, {}, paths)
    for rank, (form, held, share) in enumerate(its.ranks):
        if its.shares[share]:
            lay_out(rank, its.forms[form], its.holdings[held], its.shares[share], index)
    if wrong := wrong_with_index(index, ()):
        raise ValueError(wrong)
    return index


def lay_out(
    rank: int, form: StateForm, holding: Holding, share: RankShare, index: Index | None = None
) -> Shard:
    """Return the shard that the rank writes, and add the shard to the index, if one is given. ``holding``: of
    the rank."""
    shard = Shard()
    for key, room in share.rooms:
        shard.blobs.append((key, shard.size, room))
        shard.size += _aligned(room)
    for part in _written(form, holding, share):
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


def _written(form: StateForm, holding: Holding, share: RankShare) -> Iterator[TensorPart]:
    for number in share.own:
        box = holding.boxes[number]
        if box is not None:
            yield from bounded(form.tensors[number].part(box))
    yield from share.parts


def bounded(part: TensorPart) -> Sequence[TensorPart]:
    """Return the part in pieces of ``PART_MAX`` bytes at most, unless a row is larger."""
    size = part.size
    if size <= PART_MAX or not part.sizes or part.sizes[0] == 1:
        return (part,)
    rows = part.sizes[0]
    most = max(1, PART_MAX // (size // rows))
    return [part.rows(first, min(most, rows - first)) for first in range(0, rows, most)]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
