"""The saver's records of worlds and of the shards that their workers have handed over. This module does
no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from elasticd.checkpoint.format.layout import Layout
from elasticd.checkpoint.format.manifest import File
from elasticd.checkpoint.newest.retention import Keep
from elasticd.checkpoint.protocol import WorkerChannel
from elasticd.checkpoint.replication.replicas import Label, Replica
from elasticd.checkpoint.shared_memory import Memory
from elasticd.checkpoint.storage import CheckpointStore
from elasticd.core.checkpoint_names import age_of


@dataclass(slots=True, eq=False)
class ShardPlan:
    """One rank's shard in the saves of a plan, and the memory that holds it."""

    size: int
    layout: Layout
    buffers: dict[int, Memory] = field(default_factory=dict)
    holds: dict[int, tuple[int, str]] = field(default_factory=dict)  # step and name of each whole buffer


@dataclass(slots=True, eq=False)
class PendingSave:
    """A checkpoint whose shards are being written: it is neither committed nor failed yet."""

    name: str
    step: int
    at: float
    began: float
    layout: Layout
    files: dict[int, File] = field(default_factory=dict)
    writing: set[int] = field(default_factory=set)
    answered: set[int] = field(default_factory=set)  # ranks that have handed over a shard, or never will
    witness: Future[bool] | None = None  # whether it was handed over before the next round began
    why: str = ""  # why the save failed
    committing: bool = False
    tried: bool = False  # a commit was tried, and may have succeeded in spite of an error
    failed: bool = False  # the failure has been reported
    settled: bool = False  # no rank of this node will add a shard


@dataclass(slots=True, eq=False)
class SavingWorld:
    """A world, with its workers on this node."""

    store: CheckpointStore
    token: str
    round: int
    fence: int
    size: int
    locals: frozenset[int]
    keep: Keep
    lines: dict[int, WorkerChannel] = field(default_factory=dict)  # connections to workers, by rank
    plans: dict[int, ShardPlan] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)  # ranks of this node that have disconnected
    pending: dict[str, PendingSave] = field(default_factory=dict)
    holder: str = ""  # the node that holds replicas of this node's shards
    handed: set[str] = field(default_factory=set)  # names of states that all ranks here have handed over

    @property
    def commits(self) -> bool:
        return 0 in self.locals

    def newest_held(self) -> tuple[int, str] | None:
        """Return the step and name of the newest state that is in memory with all shards of this node; None
        if there is no such state."""
        common = [set(plan.holds.values()) for plan in self.plans.values()]
        if not self.locals <= self.plans.keys() or not common:
            return None
        return max(set.intersection(*common), default=None, key=lambda held: age_of(held[1]))

    @property
    def is_here(self) -> bool:
        """Whether all ranks are on this node."""
        return len(self.locals) == self.size

    @property
    def settled(self) -> bool:
        """Whether states of earlier worlds are no longer needed. Another node may lag by one save at most, so
        one save is enough if all ranks are on this node, and otherwise two are."""
        return len(self.handed) >= (1 if self.is_here else 2)

    @property
    def memory(self) -> int:
        """Bytes of the memory for shards."""
        return sum(memory.size for plan in self.plans.values() for memory in plan.buffers.values())

    def whole(self) -> Iterator[Replica]:
        """Yield each shard that is whole in memory."""
        for rank, plan in self.plans.items():
            for buffer, (step, name) in plan.holds.items():
                label = Label(self.store.url, name, self.round, step, self.size, rank)
                yield Replica(label, plan.layout, plan.buffers[buffer])

    def forget_all_but_newest(self) -> None:
        """Free memory after the world has ended. Only the newest state is needed if all ranks are on this
        node; otherwise other nodes may lag, and every whole state stays."""
        if not self.is_here:
            for plan in self.plans.values():
                for buffer in plan.buffers.keys() - plan.holds.keys():
                    del plan.buffers[buffer]
            return
        newest = self.newest_held()
        for plan in self.plans.values():
            for buffer in [b for b in plan.buffers if plan.holds.get(b) != newest or newest is None]:
                del plan.buffers[buffer]
                plan.holds.pop(buffer, None)
