"""The layout of the shards: where each part of the state lies. Every rank computes the same layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from elasticd.checkpoint.format.frames import ALIGNMENT, tensor_frame
from elasticd.checkpoint.format.manifest import Blob, Chunk, Index, Tensor, shard_name
from elasticd.core.sharding import Part, deal

_frame = lru_cache(maxsize=4096)(tensor_frame)
_RANKS_NAMED: Final = 8


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds: its parts of tensors, and its objects with the bytes to reserve for each.
    ``buffers``: the tensors that are buffers of modules."""

    parts: tuple[Part, ...]
    rooms: Mapping[str, int]
    paths: Mapping[str, tuple[str | int, ...]]
    buffers: tuple[str, ...] = ()


@dataclass(slots=True)
class Shard:
    """What one rank writes. ``parts``: each with the offset of its data. ``blobs``: each with its offset and
    reserved bytes. ``fixed``: bytes that never change."""

    size: int = 0
    parts: list[tuple[Part, int]] = field(default_factory=list)
    blobs: list[tuple[str, int, int]] = field(default_factory=list)
    fixed: list[tuple[int, bytes]] = field(default_factory=list)


def lay_out(held: Sequence[Held]) -> tuple[list[Shard], Index]:
    """Return the shards by rank, and their common index. Raises ValueError, with the entry and the ranks, if
    an entry differs between ranks."""
    _require_alike(held)
    index = Index([shard_name(rank) for rank in range(len(held))], {}, {}, {})
    shards = [Shard() for _ in held]
    for rank, its in enumerate(held):
        for key, path in its.paths.items():
            index.paths.setdefault(key, path)
        for key, room in its.rooms.items():
            if key not in index.blobs:  # objects of one name are the same, and the first rank writes them
                shard = shards[rank]
                index.blobs[key] = Blob(rank, shard.size, room)
                shard.blobs.append((key, shard.size, room))
                shard.size += _aligned(room)
    buffers = {key for its in held for key in its.buffers}
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


def _require_alike(held: Sequence[Held]) -> None:
    kinds: dict[str, dict[str, list[int]]] = {}
    for rank, its in enumerate(held):
        said = {part.key: f"{part.dtype} {list(part.shape)}" for part in its.parts}
        for key, kind in (*said.items(), *((key, "no tensor") for key in its.rooms)):
            kinds.setdefault(key, {}).setdefault(kind, []).append(rank)
    for key, by_kind in kinds.items():
        if len(by_kind) > 1:
            each = " and ".join(f"{kind} on {_ranks(ranks)}" for kind, ranks in by_kind.items())
            raise ValueError(
                f"{key} cannot be saved, as it is {each}: give what differs from rank to rank a name of its "
                'rank\'s own, such as f"seen{rank}", or make it alike on all ranks'
            )


def _ranks(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:_RANKS_NAMED]))
    return f"rank{'s' * (len(ranks) > 1)} {some}{' and more' if len(ranks) > _RANKS_NAMED else ''}"


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
