"""The facts of a job: the records that agents share through etcd, or tell the leader.

Every record is frozen. A record in etcd is one value (``elasticd.etcd.records`` converts it to JSON and
back), and its docstring names its key, below ``/elasticd/<job>/``. ``NodeTelemetry`` and its parts go to the
leader over the agents' own connections. A record with many parts indexes them when they are first asked for.
Such a record has no ``__slots__``: they would leave no place for the index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from operator import attrgetter
from typing import Final

from elasticd.core.age import Age
from elasticd.core.checkpoint_names import require_name
from elasticd.core.hang.judging import Allowance, Look, Verdict
from elasticd.core.page_layout import Fatal
from elasticd.core.state_memory import StateMemory


def without_surrogates(text: str) -> str:
    """Replace each surrogate, which stands for a byte that is not UTF-8, by U+FFFD: records are UTF-8."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class UnitWithin(StrEnum):
    """Where the workers of a unit may be: on one node, or also on neighbouring nodes."""

    NODE = "node"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the world size, in workers (not nodes), both inclusive, and the sizes between them that a
    world may have.

    ``unit``: a world is a multiple of this number of workers, such as the stages of a pipeline. Ranks from
    ``k * unit`` up to the next multiple are one unit. ``within``: where the workers of a unit may be.
    ``sizes``: if given, a world has one of these sizes, which ascend.
    """

    min: int
    max: int
    unit: int = 1
    within: UnitWithin = UnitWithin.ANY
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.min < 1:
            raise ValueError(f"min is {self.min}, but a world has at least 1 worker")
        if self.max < self.min:
            raise ValueError(f"max is {self.max}, which is below min, {self.min}")
        if self.unit < 1:
            raise ValueError(f"a unit of {self.unit} workers has no worker")
        for name, size in (("min", self.min), ("max", self.max), *(("a size", size) for size in self.sizes)):
            if size % self.unit:
                raise ValueError(f"{name} is {size}, which is no multiple of a unit of {self.unit} workers")
        if list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError("the sizes do not ascend")
        if self.sizes and not any(self.min <= size <= self.max for size in self.sizes):
            raise ValueError(f"none of the sizes is between {self.min} and {self.max} workers")

    @property
    def least(self) -> int:
        """The size of the smallest world."""
        return min((size for size in self.sizes if size >= self.min), default=self.min)

    def largest(self, workers: int) -> int:
        """Return the size of the largest world that ``workers`` workers can form. The size may be below
        ``min``."""
        most = min(workers, self.max)
        if self.sizes:
            return max((size for size in self.sizes if size <= most), default=0)
        return most - most % self.unit

    def allows(self, size: int) -> bool:
        """Whether a world may have this size."""
        return self.min <= size == self.largest(size)


class Resume(StrEnum):
    """Whether to resume from checkpoints: from the newest whole one if there is one (auto); the same, but the
    job ends if there is none (required); or never from another job's checkpoints."""

    AUTO = "auto"
    REQUIRED = "required"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Policy:
    """The leader's policy. Times are in seconds.

    * ``settle_s``: how long a starting job waits for more nodes after the last one came.
    * ``grow_cooldown_s``: how long a round lives before it may end in order to grow. Where workers keep their
      process: at most this long, and only if the round has grown itself.
    * ``join_timeout_s``: how long a job may stay below ``min`` before it ends with exit code 3.
    * ``shutdown_s``: the time between SIGTERM and SIGKILL when a round ends as planned.
    * ``broken_s``: the same when a round has failed, and nothing is left to save.
    * ``part_s``: how long workers that keep their process may take to leave a failed round, once other
      workers wait with the job's state. After that they are killed. The same limit holds on a node that
      leaves the job, and in a job that is stopped.
    * ``node_ttl_s``: the lease of a node. A lost node is noticed after at most this time.
    * ``checkpoint_wait_s``: how long a resize waits for the next checkpoint of a script that writes its own.
      If a node leaves, the wait is at most half of ``shutdown_s``.
    * ``restarts_max`` in ``restart_window_s``: the restart budget.
    * ``futile_max``: failures in a row without progress before the job ends.
    * ``quarantine_after``: failures in a row after which a slot counts as failing alone. It is below
      ``futile_max``, so that the job tries without a bad slot before it gives up.
    * ``quarantine_s``: a slot's first quarantine, doubled each time up to ``quarantine_max_s``.
    * ``resume``: with "never", a new job forgets the checkpoints of an earlier job of the same name.
    * ``straggler_ratio``: a straggler's own time for a step is this many times its peers' for most of
      ``straggler_window_s``. ``straggler_drain``: leave the slot of a straggler, or of a GPU with errors, out
      for a while.
    """

    settle_s: float = 1.0
    grow_cooldown_s: float = 30.0
    join_timeout_s: float = 600.0
    shutdown_s: float = 30.0
    broken_s: float = 2.0
    part_s: float = 60.0
    checkpoint_wait_s: float = 600.0
    node_ttl_s: float = 5.0
    restarts_max: int = 10
    restart_window_s: float = 3600.0
    futile_max: int = 4
    quarantine_after: int = 3
    quarantine_s: float = 30.0
    quarantine_max_s: float = 600.0
    resume: Resume = Resume.AUTO
    straggler_drain: bool = False
    straggler_window_s: float = 60.0
    straggler_ratio: float = 1.1


@dataclass(frozen=True, slots=True)
class Drained:
    """A node that was asked to leave. Its agent may start again, with another incarnation, and join."""

    node: str
    incarnation: str


@dataclass(frozen=True)
class Spec:
    """The job as its users want it. Key ``spec``, no lease.

    ``asked``: the limits on the agents' command lines, which must agree. ``limits``: the limits in force,
    which ``elasticd scale`` changes. ``script``: the script's name, for people. ``fingerprint`` identifies
    the script. ``inplace``: the job's workers keep their process from round to round (``elasticd.worker``).
    ``checkpointed``: the job's scripts write checkpoints of their own and report them. ``stop``: the job is
    to end; with ``kill``, its workers get no time to save. ``job_file``: the command line of the first agent,
    in TOML, for people. ``version``: the version of elasticd on all nodes; empty if none was written.
    """

    asked: Limits
    limits: Limits
    script: str
    fingerprint: str
    policy: Policy = Policy()
    stop: bool = False
    drain: tuple[Drained, ...] = ()
    inplace: bool = False
    checkpointed: bool = False
    kill: bool = False
    job_file: str = ""
    version: str = ""

    @cached_property
    def drained(self) -> frozenset[Drained]:
        return frozenset(self.drain)


@dataclass(frozen=True, slots=True)
class Node:
    """One agent and its slots. Key ``nodes/<name>``, on the agent's lease: without the key the node does not
    exist.

    ``incarnation`` is new each time the agent starts. ``slots`` are the places for workers. ``released`` is
    the newest round without a worker left on this node (0 before the first). A member of round n gets work in
    a later round only after it has released n. ``told``: the ``Report.ends`` of that round; the leader may
    see the report later than this record. ``fenced``: the newest round whose workers were killed
    here because the lease was running out. ``declined``: the newest round that the node has released without
    taking part. ``store_port``: a port that already listens, for the store of the next round that this node
    hosts.

    ``ready``: slots with a process that waits for a round. In a job that recovers in place, only these slots
    can get work. ``most``: how many of the slots may be in a world at once; the others are spares (0: all).
    ``age``: the age of the newest state of the ready slots, None if there is none. ``holders``: the ready
    slots that have this state. ``sharded``: each of them has only a part of the state. ``state``: the memory
    that the job's sharded state takes. ``memory``: the bytes that the node's workers may use together; 0: not
    known, or the workers have no sharded state.
    """

    name: str
    incarnation: str
    address: str
    slots: tuple[int, ...]
    released: int
    store_port: int
    pid: int
    host: str
    draining: bool = False
    fenced: int = 0
    ready: tuple[int, ...] = ()
    most: int = 0
    age: Age | None = None
    holders: tuple[int, ...] = ()
    sharded: bool = False
    told: int = 0
    declined: int = 0
    state: StateMemory | None = None
    memory: int = 0


@dataclass(frozen=True, slots=True)
class RankRange:
    """The ranks from ``first`` up to, but not including, ``end``."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Member:
    """A node's seats in a round: its slots and the rank of the first; ranks follow slot order. ``place``: the
    member's position among the members of the round."""

    node: str
    incarnation: str
    slots: tuple[int, ...]
    base_rank: int
    place: int = 0

    @property
    def hosts_store(self) -> bool:
        """Whether this is the first member, whose agent hosts the round's store."""
        return self.base_rank == 0

    def rank_of(self, slot: int) -> int:
        return self.base_rank + self.slots.index(slot)


class Members(tuple[Member, ...]):
    """The members of a round, in rank order. All phases of a round share one object, and so do rounds with
    the same members. So what is found out about all members is found out once."""

    @cached_property
    def by_node(self) -> Mapping[str, Member]:
        return dict(zip(map(attrgetter("node"), self), self, strict=True))

    @cached_property
    def slots_by_node(self) -> Mapping[str, tuple[int, ...]]:
        return dict(map(attrgetter("node", "slots"), self))

    @cached_property
    def workers(self) -> int:
        return sum(map(len, map(attrgetter("slots"), self)))


class Phase(StrEnum):
    """The phase of a round: waiting* -> live -> closing -> (the next round | waiting | ended).

    A round that no member is in any more may end without the phase closing.
    """

    WAITING = "waiting"  # nothing runs, and there are too few workers for the next round
    LIVE = "live"  # the round's workers run
    CLOSING = "closing"  # the round's members stop their workers and release the round
    ENDED = "ended"  # the job is over; see Round.outcome


class Cause(StrEnum):
    """Why a round began, or why it is closing. The values are few, since they are labels of metrics."""

    START = "start"
    WORKER_FAILED = "worker_failed"
    WORKER_HUNG = "worker_hung"
    NODE_LOST = "node_lost"
    WORLD_BROKEN = "world_broken"  # workers lost each other, though no worker ended
    NODE_FAULT = "node_fault"  # a worker failed because its node's disk was full
    NODE_DRAINED = "node_drained"
    SLOT_DRAINED = "slot_drained"  # the slot's worker was a straggler, or its GPU has errors
    GREW = "grew"
    SCALED = "scaled"
    STOPPED = "stopped"

    @property
    def charged(self) -> bool:
        """Whether the user's code ended the round, so that the budget pays."""
        return self in (Cause.WORKER_FAILED, Cause.WORKER_HUNG)

    @property
    def failure(self) -> bool:
        """Whether the end was unplanned, so that unsaved work may be lost."""
        return self.charged or self in (Cause.NODE_LOST, Cause.NODE_FAULT, Cause.WORLD_BROKEN)


LAST_OUTPUT: Final = "last output: "


@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker ended.

    ``code``: its exit status, or minus the signal that killed it. ``at``: seconds since the epoch.
    ``message`` and ``traceback`` come from the worker's error file (torch's ``@record``), or else from the
    end of its stderr. A worker that was killed may have announced its error to the agent instead. If stderr
    names no error, the message is ``LAST_OUTPUT`` and the last line. ``log``: the path of its output, on its
    node.

    ``fenced``: the worker was killed because its node's lease was running out. ``hung``: the worker was
    killed because it hung; ``message`` says where. ``fatal``: the worker asked for the job's end. ``astray``:
    the worker ended to go back to a checkpoint, since a value was not finite at this step of the job.
    ``node_fault``: the worker failed while its node's disk was full; no failure is charged. ``raised``: the
    worker announced that its own exception ends it.
    """

    slot: int
    rank: int
    code: int
    at: float
    message: str = ""
    traceback: str = ""
    log: str = ""
    fenced: bool = False
    hung: bool = False
    fatal: Fatal | None = None
    astray: int | None = None
    node_fault: bool = False
    raised: bool = False

    @property
    def failed(self) -> bool:
        return self.code != 0

    @property
    def cause(self) -> Cause:
        """The cause of the round's end, if this exit ends the round."""
        if self.node_fault:
            return Cause.NODE_FAULT
        return Cause.WORKER_HUNG if self.hung else Cause.WORKER_FAILED


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed worker and where it ran."""

    node: str
    exit: Exit


class Outcome(StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"  # the budget is spent, or failures repeat without progress
    SHORT = "short"  # there were fewer than min workers for longer than the join timeout
    STOPPED = "stopped"  # the job was stopped by `elasticd stop`
    DIVERGED = "diverged"  # a loss or gradient was not finite, and the user wants the job to stop then
    NOWHERE = "nowhere"  # there was no checkpoint to resume from, although one was required
    REFUSED = "refused"  # the data differs from the data of the training to resume


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of a large round, whose record in etcd names no members. ``workers`` and ``nodes``: their
    numbers in the whole round. ``leaving``: how many of the workers are on nodes in ``Round.leaving``.
    ``parts``: the number of records with the members; 0 once the job has ended. ``digest``: the digest of the
    members (``core.round_parts``)."""

    workers: int
    nodes: int
    leaving: int
    parts: int
    digest: str


@dataclass(frozen=True)
class Round:
    """The life of one world. Key ``round``, no lease; only the leader writes it.

    ``number`` only grows: writes and workers of an older round are refused. ``members`` are in rank order. If
    the round has an ``extent``, an agent knows only some of the members, its own node among them; the leader
    knows all.
    ``store``: the ``address:port`` of the c10d store, which the first member's agent hosts. ``cause``: why
    the round began. Once the round closes, ``closing`` says why, and ``planned`` whether workers may still
    save. ``since``: the start of the phase, in seconds since the epoch. ``took_s``: how long the change to
    the round took; 0 if the job waited for workers, or if one write closed the last round and began this one.
    ``lived_s``: how long a closing round was live. ``restarts``: the failures charged so far; ``failure`` is
    the last one. An ended job has an ``outcome`` and a sentence ``why``. Round 0 is never live: the job waits
    for its first workers.

    Where workers keep their process: ``leaving`` are nodes that were asked to leave and alone hold the state.
    They stay until ``leave_by`` to hand the state over. ``handover``: the workers of this round pass the
    state on, make no step, and leave by themselves. ``outlived``: some members do not leave a closing round,
    while the workers that have left it together hold the whole state that the round agreed on. ``anew``: a
    value was not finite, so the job goes back to a checkpoint. No worker keeps its process or its state.
    ``left_out``: the workers that give the others what they alone hold of the state. In a round that closes
    as planned, the next round will probably leave them out; in a handover round, they are the givers.

    ``resizes_by``: the round is to be resized at its script's next checkpoint, or at this time at the latest;
    0 otherwise. ``began``: the time of this run's first round. ``failures``: the number of rounds since then
    that followed an unplanned end.
    """

    number: int
    phase: Phase
    members: tuple[Member, ...]
    store: str
    cause: Cause
    since: float
    took_s: float = 0.0
    lived_s: float = 0.0
    restarts: int = 0
    closing: Cause | None = None
    planned: bool = False
    outcome: Outcome | None = None
    why: str = ""
    failure: Failure | None = None
    leaving: tuple[str, ...] = ()
    leave_by: float = 0.0
    handover: bool = False
    resizes_by: float = 0.0
    began: float = 0.0
    failures: int = 0
    anew: bool = False
    outlived: bool = False
    left_out: tuple[RankRange, ...] = ()
    extent: Extent | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.members, Members):
            object.__setattr__(self, "members", Members(self.members))

    @property
    def world_size(self) -> int:
        return self.extent.workers if self.extent is not None else self.indexed.workers

    @property
    def nodes(self) -> int:
        """The number of members of the whole round."""
        return self.extent.nodes if self.extent is not None else len(self.members)

    @property
    def leaving_workers(self) -> int:
        """The number of workers on nodes in ``leaving``."""
        if self.extent is not None:
            return self.extent.leaving
        return sum(len(self.by_node[node].slots) for node in self.leaving if node in self.by_node)

    @cached_property
    def by_node(self) -> Mapping[str, Member]:
        """The known members by the name of their node."""
        return self.indexed.by_node

    @property
    def indexed(self) -> Members:
        """The known members, with what is found out about all of them."""
        assert isinstance(self.members, Members)
        return self.members

    @property
    def next_cause(self) -> Cause:
        """Why the next round begins, or why the job waits for it."""
        return self.closing or self.cause

    def leaves_out(self, rank: int) -> bool:
        """Whether the next round will probably be without this rank."""
        return any(ranks.first <= rank < ranks.end for ranks in self.left_out)

    def member(self, node: str, incarnation: str) -> Member | None:
        member = self.by_node.get(node)
        return member if member is not None and member.incarnation == incarnation else None


@dataclass(frozen=True, slots=True)
class MemberPart:
    """Some members of a round with an ``extent``. Key ``members/<number>.<digest>.<part>``, no lease. Only
    the leader writes the record, before or with the round, and never changes it."""

    members: tuple[Member, ...]


@dataclass(frozen=True)
class Report:
    """An agent's latest report of its workers in a round. Key ``reports/<node>``, no lease.

    ``exits``: the exits that the agent did not cause. ``finished``: every worker on this node ended with
    status 0. ``steps``: the most steps that a slot here made in this round: committed steps where workers
    commit, else optimizer steps. ``returned``: the run function has returned in all workers of the round, and
    only the end of the scripts remains. ``checkpointed``: a worker here has just written a checkpoint, and
    waits there. ``broken``: a worker here lost the others and cannot go on in this round.
    """

    node: str
    incarnation: str
    round: int
    exits: tuple[Exit, ...] = ()
    finished: bool = False
    steps: int = 0
    returned: bool = False
    checkpointed: bool = False
    broken: bool = False

    @property
    def ends(self) -> int:
        """A number that grows with each worker's end in the report, and with the first steps."""
        return len(self.exits) + self.finished + (self.steps > 0)

    @cached_property
    def failure(self) -> Failure | None:
        """The earliest failure."""
        return self._earliest([exit for exit in self.exits if exit.failed])

    @cached_property
    def fatal(self) -> Failure | None:
        """The earliest failure that is to end the job."""
        return self._earliest([exit for exit in self.exits if exit.failed and exit.fatal is not None])

    @cached_property
    def raised(self) -> Failure | None:
        """The earliest failure of a worker that raised an exception of its own."""
        return self._earliest([exit for exit in self.exits if exit.failed and exit.raised])

    @cached_property
    def astray(self) -> int | None:
        """The last step at which a loss or gradient was not finite, if a worker ended to go back to a
        checkpoint."""
        return max((exit.astray for exit in self.exits if exit.astray is not None), default=None)

    def _earliest(self, exits: list[Exit]) -> Failure | None:
        first = min(exits, key=lambda exit: (exit.at, exit.rank), default=None)
        return Failure(self.node, first) if first is not None else None


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A slot that is left out of the world until ``until`` (seconds since the epoch). ``faults``: for what it
    was drained; none if it kept failing alone."""

    node: str
    slot: int
    until: float
    times: int
    faults: tuple[Laggard, ...] = ()


@dataclass(frozen=True, slots=True)
class Charge:
    """One failure of the user's code, charged to the budget.

    ``progressed``: the failure's round or a later round made progress, or may have. ``step``: the committed
    step that the job continues from, where workers hold the state in memory.
    """

    at: float
    node: str
    slot: int
    progressed: bool
    step: int | None = None


@dataclass(frozen=True, slots=True)
class RollbackCount:
    """The count of returns to a checkpoint since the training reached ``step``, its furthest step. Each
    return follows a value that was NaN or infinite."""

    step: int
    times: int


@dataclass(frozen=True, slots=True)
class BrokenWorldCount:
    """The count of rounds in a row in which workers lost each other and made no step beyond ``step``.
    ``since``: the time of the first of these rounds."""

    step: int
    times: int
    since: float


@dataclass(frozen=True, slots=True)
class Budget:
    """The restart budget. Key ``budget``, no lease; only the leader writes it.

    ``charges``: the charges within the window, oldest first. ``total``: the number of all charges ever.
    ``astray`` is kept beyond the window, since the job may take longer to reach that step again. ``apart``
    costs no charges, but has a limit of its own. ``stepped``: a step was seen in some failed round, so a
    round in which none is seen made none.
    """

    charges: tuple[Charge, ...] = ()
    total: int = 0
    quarantines: tuple[Quarantine, ...] = ()
    astray: RollbackCount | None = None
    apart: BrokenWorldCount | None = None
    stepped: bool = False


@dataclass(frozen=True, slots=True)
class SlotProgress:
    """A worker's heartbeat, as its agent read it.

    ``at``: seconds since the epoch; 0 for never. ``step``: optimizer steps in this round. ``base``: the job's
    step at which the worker began this round, if the script reports it. ``held_s``: the total time for which
    checkpoints held the worker up. ``committed``: the job's last committed step, if the script reports it.
    ``shard_bytes`` and ``copies_bytes``: of a sharded model, the worker's part of the state, and the host's
    memory for copies of parts.
    """

    slot: int
    rank: int
    pid: int
    step: int
    at: float
    base: int | None = None
    held_s: float = 0.0
    committed: int | None = None
    shard_bytes: int = 0
    copies_bytes: int = 0

    @property
    def of_job(self) -> int:
        """The job's step if the script reports it (``tells``), else the steps of this round."""
        if self.committed is not None:
            return self.committed
        return self.step if self.base is None else self.base + self.step

    @property
    def tells(self) -> bool:
        """Whether the script reports the job's step, or the step at which it began."""
        return self.committed is not None or self.base is not None


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a node's workers.

    ``own_bytes`` and ``replica_bytes``: the memory on this node that holds checkpoints of its own workers,
    and of other nodes. ``held_back``: the slots whose worker starts once a process is gone, and the pid of
    that process. Agents tell the leader their progress every second or two, to show it to people. No decision
    depends on the progress.
    """

    node: str
    round: int
    slots: tuple[SlotProgress, ...] = ()
    own_bytes: int = 0
    replica_bytes: int = 0
    held_back: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stall:
    """A node's report of workers that make no steps. Key ``stalls/<node>``, on the agent's lease, while they
    make none. ``allowed``: the limits that this node learned from the job's steps."""

    node: str
    incarnation: str
    round: int
    looks: tuple[Look, ...]
    allowed: Allowance


@dataclass(frozen=True, slots=True)
class Hang:
    """The leader's verdict from the stalls of all nodes. Key ``hang``, on the leader's lease.

    Each agent kills the hung workers on its node, if they are still in the state that was judged. ``asks``:
    no worker is killed yet; every agent is first to look at its workers and report.
    """

    round: int
    verdict: Verdict
    asks: bool = False


@dataclass(frozen=True, slots=True)
class SlotPace:
    """The pace of a slot. ``own_s``: the worker's recent time for a step, without waiting for others."""

    slot: int
    rank: int
    own_s: float


@dataclass(frozen=True, slots=True)
class BadSlot:
    """A slot whose GPU reports an error; ``why`` names the error. ``strained``: ``why`` names no error, but
    what strains the GPU now."""

    slot: int
    rank: int
    why: str
    strained: bool = False


@dataclass(frozen=True, slots=True)
class Paces:
    """The paces of a node's workers in one period. ``number``: the number of the period, which only grows.
    ``slots``: the slots with a known pace."""

    node: str
    incarnation: str
    round: int
    number: int
    slots: tuple[SlotPace, ...] = ()
    bad: tuple[BadSlot, ...] = ()


@dataclass(frozen=True, slots=True)
class Laggard:
    """A straggler. ``ratio``: its own time for a step over its peers'. ``why``: if set, the slot is not slow,
    but its GPU is bad, or ``strained``: see ``BadSlot``."""

    node: str
    slot: int
    rank: int
    ratio: float
    why: str = ""
    strained: bool = False


@dataclass(frozen=True, slots=True)
class Stragglers:
    """The stragglers, as the leader judged from the paces of all nodes. Key ``stragglers``, on the leader's
    lease. ``usual_s``: the median of all workers' own times for a step; 0 if unknown. ``slow``: bad slots and
    the first stragglers by rank; ``more`` is the number of those left out."""

    round: int
    usual_s: float
    slow: tuple[Laggard, ...] = ()
    more: int = 0


@dataclass(frozen=True, slots=True)
class SlotTime:
    """The use of a slot's time: seconds by kind (``core.ledger.Kind``).

    ``furthest``: the job's last step that was made in this slot. ``untold_s``: the time of a step under way,
    whose kind is not known yet.
    """

    slot: int
    spent: Mapping[str, float]
    furthest: int = 0
    untold_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeLedger:
    """The use of a node's time in this run, up to ``at`` (seconds since the epoch). The agent's next
    incarnation continues the record.

    ``run``: the create_revision of the job's spec, which identifies this run among runs of the same name.
    """

    node: str
    at: float
    slots: tuple[SlotTime, ...] = ()
    run: int = 0


@dataclass(frozen=True, slots=True)
class NodeTelemetry:
    """What an agent tells the leader of its node. A new value replaces the old one; None is no news.

    ``port``: where this agent listens for other agents. ``asks``: this agent does not know yet whether an
    earlier agent of its node has left a ledger. ``last``: the agent ends.
    """

    node: str
    incarnation: str
    port: int = 0
    progress: Progress | None = None
    paces: Paces | None = None
    ledger: NodeLedger | None = None
    asks: bool = False
    last: bool = False


@dataclass(frozen=True, slots=True)
class Summary:
    """What the nodes have told the leader. Key ``summary``, no lease; only the leader writes it, rarely.

    ``run``: see ``NodeLedger``. ``at``: seconds since the epoch. ``spent``: the seconds of all nodes in this
    run, by kind. ``gone``: the part of nodes that are lost and that ``nodes`` does not have. ``nodes``: the
    leader's own node, lost nodes, and the other nodes of a small job; the leader's successor and the next
    agents of these nodes continue from here. ``final``: the job has ended, and its last round's members have
    told their last.
    """

    run: int
    at: float
    spent: Mapping[str, float] = field(default_factory=dict)
    gone: Mapping[str, float] = field(default_factory=dict)
    nodes: tuple[NodeTelemetry, ...] = ()
    final: bool = False


@dataclass(frozen=True, slots=True)
class RoomProbe:
    """A small write, by which the leader notices a full etcd. Key ``room``, no lease. ``at``: seconds since
    the epoch."""

    at: float


@dataclass(frozen=True, slots=True)
class ForgottenNodes:
    """Lost nodes that have no room in the summary. Key ``forgotten``, no lease; the leader writes it with the
    summary, when it has changed. If such a node comes back under another leader, its agent reports its time
    again, though the time is part of the summary's ``gone`` already.

    ``run``: see ``NodeLedger``. ``spent``: the seconds of a node by kind, by the node's name.
    """

    run: int
    spent: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Leadership:
    """The leader. Key ``leader``, on the leader's lease; created only if absent.

    ``host``, ``port``: where the leader listens for the other agents, which must prove that they know
    ``secret``. ``machine``: ``Node.host`` of the leader.
    """

    node: str
    incarnation: str
    host: str = ""
    port: int = 0
    secret: str = field(default="", repr=False)
    machine: str = ""

    def is_of(self, node: str, incarnation: str) -> bool:
        return (self.node, self.incarnation) == (node, incarnation)


@dataclass(frozen=True, slots=True)
class Saved:
    """One committed checkpoint.

    ``name``: the checkpoint's folder; a name is never used again. ``step``: the last step in the checkpoint.
    ``round`` and ``world``: the round that saved the checkpoint, and its world size. ``at``: seconds since
    the epoch. ``size``: bytes in all. ``digest``: xxh3 of the manifest, which has the digests of all other
    files.
    """

    name: str
    step: int
    round: int
    world: int
    at: float
    size: int
    digest: str

    def __post_init__(self) -> None:
        require_name(self.name, self.step, self.round, self.world)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The checkpoints to resume from. Key ``checkpoint``, no lease. ``saved`` are folders below ``path``, in
    the order of their commits; the last is the newest."""

    path: str
    saved: tuple[Saved, ...] = ()

    @property
    def newest(self) -> Saved | None:
        return self.saved[-1] if self.saved else None


@dataclass(frozen=True, slots=True)
class SaverAddress:
    """The address of a node's saver, for other nodes' savers, which must prove that they know ``secret``. Key
    ``savers/<node>``, on the agent's lease, and only in jobs that hold copies in other nodes' memory."""

    node: str
    host: str
    port: int
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class DebugTails:
    """The ends of what a node's workers recorded in ``elasticd run --debug``. Key ``debug/<node>``, on the
    agent's lease. ``ranks``: of each worker the ends of its files, the notes first."""

    node: str
    round: int
    ranks: tuple[tuple[str, ...], ...]


Fact = (
    Spec
    | Node
    | Round
    | MemberPart
    | Report
    | Budget
    | Stall
    | Hang
    | Stragglers
    | Leadership
    | Checkpoint
    | Summary
    | ForgottenNodes
    | RoomProbe
    | SaverAddress
    | DebugTails
)
