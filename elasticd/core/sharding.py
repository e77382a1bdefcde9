"""Decide which rank writes which part of a state that many ranks hold: each part once, in about equal
shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import prod
from typing import Final

WHOLE_BELOW: Final = 256 * 1024  # bytes: smaller tensors are not cut, since that gains nothing
PART_MAX: Final = 1 << 30  # bytes: a frame's length has 32 bits, and several readers share a large tensor


@dataclass(frozen=True, slots=True)
class Part:
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

    def rows(self, first: int, count: int) -> Part:
        """Return ``count`` rows of the part, from row ``first`` of the part."""
        offsets = (self.offsets[0] + first, *self.offsets[1:])
        return replace(self, offsets=offsets, sizes=(count, *self.sizes[1:]))


def deal(
    held: Sequence[Sequence[Part]], together: AbstractSet[str] = frozenset()
) -> tuple[tuple[Part, ...], ...]:
    """Return the parts that each rank writes, from the parts that each rank holds.

    Parts that all ranks hold (replicas) are laid end to end and cut between rows into equal pieces. A part
    that some ranks hold goes to the one of them with the least so far. ``together``: keys of tensors that may
    differ between ranks; the first rank that holds such a tensor writes all of it.
    """
    holders: dict[Part, list[int]] = {}
    for rank, parts in enumerate(held):
        for part in parts:
            holders.setdefault(part, []).append(rank)
    world = len(held)
    dealt: list[list[Part]] = [[] for _ in held]
    load = [0] * world
    everywhere = []
    for part, ranks in holders.items():
        if part.key in together:
            load[ranks[0]] += part.size
            dealt[ranks[0]] += _bounded(part)
    begun = load[0] if world > 1 else 0
    for part, ranks in holders.items():
        if part.key in together:
            continue
        if len(ranks) == world > 1:
            everywhere.append(part)
            continue
        rank = min(ranks, key=lambda r: (load[r], r))
        load[rank] += part.size
        dealt[rank] += _bounded(part)
    for rank, part in _sliced(everywhere, world, begun):
        dealt[rank] += _bounded(part)
    return tuple(map(tuple, dealt))


def _sliced(parts: Sequence[Part], world: int, begun: int) -> Iterator[tuple[int, Part]]:
    """Yield the pieces of the replicated parts with their ranks. ``begun``: bytes that rank 0 already
    writes."""
    total = begun + sum(part.size for part in parts)
    at = begun  # bytes before this part
    for part in parts:
        size = part.size
        if size < WHOLE_BELOW or not part.sizes or part.sizes[0] == 1:
            yield min(world - 1, (2 * at + size) * world // (2 * total) if total else 0), part
        else:
            rows, row = part.sizes[0], size // part.sizes[0]
            first = 0
            for rank in range(world):
                end = total * (rank + 1) // world
                until = rows if rank == world - 1 else min(rows, max(first, round((end - at) / row)))
                if until > first:
                    yield rank, part.rows(first, until - first)
                    first = until
        at += size


def _bounded(part: Part) -> Iterator[Part]:
    if part.size <= PART_MAX or not part.sizes or part.sizes[0] == 1:
        yield part
        return
    rows = part.sizes[0]
    most = max(1, PART_MAX // (part.size // rows))
    for first in range(0, rows, most):
        yield part.rows(first, min(most, rows - first))
