"""What this node holds in memory of other nodes' shards: the newest that is whole, and the one before
it, which becomes the next, for each shard. Gone with the process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from elasticd.checkpoint.handover import Memory
from elasticd.core.naming import require_name
from elasticd.core.replicas import Offer

_EACH: Final = 2


@dataclass(frozen=True, slots=True)
class Label:
    """Whose shard it is, of what. ``path``: of the checkpoints; ``name``: of the state; ``world``: how many
    shards that has."""

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
    """A whole shard, as it was with those who handed it over, and the state's encoded index."""

    label: Label
    index: bytes
    memory: Memory


@dataclass(slots=True)
class Replicas:
    """All of them, by the shard that they are of. Nothing here blocks."""

    _held: dict[tuple[str, int], list[Replica]] = field(default_factory=dict)  # the newest last
    _coming: int = 0  # bytes

    @property
    def size(self) -> int:
        """Bytes, those that are still to be filled among them."""
        return self._coming + sum(r.memory.size for some in self._held.values() for r in some)

    def __iter__(self) -> Iterator[Replica]:
        for some in self._held.values():
            yield from some

    def make_room(self, label: Label, size: int) -> None:
        """One more is on its way; the oldest of that shard goes, if there are enough. What it takes, in
        memory, is counted from now on; ``keep`` or ``give_up`` must follow."""
        some = self._held.setdefault((label.path, label.rank), [])
        while len(some) >= _EACH:
            some.pop(0)
        self._coming += size

    def give_up(self, size: int) -> None:
        self._coming -= size

    def keep(self, replica: Replica) -> None:
        """It is whole. Whatever is of no use since is given back."""
        self._coming -= replica.memory.size
        label = replica.label
        some = self._held.setdefault((label.path, label.rank), [])
        some.append(replica)
        some.sort(key=lambda r: (r.label.round, r.label.step))
        second = [r for r in some if r.label.round == label.round]
        if len(second) >= _EACH:  # by when the first was with everybody, so that nobody needs older ones
            self.forget(label.path, before=label.round)
        del some[: max(0, len(some) - _EACH)]

    def forget(self, path: str, *, before: int) -> None:
        """What rounds before that have left there is of no use any more."""
        for key, some in list(self._held.items()):
            if key[0] == path:
                some[:] = [r for r in some if r.label.round >= before]
                if not some:
                    del self._held[key]


def offers(held: Iterable[Replica], node: str) -> list[Offer]:
    """What a node that holds these can offer."""
    ranks: dict[tuple[str, int, int, int], set[int]] = {}
    for its in (replica.label for replica in held):
        ranks.setdefault((its.name, its.round, its.step, its.world), set()).add(its.rank)
    return [Offer(node, *state, frozenset(have)) for state, have in ranks.items()]
