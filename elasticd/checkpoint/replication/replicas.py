"""Replicas of shards in the memory of nodes: which node holds them, and the newest whole state among them.

For each shard of another node, this node keeps the two newest whole replicas. The older one is dropped when
the next replica arrives. Replicas end with the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from elasticd.checkpoint.format.layout import Layout
from elasticd.checkpoint.shared_memory import Memory
from elasticd.core.checkpoint_names import age_of, parse_folder, require_name

_EACH: Final = 2  # the most replicas of each shard


@dataclass(frozen=True, slots=True)
class Label:
    """Identifies a shard. ``path``: where the checkpoints are; ``name``: the state's name; ``world``: how
    many shards the state has."""

    path: str
    name: str
    round: int
    step: int
    world: int
    rank: int

    def __post_init__(self) -> None:
        require_name(self.name, self.step, self.round, self.world)
        if not 0 <= self.rank < self.world:
            raise ValueError(f"{self.name} has no shard of rank {self.rank}")


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """A whole shard, and the layout of its state."""

    label: Label
    layout: Layout
    memory: Memory


@dataclass(slots=True)
class Replicas:
    """All replicas of this node, by shard. No method blocks."""

    # The replicas of each shard, oldest first.
    _held: dict[tuple[str, int], list[Replica]] = field(default_factory=dict)
    _coming: int = 0  # the bytes of the replicas that are arriving

    @property
    def size(self) -> int:
        """Bytes in memory, including replicas that are still arriving."""
        return self._coming + sum(r.memory.size for some in self._held.values() for r in some)

    def __iter__(self) -> Iterator[Replica]:
        for some in self._held.values():
            yield from some

    def replaced(self, label: Label) -> int:
        """Return the bytes that ``make_room`` would free."""
        some = self._held.get((label.path, label.rank), [])
        return sum(replica.memory.size for replica in some[: max(0, len(some) - _EACH + 1)])

    def make_room(self, label: Label, size: int) -> None:
        """Drop the oldest replicas of the shard so that one more fits, and count ``size`` bytes as arriving.
        A call of ``keep`` or ``give_up`` must follow."""
        some = self._held.setdefault((label.path, label.rank), [])
        while len(some) >= _EACH:
            some.pop(0)
        self._coming += size

    def give_up(self, size: int) -> None:
        self._coming -= size

    def keep(self, replica: Replica) -> None:
        """Keep a replica that has arrived whole, and drop replicas that are no longer needed."""
        self._coming -= replica.memory.size
        label = replica.label
        some = self._held.setdefault((label.path, label.rank), [])
        some.append(replica)
        some.sort(key=lambda r: age_of(r.label.name))
        second = [r for r in some if r.label.round == label.round]
        if len(second) >= _EACH:  # every node then has a save of this round, and older rounds are not needed
            self.forget(label.path, before=label.round)
        del some[: max(0, len(some) - _EACH)]

    def forget(self, path: str, *, before: int) -> None:
        """Drop the replicas at ``path`` of rounds before ``before``."""
        for key, some in list(self._held.items()):
            if key[0] == path:
                some[:] = [r for r in some if r.label.round >= before]
                if not some:
                    del self._held[key]


def offers(held: Iterable[Replica], node: str) -> list[Offer]:
    """Return the offers of ``node``, one for each state that the replicas belong to."""
    ranks: dict[tuple[str, int, int, int], set[int]] = {}
    for its in (replica.label for replica in held):
        ranks.setdefault((its.name, its.round, its.step, its.world), set()).add(its.rank)
    return [Offer(node, *state, frozenset(have)) for state, have in ranks.items()]


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
    def age(self) -> tuple[int, int, int]:
        """Round, step and number of the save: a state with a larger age is newer."""
        there = parse_folder(self.name)
        return self.round, self.step, there.seq if there is not None else 0


@dataclass(frozen=True, slots=True)
class WholeState:
    """A state with all its shards in memory. ``holders``: for each rank, the nodes that have its shard."""

    name: str
    round: int
    step: int
    holders: tuple[tuple[str, ...], ...]

    def without(self, node: str) -> WholeState | None:
        """Return the state as held without this node; None if a shard is missing then."""
        left = tuple(tuple(n for n in nodes if n != node) for nodes in self.holders)
        return WholeState(self.name, self.round, self.step, left) if all(left) else None


def holders(nodes: Sequence[str]) -> Mapping[str, str]:
    """Return, for each node, the node that holds copies of its shards. ``nodes``: the node of each rank.

    The nodes form a ring, and the next node holds the copies, so all nodes hold about the same number. With
    one node there are no copies.
    """
    ring = list(dict.fromkeys(nodes))
    if len(ring) < 2:
        return {}
    return {node: ring[(i + 1) % len(ring)] for i, node in enumerate(ring)}


def newest_whole(offers: Iterable[Offer], least: tuple[int, ...] = (0, 0)) -> WholeState | None:
    """Return the newest state whose shards are all held somewhere; None if it is older than ``least``, which
    is an age.

    Of two states of the same age, which is an error, every caller chooses the same one.
    """
    states: dict[str, list[Offer]] = {}
    for offer in offers:
        states.setdefault(offer.name, []).append(offer)
    best: WholeState | None = None
    newest: tuple[int, ...] = ()
    for name, some in sorted(states.items()):
        first = some[0]
        if any((o.age, o.world) != (first.age, first.world) for o in some):
            continue  # the offers contradict each other
        if first.world < 1 or first.age < least:
            continue
        nodes = _nodes_by_rank(some, first.world)
        if all(nodes) and first.age > newest:
            newest = first.age
            best = WholeState(name, first.round, first.step, nodes)
    return best


def _nodes_by_rank(offers: Iterable[Offer], world: int) -> tuple[tuple[str, ...], ...]:
    """Return the nodes that hold the shard of each rank, in order."""
    nodes: list[dict[str, None]] = [{} for _ in range(world)]
    for offer in sorted(offers, key=attrgetter("node")):
        for rank in offer.ranks:
            if 0 <= rank < world:
                nodes[rank][offer.node] = None
    return tuple(map(tuple, nodes))
