"""Choose the node that holds copies of another node's shards, and the newest whole state that nodes hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Offer:
    """Shards of one state in a node's memory. ``name``: the state's name, the same on all nodes. ``world``:
    the number of its shards. ``ranks``: the shards that are whole on this node."""

    node: str
    name: str
    round: int
    step: int
    world: int
    ranks: frozenset[int]

    @property
    def age(self) -> tuple[int, int]:
        """A larger age is newer: the round counts before the step."""
        return self.round, self.step


@dataclass(frozen=True, slots=True)
class Choice:
    """A whole state. ``holders``: for each shard, the nodes that have it."""

    name: str
    round: int
    step: int
    holders: tuple[tuple[str, ...], ...]

    def without(self, node: str) -> Choice | None:
        """Return the choice without this node; None if the state is then not whole."""
        left = tuple(tuple(n for n in nodes if n != node) for nodes in self.holders)
        return Choice(self.name, self.round, self.step, left) if all(left) else None


def holders(nodes: Sequence[str]) -> Mapping[str, str]:
    """Return the holder of each node's copies, from the node of each rank.

    The nodes form a ring and each node's holder is the next one, so all hold about the same. With one node
    there are no copies.
    """
    ring = list(dict.fromkeys(nodes))
    if len(ring) < 2:
        return {}
    return {node: ring[(i + 1) % len(ring)] for i, node in enumerate(ring)}


def newest_whole(offers: Iterable[Offer], least: tuple[int, int] = (0, 0)) -> Choice | None:
    """Return the newest state whose shards are all held somewhere; None if it is older than ``least`` (round
    and step).

    Two states of the same age are a mistake; every caller then chooses the same one.
    """
    states: dict[str, list[Offer]] = {}
    for offer in offers:
        states.setdefault(offer.name, []).append(offer)
    best: Choice | None = None
    for name, some in sorted(states.items()):
        first = some[0]
        if any((o.age, o.world) != (first.age, first.world) for o in some):
            continue  # the offers contradict each other
        by_rank = tuple(
            tuple(dict.fromkeys(sorted(o.node for o in some if rank in o.ranks)))
            for rank in range(first.world)
        )
        if first.world < 1 or not all(by_rank) or first.age < least:
            continue
        if best is None or first.age > (best.round, best.step):
            best = Choice(name, first.round, first.step, by_rank)
    return best
