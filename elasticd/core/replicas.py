"""Which node holds a copy of which other's shards, and which of what is held is whole and newest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Offer:
    """Shards of one state that a node has in memory. ``name``: the state's, the same wherever it is;
    ``world``: how many shards it has in all; ``ranks``: which of them are here, whole."""

    node: str
    name: str
    round: int
    step: int
    world: int
    ranks: frozenset[int]

    @property
    def age(self) -> tuple[int, int]:
        """Greater is newer: what a later round has made counts more than how far it came."""
        return self.round, self.step


@dataclass(frozen=True, slots=True)
class Choice:
    """A whole state. ``holders``: for each shard, the nodes that have it."""

    name: str
    round: int
    step: int
    holders: tuple[tuple[str, ...], ...]

    def without(self, node: str) -> Choice | None:
        """The same where that node is gone; None if it is not whole then."""
        left = tuple(tuple(n for n in nodes if n != node) for nodes in self.holders)
        return Choice(self.name, self.round, self.step, left) if all(left) else None


def holders(nodes: Sequence[str]) -> Mapping[str, str]:
    """Who holds a copy of what each node has, given the node of each rank: the next one, around a ring,
    so that each holds as much as it has held for it. Nobody where there is but one node."""
    ring = list(dict.fromkeys(nodes))
    if len(ring) < 2:
        return {}
    return {node: ring[(i + 1) % len(ring)] for i, node in enumerate(ring)}


def newest_whole(offers: Iterable[Offer], least: tuple[int, int] = (0, 0)) -> Choice | None:
    """The newest state of which every shard is somewhere, unless it is older than ``least`` (round and
    step). Of two of the same age, which cannot be but by mistake, the same one wherever it is asked."""
    states: dict[str, list[Offer]] = {}
    for offer in offers:
        states.setdefault(offer.name, []).append(offer)
    best: Choice | None = None
    for name, some in sorted(states.items()):
        first = some[0]
        if any((o.age, o.world) != (first.age, first.world) for o in some):
            continue  # one of them is not what it says
        by_rank = tuple(
            tuple(dict.fromkeys(sorted(o.node for o in some if rank in o.ranks)))
            for rank in range(first.world)
        )
        if first.world < 1 or not all(by_rank) or first.age < least:
            continue
        if best is None or first.age > (best.round, best.step):
            best = Choice(name, first.round, first.step, by_rank)
    return best
