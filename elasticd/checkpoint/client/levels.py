"""The two levels of groups of a large world: the ranks of each node, and the first rank of each node.

The ranks agree on the levels through the store of the world's process group. Each rank names its node, and
rank 0 decides for all. So the ranks of a node need not follow each other, and nodes may differ in size.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# In a world of at most as many ranks each rank can be connected to each other rank.
FLAT_MAX: Final = 64
_RANKS: Final = msgspec.json.Decoder(
    tuple[int, ...]
)  # made before any thread starts: see ``format.manifest``


class Levels(NamedTuple):
    """The groups of one rank. ``name``: begins the groups' names. ``node``: the ranks of the rank's node.
    ``firsts``: the first rank of each node; empty unless the rank is one of them. ``nodes``: the ranks of
    each node, in the order of ``firsts``; empty except on rank 0."""

    name: str
    node: tuple[int, ...]
    firsts: tuple[int, ...] = ()
    nodes: tuple[tuple[int, ...], ...] = ()


def nodes_of(names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node, in order; the nodes in the order of their first ranks.

    ``names``: the name of each rank's node, by rank.
    """
    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    return tuple(map(tuple, nodes.values()))


def two_pay(nodes: Sequence[Sequence[int]]) -> bool:
    """Whether a rank has fewer connections with two levels than with one."""
    return max(map(len, nodes)) - 1 + len(nodes) - 1 < sum(map(len, nodes)) - 1


def agree(rank: int, size: int) -> Levels | None:
    """Return this rank's levels, or None if the world is to have one level. All ranks call this together, and
    either all get levels or none does."""
    name = f"elasticd-{c10d._world.group_count}"  # all ranks make as many groups with this counter
    c10d._world.group_count += 1
    store = dist.PrefixStore(name, c10d._get_default_store())
    node = os.environ.get("GROUP_RANK") or socket.gethostname()
    store.set(f"node of {rank}", node)
    nodes = _decide(store, size) if rank == 0 else ()
    mine = _ranks(store, f"ranks of {node}")
    if not mine:
        return None
    return Levels(name, mine, _ranks(store, "firsts") if rank == mine[0] else (), nodes)


def _decide(store: dist.Store, size: int) -> tuple[tuple[int, ...], ...]:
    """Read the node of each rank, and write the levels for all ranks. Return the ranks of each node."""
    keys = [f"node of {rank}" for rank in range(size)]
    wait_for_ranks(store, keys)
    names = [raw.decode() for raw in store.multi_get(keys)]
    nodes = nodes_of(names)
    pay = two_pay(nodes)
    told = {f"ranks of {names[ranks[0]]}": ranks if pay else () for ranks in nodes}
    told["firsts"] = tuple(ranks[0] for ranks in nodes)
    for key, ranks in told.items():
        store.set(key, msgspec.json.encode(ranks).decode())
    return nodes


def _ranks(store: dist.Store, key: str) -> tuple[int, ...]:
    wait_for_ranks(store, [key])
    return _RANKS.decode(store.get(key))


def wait_for_ranks(store: dist.Store, keys: list[str]) -> None:
    """Wait for values that other ranks set.

    core.thread_activity finds this function in stacks by its name.
    """
    store.wait(keys, c10d.default_pg_timeout)


def group_of(ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """Return a gloo group of these ranks, which call this together. ``name``: the name of no other group that
    has the first of these ranks.

    ``dist.new_group`` needs all ranks of the world, or ranks that are in equally many groups so far. Like
    ``new_group`` this calls the function that ``worker.world.group`` replaces, so that a world knows the
    group's connections. The group is destroyed with the world's own.
    """
    make: Any = c10d._new_process_group_helper
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
