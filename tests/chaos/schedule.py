"""The faults of a training, drawn from a seed only. A plan is data, so it can be printed and drawn again.

A plan is a list of episodes. An episode begins when the training makes progress, injects one or several
faults, mends them, and is over when the training makes progress again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Final


class Kind(StrEnum):
    """The kind of a job."""

    SCRIPT = "script"  # a torchrun script with snapshots of its own
    PLAIN = "plain"  # elasticd.worker with Data and checkpoints
    CONSISTENT = "consistent"  # elasticd.worker with Data in consistent mode, and checkpoints


@dataclass(frozen=True, slots=True)
class Fault:
    """``at_s``: seconds after the episode has begun. ``node``: the number of the node, or of the member of
    etcd. ``slot``: the number of the worker on the node. ``for_s``: seconds until the fault is mended, if the
    fault does not mend itself."""

    kind: str
    at_s: float = 0.0
    node: int = 0
    slot: int = 0
    for_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} (node {self.node}, slot {self.slot}) at {self.at_s:.2f} s for {self.for_s:.2f} s"


@dataclass(frozen=True, slots=True)
class Episode:
    """``after``: how many whole steps are made before the episode begins."""

    after: int
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """``late``: how many of the nodes join only in the first episode. ``ahead_s``: how far the clock of the
    last node is ahead of the others'."""

    kind: Kind
    nodes: int
    slots: int
    least: int
    replicate: bool
    spares: int
    fresh: bool
    late: int
    ahead_s: int
    episodes: tuple[Episode, ...]

    @property
    def size(self) -> int:
        """Return the size of the world that is expected without faults."""
        return self.nodes * (self.slots - self.spares)


MEMBERS: Final = 3  # of etcd


@dataclass(frozen=True, slots=True)
class Sort:
    """How often a fault is drawn, beside others. ``blames``: the most failures of user code that the job may
    charge for it. ``lasts``: its seconds. ``state``: whether only jobs with elasticd's checkpoints can have
    it. ``alone``: no other fault in the same episode."""

    weight: int
    blames: int = 0
    lasts: tuple[float, float] = (0.0, 0.0)
    state: bool = False
    alone: bool = False


_SHORT, _LONG = (0.2, 4.0), (4.0, 15.0)
SORTS: Final[dict[str, Sort]] = {
    # what looks like user code to elasticd
    "worker.kill": Sort(8, blames=1),
    "worker.raise": Sort(3, blames=1),
    "worker.stop": Sort(4, blames=1),  # until the stopped worker counts as hung
    "worker.pause": Sort(2, blames=1, lasts=_SHORT),
    # the processes that look after the workers
    "agent.kill": Sort(5, lasts=_SHORT),
    "agent.stop": Sort(3, lasts=_LONG),
    "leader.kill": Sort(4, lasts=_SHORT),
    "leader.stop": Sort(2, lasts=_LONG),
    "warden.kill": Sort(3, lasts=_SHORT),
    "warden.stop": Sort(2, lasts=_SHORT),
    "saver.kill": Sort(3, state=True),
    "saver.stop": Sort(2, lasts=_SHORT, state=True),
    "zygote.kill": Sort(2),
    "zygote.stop": Sort(2, lasts=_LONG),
    # machines and networks
    "node.crash": Sort(4, lasts=_SHORT),  # with the node's network, so other nodes hear nothing of the end
    "node.kill": Sort(4, lasts=_SHORT),  # all processes of the node; other nodes see their connections end
    "node.freeze": Sort(4, lasts=(1.0, 15.0)),
    "link.down": Sort(5, lasts=(0.5, 15.0)),
    "link.oneway": Sort(4, lasts=(0.5, 15.0)),  # what the node sends is lost
    "link.slow": Sort(2, lasts=_LONG),
    "etcd.unheard": Sort(3, lasts=(0.5, 15.0)),  # what the node sends to etcd is lost
    "etcd.mute": Sort(3, lasts=(0.5, 15.0)),  # what etcd sends to the node is lost
    "split": Sort(3, lasts=(0.5, 8.0), alone=True),  # one node trains alone, and is cut off from etcd
    # etcd itself
    "member.kill": Sort(3, lasts=_LONG),
    "member.stop": Sort(3, lasts=_LONG),
    "etcd.stop": Sort(4, lasts=(1.0, 20.0)),
    "etcd.kill": Sort(2, lasts=_SHORT),
    "etcd.full": Sort(2, lasts=_LONG),
    # people
    "drain": Sort(4, lasts=_SHORT),
    "scale": Sort(4, lasts=_LONG),
    # disks
    "disk.full": Sort(3, lasts=_LONG, state=True),
    "blackout": Sort(2, alone=True),  # every node crashes
    "blackout.record_gone": Sort(2, state=True, alone=True),  # every node crashes, and committed.json is lost
    "blackout.record_flipped": Sort(2, state=True, alone=True),
    "blackout.shard_damaged": Sort(2, state=True, alone=True),
    # other programs on the machine
    "busy": Sort(3, lasts=_LONG),
}
# If a node's warden is stopped and the node's lease runs out as well, nobody ends the workers in time. These
# faults
# do not let a lease run out, so they may come beside a stopped warden.
BESIDE_A_STOPPED_WARDEN: Final = {"worker", "saver", "zygote", "scale", "disk"}


def draw(seed: int, episodes: int | None = None, only: Collection[str] = ()) -> Plan:
    """Return the plan of a seed. ``only``: draw only these faults."""
    chance = Random(f"{seed}/chaos")
    kind = chance.choice(tuple(Kind))
    nodes, slots = 3, 2
    in_place = kind is not Kind.SCRIPT
    spares = chance.choice((0, 0, 1)) if in_place else 0
    plan = {
        "least": chance.choice((1, 2, 2)),
        "replicate": in_place and chance.random() < 0.5,
        "spares": spares,
        "fresh": chance.random() < 0.15,
        "late": chance.choice((0, 0, 1)),
        "ahead_s": chance.choice((0, 0, 1_000_000)),
    }
    allowed = {
        name: sort
        for name, sort in SORTS.items()
        if (not only or name in only) and (in_place or not sort.state)
    }
    several = Random(f"{seed}/episodes")
    count = episodes if episodes is not None else several.randint(4, 8)
    made = tuple(_episode(several, allowed, nodes, slots) for _ in range(count)) if allowed else ()
    return Plan(kind, nodes, slots, episodes=made, **plan)


def _episode(chance: Random, allowed: dict[str, Sort], nodes: int, slots: int) -> Episode:
    names, weights = list(allowed), [sort.weight for sort in allowed.values()]
    faults: list[Fault] = []
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3, 4))):
        name = chance.choices(names, weights)[0]
        others = {fault.kind for fault in faults}
        if name in others or (allowed[name].alone and others):
            continue
        families = {other.partition(".")[0] for other in (*others, name)} - {"warden"}
        if "warden.stop" in (*others, name) and families - BESIDE_A_STOPPED_WARDEN:
            continue
        node = chance.randrange(nodes)
        at_s = round(chance.uniform(0.0, 3.0), 2) if faults else 0.0
        for_s = round(chance.uniform(*allowed[name].lasts), 2)
        faults.append(Fault(name, at_s, node, chance.randrange(slots), for_s))
        if allowed[name].alone:
            break
    return Episode(chance.randint(3, 12), tuple(sorted(faults, key=lambda fault: fault.at_s)))


def charges(faults: Collection[Fault]) -> tuple[int, int]:
    """Return the fewest and the most failures that the budget may be charged in an episode."""
    most = sum(SORTS[fault.kind].blames for fault in faults)
    certain = {"worker.kill", "worker.raise", "worker.stop"}
    alone = len(faults) == 1 and all(fault.kind in certain for fault in faults)
    return (most if alone else 0), most
