"""What is true of a job: the records that agents share through etcd.

Everything here is frozen. Each record is one etcd value (``elasticd.etcd.records`` turns it into
JSON and back); the key it lives under is named in its docstring, below ``/elasticd/<job>/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from elasticd.core.age import Age
from elasticd.core.hang import Allowance, Look, Verdict
from elasticd.core.naming import require_name
from elasticd.core.page import Fatal


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the world size, in workers (not nodes), both inclusive."""

    min: int
    max: int

    def __post_init__(self) -> None:
        if self.min < 1:
            raise ValueError(f"min is {self.min}, but a world has at least 1 worker")
        if self.max < self.min:
            raise ValueError(f"max is {self.max}, which is below min, {self.min}")


class Resume(StrEnum):
    """From checkpoints: from the newest whole one, if there is any; or the job ends without one; or
    not from those that another job made."""

    AUTO = "auto"
    REQUIRED = "required"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Policy:
    """How patient the leader is; times in seconds.

    ``settle_s``: how long a starting job waits, after the last node came, for more of them.
    ``grow_cooldown_s``: how long a round lives before it is ended in order to grow.
    ``join_timeout_s``: how long a job may wait below ``min`` before it ends with exit code 3.
    ``shutdown_s``: how long workers get between SIGTERM and SIGKILL when a round ends as planned.
    ``broken_s``: the same when the round is broken, so that there is nothing left to save.
    ``part_s``: how long workers that keep their process get to leave a round that is broken, before they
    are killed after all: from when others wait who hold the job's state; and any round, where their node
    leaves or the job ends.
    ``node_ttl_s``: the lease of a node; a lost node is noticed after at most this long.
    ``checkpoint_wait_s``: how long a round that is to be resized waits for the next checkpoint of scripts
    that tell of their own; one that a node leaves, for half of ``shutdown_s`` at most.
    ``restarts_max`` in ``restart_window_s``: the restart budget.
    ``futile_max``: failures in a row without a single step of progress before the job gives up.
    ``quarantine_after``: failures in a row by which a slot is judged to fail alone (below
    ``futile_max``, so that a bad slot is tried without before the job is called futile).
    ``quarantine_s``: its first quarantine; doubled each time up to ``quarantine_max_s``.
    ``resume``: whether a job that begins forgets what a former one of its name committed (never).
    ``straggler_ratio``: a worker whose own time for a step is so many times its peers' for most of
    ``straggler_window_s`` is named. ``straggler_drain``: its slot is then left out for a while, and so
    is one whose GPU tells of errors.
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
    """A node that was asked to leave; the incarnation keeps a returning node from leaving again."""

    node: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Spec:
    """What people want of the job. Key ``spec``, no lease.

    ``asked`` are the limits on the command lines of its agents, which must agree; ``limits`` are
    those in force, which ``elasticd scale`` changes. ``script`` is what runs, for people;
    ``fingerprint`` tells another script from the same one. ``inplace``: its workers keep their
    process from round to round, as the first of them said (``elasticd.worker``). ``checkpointed``: they
    write checkpoints of their own, and tell of them.
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


@dataclass(frozen=True, slots=True)
class Node:
    """One agent and what it offers. Key ``nodes/<name>``, on the agent's lease: no key, no node.

    ``incarnation`` is new each time the agent starts. ``slots`` are the places a worker can run
    in. ``released`` is the newest round of which no worker is left here (0 before the first): a
    member of round n can be given work in a later round only once it has released n. ``told`` are the
    ``ends`` in its report of that round, which may be seen later. ``fenced`` is
    the newest round whose workers were killed here because the lease was running out.
    ``store_port`` is a port already listening for the store of the next round this node hosts.
    ``ready``: slots with a process that waits to take part in a round; in a job that recovers in
    place, those are what the node has to offer. ``most``: how many of its slots may be in a world at a
    time, the rest being spares (0: all). ``age``: of the newest state that any of those ready has
    whole, None if they have none; ``holders``: which of them have it.
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
    told: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """A node's part in a round: its slots and the rank of the first; ranks follow slot order."""

    node: str
    incarnation: str
    slots: tuple[int, ...]
    base_rank: int

    def rank_of(self, slot: int) -> int:
        return self.base_rank + self.slots.index(slot)


class Phase(StrEnum):
    """Where a round is in its life: waiting* -> live -> closing -> (the next round | waiting | ended)."""

    WAITING = "waiting"  # nothing runs, and there are too few workers for the next round
    LIVE = "live"  # its workers run
    CLOSING = "closing"  # its members stop their workers and release it
    ENDED = "ended"  # the job is over; see Round.outcome


class Cause(StrEnum):
    """Why a round began, or why it is closing. Bounded, as it becomes a metric label."""

    START = "start"
    WORKER_FAILED = "worker_failed"
    WORKER_HUNG = "worker_hung"
    NODE_LOST = "node_lost"
    WORLD_BROKEN = "world_broken"  # workers cannot reach each other any more, though none has ended
    NODE_FAULT = "node_fault"  # a worker failed of its node: the disk of its log was full
    NODE_DRAINED = "node_drained"
    SLOT_DRAINED = "slot_drained"  # its worker was slower than the others, or its GPU is bad
    GREW = "grew"
    SCALED = "scaled"
    STOPPED = "stopped"

    @property
    def charged(self) -> bool:
        """Whether it is the user's code that ended the round, which the budget pays for."""
        return self in (Cause.WORKER_FAILED, Cause.WORKER_HUNG)

    @property
    def failure(self) -> bool:
        """Whether nobody had planned it: what was not saved by then may be lost."""
        return self.charged or self in (Cause.NODE_LOST, Cause.NODE_FAULT, Cause.WORLD_BROKEN)


LAST_OUTPUT: Final = "last output: "


@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker ended. ``code``: its exit status, or minus the signal that killed it.

    ``at``: seconds since the epoch. ``message`` and ``traceback`` come from the worker's error
    file where it wrote one (torch's ``@record``), else from the end of its stderr; where that names no error,
    the message is the last line after ``LAST_OUTPUT``. ``log``: where
    its output is, on its node. ``fenced``: it was killed because its node's lease was running out.
    ``hung``: it was killed because it hung, and ``message`` says where. ``fatal``: it said before that
    the job is to end with it. ``astray``: the job's step at which something was NaN or infinite, if it
    ended for the job to go back to a checkpoint. ``node_fault``: it failed, and what it printed could not
    be written, as its node's disk was full; the code it ran is not charged for it. ``raised``: it said
    before that an exception of its own was to end it.
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
        """Why its round ends, if it is because of this."""
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
    SHORT = "short"  # fewer than min workers for longer than the join timeout
    STOPPED = "stopped"  # by `elasticd stop`
    DIVERGED = "diverged"  # a loss or gradient was not finite, and the job was to stop then
    NOWHERE = "nowhere"  # no checkpoint to resume from, and one was required
    REFUSED = "refused"  # the data is not what the training that is to be gone on with had


@dataclass(frozen=True, slots=True)
class Round:
    """The numbered life of one world. Key ``round``, no lease; written by the leader only.

    ``number`` only grows; it fences everything. ``members`` are in rank order. ``store`` is
    ``address:port`` of the c10d store, hosted by the agent of the first member. ``cause`` says why
    the round began; once it closes, ``closing`` says why and ``planned`` whether its workers may
    still save. ``since``: when the phase began, in seconds since the epoch; ``lived_s``: how long a
    closing round had lived. ``restarts`` counts the
    failures charged so far, and ``failure`` is the last of them. An ended job has an ``outcome`` and,
    in a sentence, ``why``. Round 0 never lives: it is the job waiting for its first workers.

    Where workers keep their process: ``leaving`` are nodes that are asked to leave and have all there
    is of the state; until ``leave_by`` they stay to hand it over. ``handover``: this round does that and
    no more: its workers pass the state on, make no step, and leave it by themselves.

    ``outlived``: of a round that some have not left for long, that others have, on another node
    perhaps, with all that its workers had agreed on.

    ``resizes_by``: the round is to be resized with the next checkpoint that its scripts tell of, where
    they are held for it, or then at the latest; 0 where it is not.

    ``began``: when the job's first round of this run did; ``failures``: how many of its rounds since began
    after one that nobody had planned to end.

    ``anew``: nobody is to go on with what a worker has in memory: it has come to what is NaN or infinite,
    and the job goes back to a checkpoint. Who could keep its process ends with the round.
    """

    number: int
    phase: Phase
    members: tuple[Member, ...]
    store: str
    cause: Cause
    since: float
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

    @property
    def world_size(self) -> int:
        return sum(len(m.slots) for m in self.members)

    @property
    def next_cause(self) -> Cause:
        """Why the round after this one begins, or is still waited for."""
        return self.closing or self.cause

    def member(self, node: str, incarnation: str) -> Member | None:
        for m in self.members:
            if m.node == node and m.incarnation == incarnation:
                return m
        return None


@dataclass(frozen=True, slots=True)
class Report:
    """What an agent last saw of its workers of a round. Key ``reports/<node>``, no lease.

    ``exits`` are those the agent did not cause itself. ``finished``: every worker here ended with
    status 0. ``steps``: made here in this round, by the slot that made the most: committed ones, where
    workers commit, else an optimizer's.
    ``returned``: the run function has, in all workers of the round; only the end of the scripts is to come.
    ``checkpointed``: a worker here has just written a checkpoint, and is held there. ``broken``: one can do
    nothing more in the round, as it lost the others.
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
        """How much it tells of how the workers here have ended."""
        return len(self.exits) + self.finished


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A slot kept out of the world until ``until`` (seconds since the epoch)."""

    node: str
    slot: int
    until: float
    times: int


@dataclass(frozen=True, slots=True)
class Charge:
    """One failure of the user's code, charged to the budget. ``progressed``: its round was of use, or
    one after it, or nobody can tell. ``step``: the committed one that the job goes on
    from, where workers have it in memory."""

    at: float
    node: str
    slot: int
    progressed: bool
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Astray:
    """How often the training came to what is NaN or infinite and went back, since it last got further
    than ever before: to ``step``."""

    step: int
    times: int


@dataclass(frozen=True, slots=True)
class Apart:
    """How often the workers of a round lost each other with the state at ``step``, no further than when they
    did so before, and ``since`` when."""

    step: int
    times: int
    since: float


@dataclass(frozen=True, slots=True)
class Budget:
    """What failures have cost the job. Key ``budget``, no lease; written by the leader only.

    ``charges`` of the window, oldest first. ``total`` counts all there ever were. ``astray`` is not
    forgotten with the window: the way to that step may be longer. ``apart`` costs nothing, but has an end.
    ``stepped``: a step was seen in a round that failed, so that rounds without one have made none.
    """

    charges: tuple[Charge, ...] = ()
    total: int = 0
    quarantines: tuple[Quarantine, ...] = ()
    astray: Astray | None = None
    apart: Apart | None = None
    stepped: bool = False


@dataclass(frozen=True, slots=True)
class SlotProgress:
    """A worker's heartbeat, as its agent read it. ``at``: seconds since the epoch; 0 for never.
    ``step``: optimizer steps made in this round. ``base``: the job's step after which it began this round,
    if it said so. ``held_s``: for how long in all checkpoints have held it up. ``committed``: the job's step
    that all ranks have applied, if it said so."""

    slot: int
    rank: int
    pid: int
    step: int
    at: float
    base: int | None = None
    held_s: float = 0.0
    committed: int | None = None

    @property
    def of_job(self) -> int:
        """The job's step where the script tells it (``tells``), else how many it made in this round."""
        if self.committed is not None:
            return self.committed
        return self.step if self.base is None else self.base + self.step

    @property
    def tells(self) -> bool:
        """Whether the script says at which step of the job it is, or from which it went on."""
        return self.committed is not None or self.base is not None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the workers of a node are. Key ``progress/<node>``, on the agent's lease. ``own_bytes`` and
    ``replica_bytes``: memory that checkpoints of its workers, and of other nodes', lie in there.

    Written every second or two, for people to look at; no decision rests on it.
    """

    node: str
    round: int
    slots: tuple[SlotProgress, ...] = ()
    own_bytes: int = 0
    replica_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stall:
    """What the workers of a node do that make no steps. Key ``stalls/<node>``, on the agent's lease,
    and only while they make none. ``allowed``: what this node learned of the job's steps."""

    node: str
    incarnation: str
    round: int
    looks: tuple[Look, ...]
    allowed: Allowance


@dataclass(frozen=True, slots=True)
class Hang:
    """Who hangs, as the leader judged from all nodes' stalls. Key ``hang``, on the leader's lease.
    Each agent kills its own of the guilty, if they still are what they were seen to be. ``asks``: not
    yet, as every agent is first to look at its own workers and to tell what they do."""

    round: int
    verdict: Verdict
    asks: bool = False


@dataclass(frozen=True, slots=True)
class SlotPace:
    """``own_s``: a worker's own time for a step, of late: without waiting for others."""

    slot: int
    rank: int
    own_s: float


@dataclass(frozen=True, slots=True)
class BadSlot:
    """Its GPU has told of an error of its own; ``why`` says of which."""

    slot: int
    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class Paces:
    """How fast the workers of a node are, in one period. Key ``paces/<node>``, on the agent's lease.
    ``number``: of the period; it only grows. ``slots``: those of which it is known."""

    node: str
    incarnation: str
    round: int
    number: int
    slots: tuple[SlotPace, ...] = ()
    bad: tuple[BadSlot, ...] = ()


@dataclass(frozen=True, slots=True)
class Laggard:
    """``ratio``: of its own time for a step to its peers'. ``why``: it is not slow but its GPU is bad."""

    node: str
    slot: int
    rank: int
    ratio: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Who lags behind, as the leader judged from all nodes' paces. Key ``stragglers``, on the leader's
    lease. ``usual_s``: the median of all workers' own times for a step; 0 where it is not known."""

    round: int
    usual_s: float
    slow: tuple[Laggard, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotTime:
    """What the time of a slot was spent on: seconds by kind (``core.ledger.Kind``). ``furthest``: the
    job's last step known to have been made there. ``untold_s``: of the last time, that of a step under
    way, of which it is not known yet what it is spent on."""

    slot: int
    spent: Mapping[str, float]
    furthest: int = 0
    untold_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeLedger:
    """Where a node's time went in this run, up to ``at`` (seconds since the epoch). Key ``ledger/<node>``,
    no lease: it outlives the agent, whose next incarnation goes on with it. Written rarely. ``run``: the
    create_revision of the job's spec, which another run of the same name has another of."""

    node: str
    at: float
    slots: tuple[SlotTime, ...] = ()
    run: int = 0


@dataclass(frozen=True, slots=True)
class Leadership:
    """Who leads. Key ``leader``, on the leader's lease; created only if absent."""

    node: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Saved:
    """One committed checkpoint. ``name``: its folder, never used again. ``step``: the last step it
    holds. ``round`` and ``world`` of those who saved it; ``at``: seconds since the epoch;
    ``size``: bytes in all. ``digest``: xxh3 of its manifest, which has those of all else.
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
    """What may be resumed from. Key ``checkpoint``, no lease. ``saved`` are below ``path``, in the
    order they were committed; the last is the newest."""

    path: str
    saved: tuple[Saved, ...] = ()

    @property
    def newest(self) -> Saved | None:
        return self.saved[-1] if self.saved else None


@dataclass(frozen=True, slots=True)
class Holder:
    """Where the saver of a node serves those of others, who prove that they know its ``secret``. Key
    ``savers/<node>``, on the agent's lease, and only in jobs that hold copies in other nodes' memory."""

    node: str
    host: str
    port: int
    secret: str = field(repr=False)


Fact = (
    Spec
    | Node
    | Round
    | Report
    | Budget
    | Progress
    | Stall
    | Hang
    | Paces
    | Stragglers
    | Leadership
    | Checkpoint
    | NodeLedger
    | Holder
)
