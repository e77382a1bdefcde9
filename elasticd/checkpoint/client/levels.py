"""The levels of groups in a large world: the ranks of each node, and above them the groups' first ranks.

The ranks agree on the levels through the store of the world's process group. Each rank names its node, and
rank 0 decides for all. So the ranks of a node need not follow each other, and nodes may differ in size.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from itertools import chain
from math import ceil, sqrt
from typing import Any, Final, NamedTuple

import msgspec
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# At most as many ranks of a world, or first ranks, are each connected to each other.
FLAT_MAX: Final = 64

Groups = tuple[tuple[int, ...], ...]  # of one level: the ranks of each group


class RankPlace(NamedTuple):
    """The place of a rank in a level. ``number``: of the rank among the ``size`` ranks of the level.
    ``group``: the ranks of its group."""

    number: int
    size: int
    group: tuple[int, ...]


class Levels(NamedTuple):
    """The levels as one rank sees them. ``name``: begins the names of all groups. ``places``: of the rank, in
    each level from the lowest up to the last that has the rank. ``parts``: for each of these levels, the
    numbers of the ranks in each group; empty except on rank 0."""

    name: str
    places: tuple[RankPlace, ...]
    parts: tuple[Groups, ...] = ()


# Made before any thread starts: see ``format.manifest``.
_PLACES: Final = msgspec.json.Decoder(tuple[RankPlace, ...])


def levels_of(nodes: Sequence[str], flat_max: int) -> tuple[Groups, ...]:
    """Return the groups of each level, from the lowest up.

    The lowest level has a group for each node, and each further level has the first ranks of the groups
    below. There, at most ``flat_max`` ranks form one group; more ranks form about as many groups as a group
    has ranks.

    ``nodes``: the name of each rank's node, by rank.
    """
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    levels = [tuple(map(tuple, by_node.values()))]
    while len(levels[-1]) > 1:
        firsts = tuple(group[0] for group in levels[-1])
        each = len(firsts) if len(firsts) <= flat_max else ceil(sqrt(len(firsts)))
        levels.append(tuple(firsts[at : at + each] for at in range(0, len(firsts), each)))
    return tuple(levels)


def pay(levels: Sequence[Groups]) -> bool:
    """Whether each rank has fewer connections than in a world of one group."""
    return sum(max(map(len, groups)) - 1 for groups in levels) < sum(map(len, levels[0])) - 1


def places_of(levels: Sequence[Groups]) -> dict[int, list[RankPlace]]:
    """Return the places of each rank, from the lowest level up."""
    places: dict[int, list[RankPlace]] = {}
    for groups in levels:
        numbers = _numbers(groups)
        for group in groups:
            for rank in group:
                places.setdefault(rank, []).append(RankPlace(numbers[rank], len(numbers), group))
    return places


def _parts(groups: Groups) -> Groups:
    numbers = _numbers(groups)
    return tuple(tuple(numbers[rank] for rank in group) for group in groups)


def _numbers(groups: Groups) -> dict[int, int]:
    """Return the number of each rank of a level: its place in the order of ranks."""
    return {rank: number for number, rank in enumerate(sorted(chain.from_iterable(groups)))}


def agree(rank: int, size: int) -> Levels | None:
    """Return this rank's levels, or None if the world is to have one group. All ranks call this together, and
    either all get levels or none does."""
    name = f"elasticd-{c10d._world.group_count}"  # all ranks make as many groups with this counter
    c10d._world.group_count += 1
    store = dist.PrefixStore(name, c10d._get_default_store())
    store.set(f"node of {rank}", os.environ.get("GROUP_RANK") or socket.gethostname())
    levels = _decide(store, size) if rank == 0 else ()
    key = f"places of {rank}"
    wait_for_ranks(store, [key])
    places = _PLACES.decode(store.get(key))
    if not places:
        return None
    return Levels(name, places, tuple(map(_parts, levels)))


def _decide(store: dist.Store, size: int) -> tuple[Groups, ...]:
    """Read the node of each rank, and write the places of each rank: none if levels do not pay. Return the
    levels."""
    keys = [f"node of {rank}" for rank in range(size)]
    wait_for_ranks(store, keys)
    levels = levels_of([raw.decode() for raw in store.multi_get(keys)], FLAT_MAX)
    places = places_of(levels) if pay(levels) else {}
    for rank in range(size):
        store.set(f"places of {rank}", msgspec.json.encode(places.get(rank, ())).decode())
    return levels


def wait_for_ranks(store: dist.Store, keys: list[str]) -> None:
    """Wait for values that other ranks set.

    core.thread_activity finds this function in stacks by its name.
    """
    store.wait(keys, c10d.default_pg_timeout)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Make groups in the block without the wrapper of ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.

    The wrapper compares how many calls each rank has made. It counts the messages that a rank sends to
    another one or receives, too, and their number differs between ranks.
    """
    level = dist.get_debug_level()
    if level != dist.DebugLevel.DETAIL:
        yield
        return
    dist.set_debug_level(dist.DebugLevel.INFO)
    try:
        yield
    finally:
        dist.set_debug_level(level)


def group_of(ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """Return a gloo group of these ranks, which call this together. ``name``: the name of no other group that
    has the first of these ranks.

    ``dist.new_group`` needs all ranks of the world, or ranks that are in equally many groups so far. Like
    ``new_group`` this calls the function that ``worker.world.group`` replaces, so that a world knows the
    group's connections. The group is destroyed with the world's own.
    """
    make: Any = c10d._new_process_group_helper
    with unchecked():
        made = make(
            len(ranks),
            ranks.index(dist.get_rank()),
            [*ranks],
            dist.Backend.GLOO,
            c10d._get_default_store(),
            f"{name}-{ranks[0]}",
            timeout=c10d.default_pg_timeout,
        )
    group: dist.ProcessGroup = made[0]
    c10d._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group
