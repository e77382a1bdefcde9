"""Where each part of the state lies in its shard: the same computation on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from elasticd.checkpoint.frames import ALIGNMENT, tensor_frame
from elasticd.checkpoint.manifest import Blob, Chunk, Index, Tensor, shard_name
from elasticd.core.sharding import Part, deal

_frame = lru_cache(maxsize=4096)(tensor_frame)


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank has: its parts of tensors, and its objects, with the room to set aside for each."""

    parts: tuple[Part, ...]
    rooms: Mapping[str, int]
    paths: Mapping[str, tuple[str | int, ...]]


@dataclass(slots=True)
class Shard:
    """What one rank writes. ``parts`` with where their data begins; ``blobs`` with place and room;
    ``fixed``: the bytes that are always the same."""

    size: int = 0
    parts: list[tuple[Part, int]] = field(default_factory=list)
    blobs: list[tuple[str, int, int]] = field(default_factory=list)
    fixed: list[tuple[int, bytes]] = field(default_factory=list)


def lay_out(held: Sequence[Held]) -> tuple[list[Shard], Index]:
    """By rank, and the index of them all."""
    index = Index([shard_name(rank) for rank in range(len(held))], {}, {}, {})
    shards = [Shard() for _ in held]
    for rank, its in enumerate(held):
        for key, path in its.paths.items():
            index.paths.setdefault(key, path)
        for key, room in its.rooms.items():
            if key not in index.blobs:  # what several have is the same, and the first writes it
                shard = shards[rank]
                index.blobs[key] = Blob(rank, shard.size, room)
                shard.blobs.append((key, shard.size, room))
                shard.size += _aligned(room)
    for rank, parts in enumerate(deal([h.parts for h in held])):
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


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
