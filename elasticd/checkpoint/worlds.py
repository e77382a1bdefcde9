"""Who saves together, and what they have handed over: what the saver knows, without any effect."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from elasticd.checkpoint.handover import Memory, Paper, SaverSocket
from elasticd.checkpoint.manifest import File
from elasticd.checkpoint.replicas import Label, Replica
from elasticd.checkpoint.store import CheckpointStore
from elasticd.core.retention import Keep


@dataclass(slots=True, eq=False)
class ShardPlan:
    """How one rank's shard is laid out, and the memory it comes in."""

    size: int
    paper: Paper
    paper_fd: int
    buffers: dict[int, Memory] = field(default_factory=dict)
    holds: dict[int, tuple[int, str]] = field(default_factory=dict)  # buffer: (step, name) if whole

    def __del__(self) -> None:
        os.close(self.paper_fd)


@dataclass(slots=True, eq=False)
class Gathering:
    """A checkpoint on its way: whose shards are on disk."""

    name: str
    step: int
    at: float
    began: float
    paper: Paper
    files: dict[int, File] = field(default_factory=dict)
    writing: set[int] = field(default_factory=set)
    heard: set[int] = field(default_factory=set)  # who has handed over, or has said that it will not
    witness: Future[bool] | None = None  # whether its round was the job's when it was handed over
    why: str = ""  # it came to nothing
    committing: bool = False
    tried: bool = False  # it may be committed, whatever has failed
    failed: bool = False  # and that has been told
    settled: bool = False  # nothing more is to come of it


@dataclass(slots=True, eq=False)
class SavingWorld:
    """Those who save together, as far as they are served here."""

    store: CheckpointStore
    token: str
    round: int
    fence: int
    size: int
    locals: frozenset[int]
    keep: Keep
    lines: dict[int, SaverSocket] = field(default_factory=dict)  # to the workers that are there, by rank
    plans: dict[int, ShardPlan] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    gatherings: dict[str, Gathering] = field(default_factory=dict)
    holder: str = ""  # the node that is to hold copies
    handed: set[str] = field(default_factory=set)  # names of what all ranks here have handed over

    @property
    def commits(self) -> bool:
        return 0 in self.locals

    def newest_held(self) -> tuple[int, str] | None:
        """The newest step, and its name, of which all shards of this node are whole in memory."""
        common = [set(plan.holds.values()) for plan in self.plans.values()]
        if not self.locals <= self.plans.keys() or not common:
            return None
        return max(set.intersection(*common), default=None)

    @property
    def is_here(self) -> bool:
        """All of it."""
        return len(self.locals) == self.size

    @property
    def settled(self) -> bool:
        """Whether nothing older than what it has handed over is needed: others may lag behind by one."""
        return len(self.handed) >= (1 if self.is_here else 2)

    @property
    def memory(self) -> int:
        """Bytes that its shards lie in."""
        return sum(memory.size for plan in self.plans.values() for memory in plan.buffers.values())

    def whole(self) -> Iterator[Replica]:
        """Each shard that is whole in memory."""
        for rank, plan in self.plans.items():
            for buffer, (step, name) in plan.holds.items():
                label = Label(self.store.url, name, self.round, step, self.size, rank)
                yield Replica(label, plan.paper.index, plan.buffers[buffer])

    def forget_all_but_newest(self) -> None:
        """It is over: what is of no use any more is given back. Where others may not have come as far,
        the one before the newest is."""
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
