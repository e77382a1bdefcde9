"""The state of an agent, and the decisions of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from elasticd.core.age import Age
from elasticd.core.agent_messages import Action, LeaveJob, Tag, Transact
from elasticd.core.facts import Leadership, Limits, Member, Phase, Policy, Report, Round, Spec
from elasticd.core.lifecycle import Life
from elasticd.core.ports import Entry, Guard, StillThere, StoreSilent, Write
from elasticd.core.reasons import Reason
from elasticd.core.state_memory import StateMemory

SIGINT, SIGKILL, SIGTERM = 2, 9, 15  # POSIX's numbers; core does not import the signal module


@dataclass(frozen=True, slots=True)
class Identity:
    """The agent's identity. ``host`` identifies the machine (name and boot id); ``pid`` is the agent's.
    ``port``, ``secret``: for the agents that this agent leads."""

    node: str
    incarnation: str
    address: str
    slots: tuple[int, ...]
    host: str
    pid: int
    port: int = 0
    secret: str = field(default="", repr=False)

    @property
    def key(self) -> str:
        """The key of the node's record."""
        return f"nodes/{self.node}"

    @property
    def report_key(self) -> str:
        """The key of the node's report."""
        return f"reports/{self.node}"


@dataclass(frozen=True, slots=True)
class Leaving:
    """The order to leave the round and to keep the process: at a commit if ``planned``, else at once. With
    ``hurried`` it has a time limit. Workers that cannot leave end, within ``grace_s``. ``since``: the first
    order to leave this round was given then."""

    planned: bool
    hurried: bool
    grace_s: float
    since: float


@dataclass(frozen=True, slots=True)
class Stopping:
    """The order to end within ``grace_s``."""

    grace_s: float


@dataclass(frozen=True)
class Crew:
    """The workers of one round on this node.

    ``workers``: the state of each slot's worker; a worker that has left the round is waiting. ``report``: the
    report of this round so far. ``order``: the last order to the workers. ``held``: slots whose script waits
    after its checkpoint, at most until ``held_until``. No ``__slots__``: they would leave no place for the
    value of ``alive``.
    """

    round: Round
    member: Member
    workers: Mapping[int, Life]
    report: Report
    order: Leaving | Stopping | None = None
    held: frozenset[int] = frozenset()
    held_until: float = 0.0

    @cached_property
    def alive(self) -> frozenset[int]:
        """The slots whose worker has neither ended nor left the round."""
        return frozenset(s for s, life in self.workers.items() if not life.ended and life is not Life.WAITING)

    @property
    def fenced(self) -> bool:
        return Life.FENCED in self.workers.values()

    @property
    def finished(self) -> bool:
        finished = all(life is Life.FINISHED for life in self.workers.values())
        return finished and not (self.report.broken or self.round.handover)


@dataclass(frozen=True, slots=True)
class Departure:
    """The departure of this node. ``signal``: the signal that asked for it (0: the operator).
    ``patient_until``: how long the node waits for the leader. ``at_once``: a second signal came, so the node
    does not wait."""

    signal: int
    patient_until: float
    at_once: bool = False

    @property
    def workers_signal(self) -> int:
        """The signal for the workers. It is SIGTERM also for Ctrl-C, since scripts save on SIGTERM. Any other
        signal is passed on, as torchrun does."""
        return SIGTERM if self.signal in (0, SIGINT) else self.signal


@dataclass(frozen=True, slots=True)
class Setback:
    times: int
    retry_at: float


@dataclass(frozen=True, slots=True)
class Lingering:
    """A worker of this slot that has ended, ``since`` this time, and whose process the kernel is still taking
    down. ``late``: a warning was given."""

    slot: int
    since: float
    late: bool = False


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The configuration with which the agent was started.

    ``etcd_grace_s``, ``etcd_wait_s``: how long the agent waits for an etcd that does not answer, after and
    before joining. If ``etcd_wait_s`` is None, an etcd that does not answer soon counts as mistyped.
    ``spares``: extra waiting workers that this node keeps, if it can. ``alone``: etcd is this agent's own, so
    no other agent can replace its workers. ``began_at``: the agent's start, in seconds since the epoch.
    ``memory``: the bytes that this node's workers may use together; 0: not known.
    """

    etcd_grace_s: float
    etcd_wait_s: float | None = None
    store_name: str = "etcd"
    spares: int = 0
    alone: bool = False
    began_at: float = 0.0
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Contact:
    """The agent's contact with etcd.

    ``fence``: the time until which workers may run, even if this agent is stopped. ``full``: why etcd takes
    no writes, since ``full_since``. ``busy``: the writes that are under way. ``retry_at``: the earliest time
    for the next write of each kind. ``absence_counts_from``: before this time, a node that is not registered
    may only be late.
    """

    lease_until: float | None = None
    silent: StoreSilent | None = None
    fence: float = 0.0
    full: str = ""
    full_since: float = 0.0
    busy: Mapping[Tag, Transact] = field(default_factory=dict)
    retry_at: Mapping[Tag, float] = field(default_factory=dict)
    absence_counts_from: float = 0.0


@dataclass(frozen=True, slots=True)
class Registration:
    """How far the agent has come in joining the job and in registering its node.

    ``history``: the revision of a round that had ended before this agent came. ``others``: how many other
    nodes there are; None: not asked, -1: not answered. ``own``: the node's record in etcd. ``reported``: this
    agent's report as it is in etcd, or on its way there.
    """

    joined: bool = False
    history: int = -1
    others: int | None = None
    own: Entry | None = None
    reported: Report | None = None
    name_taken_until: float | None = None


@dataclass(frozen=True, slots=True)
class Released:
    """The newest round that this node has released, and ``Report.ends`` of that round. ``fenced``: the newest
    round whose workers the fence killed. ``declined``: the newest round that this node took no part in."""

    round: int = 0
    ends: int = 0
    fenced: int = 0
    declined: int = 0


@dataclass(frozen=True, slots=True)
class Takedown:
    """Processes that have ended, and that the kernel takes down.

    ``lingering``: by pid, those that must be gone before a new worker may need what they have. ``held_back``:
    the slots whose worker starts once a process is gone, and the pid of that process.
    """

    lingering: Mapping[int, Lingering] = field(default_factory=dict)
    held_back: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Features:
    """``inplace``: some worker keeps its process from round to round. ``sharded``: some worker of this
    node has only a part of the training state. ``checkpointed``: a worker reported a checkpoint of its
    own. ``memory``: what the script's sharded state takes, as a worker last told."""

    inplace: bool = False
    sharded: bool = False
    checkpointed: bool = False
    memory: StateMemory | None = None


@dataclass(frozen=True, slots=True)
class AgentState:
    """All that an agent knows.

    ``wanted``: the spec of its command line. ``seen``: the watched keys, as etcd last had them.
    ``renewing_store``: ``store_port`` serves no later round, and another port is being reserved.

    ``standbys``: the state of each slot's process that is in no round. ``ages``: the ages of the training
    states that these processes have. ``setbacks``: for each slot, how often in a row its process failed to
    become ready, and when it is tried again.

    ``takedown``: what the kernel takes down, and which starts wait for that.

    ``linked``: slots whose worker keeps its process from round to round. ``features``: what workers of this
    job were seen to do. ``exiting``: how the agent exits, once no worker is left.
    """

    me: Identity
    wanted: Spec
    config: AgentConfig
    store_port: int
    renewing_store: bool = False
    seen: Mapping[str, Entry] = field(default_factory=dict)
    etcd: Contact = Contact()
    registration: Registration = Registration()
    crew: Crew | None = None
    standbys: Mapping[int, Life] = field(default_factory=dict)
    ages: Mapping[int, Age] = field(default_factory=dict)
    setbacks: Mapping[int, Setback] = field(default_factory=dict)
    takedown: Takedown = Takedown()
    linked: frozenset[int] = frozenset()
    features: Features = Features()
    released: Released = Released()
    report: Report | None = None
    departure: Departure | None = None
    exiting: LeaveJob | None = None

    @property
    def inplace(self) -> bool:
        return self.features.inplace

    def knows(self, entry: Entry) -> bool:
        """Whether this state of a key was taken in, so that the same news again changes nothing."""
        old = self.seen.get(entry.key)
        if old is None or not 0 < entry.revision == old.revision or entry.created != old.created:
            return False
        if entry.key == self.me.key:  # the registration is given up with the lease, and may still be there
            return self.registration.own is old
        return entry.key != self.me.report_key or self.registration.reported == old.fact

    @property
    def registered(self) -> bool:
        return self.registration.own is not None and self.registration.own.fact is not None

    @property
    def spec(self) -> Spec | None:
        entry = self.seen.get("spec")
        return entry.fact if entry and isinstance(entry.fact, Spec) else None

    @property
    def round(self) -> Round | None:
        entry = self.seen.get("round")
        fact = entry.fact if entry else None
        return fact if isinstance(fact, Round) else None

    @property
    def round_of_crew(self) -> Round | None:
        """The round of the crew, as etcd last had it; None if etcd has another round."""
        crew, round = self.crew, self.round
        same = crew is not None and round is not None and round.number == crew.round.number
        return round if same else None

    @property
    def over(self) -> bool:
        """Whether the job has ended, perhaps before this agent came: see ``ended_before_joining``."""
        return self.round is not None and self.round.phase is Phase.ENDED

    @property
    def ended_before_joining(self) -> bool:
        """Whether the job had ended before this agent came.

        The revision decides: a job that runs again, and ends before its first world, has the same round
        number.
        """
        return self.over and self.seen["round"].revision <= self.registration.history

    @property
    def reaches_etcd(self) -> bool:
        """Whether this node is registered, and etcd answers."""
        return self.registered and self.etcd.silent is None

    @property
    def guard(self) -> StillThere | None:
        """The guard of this node's other writes: its record still exists. None while the node cannot
        write."""
        own = self.registration.own
        return StillThere(self.me.key, own.created) if own is not None and self.reaches_etcd else None

    @property
    def leads(self) -> Entry | None:
        """The leader key's entry, if this agent leads."""
        entry, leader = self.seen.get("leader"), self.leader
        mine = leader is not None and leader.is_of(self.me.node, self.me.incarnation)
        return entry if mine and self.registered else None

    @property
    def leader(self) -> Leadership | None:
        entry = self.seen.get("leader")
        return entry.fact if entry and isinstance(entry.fact, Leadership) else None

    @property
    def stays_until(self) -> float:
        """The latest time at which a leaving node exits. Until then others may take over its workers'
        state."""
        departure, round = self.departure, self.round
        assert departure is not None
        needed = round is not None and not self.over and self.me.node in round.leaving
        if departure.at_once or round is None:
            return departure.patient_until
        half_s = self.policy.shutdown_s / 2
        checkpoint_by = min(round.resizes_by, departure.patient_until + half_s)
        return max(departure.patient_until, checkpoint_by, round.leave_by if needed else 0.0)

    @property
    def parts_to_give(self) -> frozenset[int]:
        """The slots whose worker waits with a part of a sharded state that the worker has not given away at
        the end of its round."""
        round = self.round
        if not self.features.sharded or round is None or round.phase is Phase.ENDED:
            return frozenset()
        member = round.member(self.me.node, self.me.incarnation)
        have = self.waiting & self.ages.keys()
        if member is None or not have:
            return frozenset()
        over = round.planned and self.released.round == round.number
        given = {slot for slot in member.slots if over and round.leaves_out(member.rank_of(slot))}
        took_part = {slot for slot in have if round.handover or self.ages[slot].agreed == round.number}
        return have.intersection(member.slots) - (given & took_part)

    @property
    def waiting(self) -> frozenset[int]:
        """The slots whose process waits for a round."""
        return frozenset(slot for slot, life in self.standbys.items() if life is Life.WAITING)

    @property
    def outlived(self) -> bool:
        """Whether a worker that left the crew's round waits here with all the state that the round agreed
        on."""
        crew = self.crew
        left = self.waiting & set(crew.member.slots) if crew is not None else ()
        ages = (self.ages[slot] for slot in left if slot in self.ages)
        return crew is not None and any(age.agreed == crew.round.number for age in ages)

    @property
    def empty(self) -> bool:
        """Whether no worker process is left on this node."""
        return not self.standbys and not self.alive

    @property
    def gone(self) -> bool:
        return self.exiting is not None and self.empty

    @property
    def policy(self) -> Policy:
        """The job's policy; before the spec is known, the policy of the command line."""
        return (self.spec or self.wanted).policy

    @property
    def limits(self) -> Limits:
        """The job's limits, in the same way."""
        return (self.spec or self.wanted).limits

    @property
    def alive(self) -> frozenset[int]:
        """See ``Crew.alive``; empty without a crew."""
        return self.crew.alive if self.crew is not None else frozenset()


@dataclass(frozen=True, slots=True)
class AgentStep:
    state: AgentState
    actions: tuple[Action, ...] = ()
    reasons: tuple[Reason, ...] = ()
    wake_at: float | None = None


@dataclass(slots=True)
class Decisions:
    """The decisions of one step so far. The object is dropped after the step."""

    state: AgentState
    now: float
    actions: list[Action] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    wakes: list[float] = field(default_factory=list)

    def set(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]

    def crew(self, **changes: object) -> None:
        assert self.state.crew is not None
        self.set(crew=replace(self.state.crew, **changes))  # type: ignore[arg-type]

    def etcd(self, **changes: object) -> None:
        self.set(etcd=replace(self.state.etcd, **changes))  # type: ignore[arg-type]

    def takedown(self, **changes: object) -> None:
        self.set(takedown=replace(self.state.takedown, **changes))  # type: ignore[arg-type]

    def features(self, **changes: object) -> None:
        self.set(features=replace(self.state.features, **changes))  # type: ignore[arg-type]

    def registration(self, **changes: object) -> None:
        self.set(registration=replace(self.state.registration, **changes))  # type: ignore[arg-type]

    def transact(self, tag: Tag, guards: tuple[Guard, ...], writes: tuple[Write, ...]) -> None:
        """Write, unless a write of this kind is under way or was just refused, or the store is silent."""
        if tag in self.state.etcd.busy or self.state.etcd.silent is not None:
            return
        retry_at = self.state.etcd.retry_at.get(tag, 0.0)
        if self.now < retry_at:
            self.wakes.append(retry_at)
            return
        action = Transact(tag, guards, writes)
        self.etcd(busy={**self.state.etcd.busy, tag: action})
        self.actions.append(action)
