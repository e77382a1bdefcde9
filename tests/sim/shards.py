"""The parts of a sharded model's state, as simulated workers hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

PARTS = 24
Point = tuple[int, int]  # a commit: its round and its step
Held = Mapping[Point, frozenset[int]]  # the parts that a worker holds, by commit


def parts_of(rank: int, size: int, unit: int) -> frozenset[int]:
    """Return the parts of a rank. With units, each unit has the whole model."""
    rank, of = (rank % unit, unit) if unit > 1 else (rank, size)
    return frozenset(range(rank * PARTS // of, (rank + 1) * PARTS // of))


def with_copies(rank: int, size: int, unit: int, redundancy: int) -> frozenset[int]:
    """Return the parts that a rank holds: its own, and those that it guards for other ranks."""
    replicas = size // unit if unit > 1 else 1
    guarded = range(1, min(redundancy + 1 - replicas, size - 1) + 1)
    return parts_of(rank, size, unit).union(*(parts_of((rank - k) % size, size, unit) for k in guarded))


def newest_whole(held: Iterable[Held]) -> Point | None:
    """Return the newest commit of which all parts are held."""
    there: dict[Point, frozenset[int]] = {}
    for its in held:
        for point, parts in its.items():
            there[point] = there.get(point, frozenset()) | parts
    return max((point for point, parts in there.items() if len(parts) == PARTS), default=None)


def given(point: Point, going: Sequence[Held], staying: Sequence[Held]) -> list[frozenset[int]]:
    """Return the parts that each staying worker gets from the leaving workers."""
    there = frozenset[int]().union(*(its.get(point, frozenset()) for its in staying))
    found: list[frozenset[int]] = [frozenset() for _ in staying]
    for number, its in enumerate(going):
        if staying:
            taken = its.get(point, frozenset()) - there
            found[number % len(staying)] |= taken
            there |= taken
    return found
