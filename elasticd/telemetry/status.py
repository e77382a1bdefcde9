"""The status of a job: one frozen value, which every view shows. Pure.

``elasticd status`` and ``elasticd top`` make the value from the facts in etcd, and from what the leader
knows. An agent makes the value from the facts that it knows, and from what etcd does not know
(``LocalFacts``). It uses the value for its live view, its pages, its metrics and the run's timeline.
docs/status.md describes the JSON form. Fields may be added while ``schema`` stays the same; none is renamed
or removed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from elasticd import __version__
from elasticd.core import budget as budgets
from elasticd.core import round_parts, seating, shortage
from elasticd.core.facts import (
    Budget,
    Checkpoint,
    Drained,
    Exit,
    Fact,
    Failure,
    Laggard,
    Leadership,
    Limits,
    Member,
    Node,
    NodeLedger,
    Phase,
    Progress,
    Round,
    SlotProgress,
    Spec,
    Stragglers,
    Summary,
)
from elasticd.core.ports import Listing, Seen
from elasticd.core.reasons import BelowMemory, BelowMinimum
from elasticd.telemetry import describe
from elasticd.telemetry.goodput import goodput, totals
from elasticd.telemetry.steprate import StepRates

SCHEMA = 2
F = TypeVar("F")
Shown = (
    Fact | Progress | NodeLedger
)  # by key; the leader's knowledge has the keys ``progress/N``, ``ledger/N``


class SlotState(StrEnum):
    IDLE = "idle"  # the slot is part of the job, but has no worker
    READY = "ready"  # the slot's worker waits for a round
    STARTING = "starting"  # the slot's worker has made no step in this round
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """One slot of a node and its worker, if it has one. ``rank``: None if the slot is not in this round.
    ``step``: see ``JobStatus``. ``until_gone``: the worker starts once the process with this pid is gone.
    ``why``: why the slot is in quarantine, in a clause without a full stop.
    ``shard_bytes``, ``copies_bytes``: see ``SlotProgress``."""

    slot: int
    state: SlotState
    rank: int | None = None
    pid: int | None = None
    step: int | None = None
    steps_per_s: float | None = None
    quarantined_until: float | None = None
    until_gone: int | None = None
    why: str | None = None
    shard_bytes: int = 0
    copies_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node of the job. ``state``: "member" of the round, "waiting" for the next, "draining", or "lost" (a
    member whose lease has expired). ``own_bytes``, ``replica_bytes``: see ``Progress``. ``time``: seconds of
    the node's slots by kind, as the node last reported. ``why``: why a node is draining, as of a slot."""

    node: str
    state: str
    address: str | None
    host: str | None
    slots: tuple[SlotStatus, ...]
    own_bytes: int = 0
    replica_bytes: int = 0
    time: Mapping[str, float] | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """How many workers the job could start, and how many it needs, if it has too few. ``need`` is 0 if
    no number of workers with so little memory would do."""

    have: int
    need: int


@dataclass(frozen=True, slots=True)
class FailureStatus:
    """The last failure of a worker. The optional fields are known only for the failure that broke the last
    round. ``code``: an exit status, or minus the signal that killed the worker."""

    node: str
    slot: int
    at: float
    rank: int | None = None
    code: int | None = None
    message: str | None = None
    traceback: str | None = None
    log: str | None = None
    hung: bool = False

    @property
    def text(self) -> str:
        """The failure in a clause without a full stop."""
        if self.rank is None or self.code is None:
            return f"slot {self.slot} on {self.node} failed"
        exit = Exit(self.slot, self.rank, self.code, self.at, self.message or "", hung=self.hung)
        return describe.failure(Failure(self.node, exit))


@dataclass(frozen=True, slots=True)
class CheckpointStatus:
    """The newest committed checkpoint. ``at``: the time of the commit; ``age_s``: its age; ``size``:
    bytes."""

    name: str
    step: int
    at: float
    age_s: float
    size: int

    @property
    def text(self) -> str:
        return f"step {self.step} is the newest checkpoint, {describe.span(self.age_s)} old"


@dataclass(frozen=True, slots=True)
class Note:
    """An event in words. ``at``: seconds since the epoch."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """The agent that reports the status. ``unready``: why its node neither trains nor is ready to, or empty.
    ``events``: the last events, oldest first."""

    node: str
    ready: bool
    unready: str
    events: tuple[Note, ...]


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The status of a job. Times are seconds since the epoch; ``at`` is the time of the status.

    ``phase``: "starting" (no round yet), "waiting", "live", "closing" or "ended", since ``since``. ``cause``:
    why the round began; of a closing round, why it closes. ``step``: the largest step of any worker.
    ``step_told``: whether the script reports the job's step; otherwise ``step`` counts from the start of this
    round.
    ``steps_per_s``: the pace of the slowest worker, since all wait for it. ``waiting``: what the job waits
    for, in a sentence, or empty. ``time``: seconds of all slots by kind; ``goodput``: the productive share.
    ``stragglers``: workers that are slow, or whose GPU is bad or strained, as the leader judges this round.
    ``etcd_full``: etcd has no space, so the job cannot change.

    ``agent``: the reporting agent; None if the status was read from etcd. ``complete``: whether all nodes are
    listed. An agent with an ``--etcd`` lists only its own node.
    """

    job: str
    at: float
    phase: str
    since: float | None
    round: int
    cause: str | None
    world_size: int
    limits: Limits | None
    asked: Limits | None
    script: str | None
    step: int | None
    step_told: bool
    steps_per_s: float | None
    restarts: int
    budget_left: int | None
    leader: str | None
    stopping: bool
    waiting_for: Need | None
    waiting: str
    outcome: str | None
    why: str | None
    last_failure: FailureStatus | None
    checkpoint: CheckpointStatus | None
    stragglers: tuple[Laggard, ...]
    etcd_full: bool
    time: Mapping[str, float] | None
    goodput: float | None
    nodes: tuple[NodeStatus, ...]
    complete: bool = True
    agent: AgentStatus | None = None
    version: str = __version__
    schema: int = SCHEMA

    @property
    def ended(self) -> bool:
        return self.phase == Phase.ENDED

    @property
    def condition(self) -> str:
        """The outcome of an ended job, else the phase."""
        return self.outcome or self.phase

    @property
    def own(self) -> NodeStatus | None:
        """The node of the agent that reports the status."""
        return next((n for n in self.nodes if self.agent and n.node == self.agent.node), None)

    def as_json(self) -> dict[str, Any]:
        """Return a dict for ``json.dumps``."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LocalFacts:
    """The agent's own knowledge that is not in the facts. ``states``: by slot, the states that are not in
    etcd. ``waits``: why the job waits, in sentences. ``complete``: see ``JobStatus``."""

    agent: AgentStatus
    states: Mapping[int, SlotState] = field(default_factory=dict)
    waits: tuple[str, ...] = ()
    complete: bool = True


def job_status(
    job: str,
    facts: Mapping[str, Shown],
    now: float,
    rates: StepRates | None = None,
    *,
    local: LocalFacts | None = None,
    etcd_full: bool = False,
) -> JobStatus:
    """Return the status of a job. ``facts``: by key below ``/elasticd/<job>/``. ``now``: seconds since the
    epoch. ``rates`` are updated; without them, a pace is the average since the round formed."""
    return _Picture(facts, now, rates or StepRates(), local).status(job, etcd_full)


class _Picture:
    """The facts of a job, sorted by kind."""

    def __init__(
        self, facts: Mapping[str, Shown], now: float, rates: StepRates, local: LocalFacts | None
    ) -> None:
        self.now, self.rates, self.local = now, rates, local
        self.complete = local is None or local.complete
        self.spec = _one(facts, "spec", Spec)
        self.leader = _one(facts, "leader", Leadership)
        self.checkpoint = _one(facts, "checkpoint", Checkpoint)
        self.stragglers = _one(facts, "stragglers", Stragglers)
        self.budget = _one(facts, "budget", Budget) or (Budget() if self.complete else None)
        self.nodes = {f.name: f for f in _all(facts, Node)}
        self.summary = _one(facts, "summary", Summary)
        kept = self.summary.nodes if self.summary is not None else ()
        told = {f.node: f for f in _all(facts, Progress)}
        self.fresh = told.keys()  # nodes whose progress is newer than the summary
        self.progress = {f.node: f.progress for f in kept if f.progress is not None} | told
        if self.complete:
            self.progress = {name: f for name, f in self.progress.items() if name in self.nodes}
        self.ledgers = {f.node: f.ledger for f in kept if f.ledger is not None}
        self.ledgers |= {f.node: f for f in _all(facts, NodeLedger)}
        round = _one(facts, "round", Round)
        if round is not None and not round.members:
            round = round_parts.whole(round, facts)
        if round is not None and round.phase is Phase.CLOSING and self.complete and not self.nodes:
            round = replace(round, phase=Phase.WAITING)  # no node is left to end the phase
        self.round = round
        self.live = round if round is not None and round.phase is Phase.LIVE else None
        over = round is None or round.phase is Phase.ENDED
        self.members: Mapping[str, Member] = round.by_node if round is not None and not over else {}
        self.beats = {
            p.node: {b.slot: b for b in p.slots}
            for p in self.progress.values()
            if round is not None and p.round == round.number
        }

    def status(self, job: str, etcd_full: bool) -> JobStatus:
        spec, round = self.spec, self.round
        nodes = tuple(map(self._node, self._listed()))
        beats = [beat for of_node in self.beats.values() for beat in of_node.values()]
        rates = [s.steps_per_s for n in nodes for s in n.slots if s.steps_per_s is not None]
        spent = self._spent()
        lag, live = self.stragglers, self.live
        return JobStatus(
            job=job,
            at=self.now,
            phase=str(round.phase) if round else "starting",
            since=round.since if round else None,
            round=round.number if round else 0,
            cause=str(round.next_cause) if round else None,
            world_size=live.world_size if live else 0,
            limits=spec.limits if spec else None,
            asked=spec.asked if spec else None,
            script=spec.script if spec else None,
            step=max((beat.of_job for beat in beats), default=None),
            step_told=all(beat.tells for beat in beats if beat.of_job),
            steps_per_s=min(rates, default=None),
            restarts=round.restarts if round else 0,
            budget_left=budgets.restarts_left(self.budget, spec.policy, self.now)
            if self.budget and spec
            else None,
            leader=self.leader.node if self.leader else None,
            stopping=spec.stop if spec else False,
            waiting_for=self._need(),
            waiting=self._waiting(),
            outcome=str(round.outcome) if round and round.outcome else None,
            why=round.why or None if round else None,
            last_failure=self._last_failure(),
            checkpoint=self._newest(),
            stragglers=lag.slow if lag and live and lag.round == live.number else (),
            etcd_full=etcd_full,
            time=spent,
            goodput=goodput(spent) if spent else None,
            nodes=nodes,
            complete=self.complete,
            agent=self.local.agent if self.local else None,
        )

    # ------------------------------------------------------------ nodes and slots

    def _listed(self) -> list[str]:
        """Return the nodes in rank order, then the others."""
        members = self.members if self.complete else [name for name in self.beats if name in self.members]
        names = {*self.nodes, *members}
        ranks = {name: self.members[name].base_rank for name in names if name in self.members}
        return sorted(names, key=lambda name: (ranks.get(name, math.inf), name))

    def _node(self, name: str) -> NodeStatus:
        node, member = self.nodes.get(name), self.members.get(name)
        if node is not None and member is not None and node.incarnation != member.incarnation:
            member = None  # the node was restarted, and is not a member
        if node is not None and node.draining:
            state = "draining"
        elif node is None and self.complete:
            state = "lost"
        else:
            state = "member" if member is not None else "waiting"
        kept = self.progress.get(name)
        told = self.ledgers.get(name)
        return NodeStatus(
            name,
            state,
            node.address if node else None,
            node.host if node else None,
            tuple(self._slots(name, node, member)),
            kept.own_bytes if kept else 0,
            kept.replica_bytes if kept else 0,
            totals([told]) if told else None,
            self._why_draining(node) if node is not None and node.draining else None,
        )

    def _why_draining(self, node: Node) -> str:
        asked = self.spec is not None and Drained(node.name, node.incarnation) in self.spec.drained
        return describe.draining(asked)

    def _slots(self, name: str, node: Node | None, member: Member | None) -> Iterator[SlotStatus]:
        """Yield the status of each slot that the job uses or may use."""
        most = self.spec.limits.max if self.spec else None
        quarantines = self.budget.quarantines if self.budget else ()
        out = {q.slot: q for q in quarantines if q.node == name and q.until > self.now}
        states = self.local.states if self.local and self.local.agent.node == name else {}
        beats = self.beats.get(name, {})
        held_back = self.progress[name].held_back if name in self.progress else {}
        within = member.slots if member else ()
        ready, places = (node.ready, node.slots) if node else ((), ())
        for slot in sorted({*places[:most], *within, *ready, *states, *held_back, *(out.keys() & places)}):
            if slot in held_back:
                rank = member.rank_of(slot) if member is not None and slot in within else None
                yield SlotStatus(slot, SlotState.STARTING, rank, until_gone=held_back[slot])
            elif member is not None and slot in within:
                beat = beats.get(slot)
                state = states.get(slot, SlotState.RUNNING)
                if state is SlotState.RUNNING:
                    state = self._of_worker(beat)
                yield SlotStatus(
                    slot,
                    state,
                    member.rank_of(slot),
                    (beat.pid or None) if beat else None,
                    beat.of_job if beat else None,
                    self._rate(name, beat) if beat and state is SlotState.RUNNING else None,
                    shard_bytes=beat.shard_bytes if beat else 0,
                    copies_bytes=beat.copies_bytes if beat else 0,
                )
            elif slot in states:
                yield SlotStatus(slot, states[slot])
            elif slot in out:
                until, why = out[slot].until, describe.left_out(out[slot].faults)
                yield SlotStatus(slot, SlotState.QUARANTINED, quarantined_until=until, why=why)
            else:
                yield SlotStatus(slot, SlotState.READY if slot in ready else SlotState.IDLE)

    def _of_worker(self, beat: SlotProgress | None) -> SlotState:
        assert self.round is not None
        if self.round.phase is Phase.WAITING:
            # The record still has the last round's members, but their workers have ended.
            return SlotState.IDLE
        if self.round.phase is Phase.CLOSING:
            return SlotState.STOPPING
        return SlotState.RUNNING if beat is not None and beat.step else SlotState.STARTING

    def _rate(self, node: str, beat: SlotProgress) -> float | None:
        live, now = self.live, self.now
        if self.summary is not None and node not in self.fresh:
            now = self.summary.at
        return self.rates.of(node, beat, live.number, live.since, now) if live else None

    # ------------------------------------------------------------ the job

    def _wait(self) -> BelowMinimum | BelowMemory | None:
        """Return why a job without a live round cannot form one, if too few workers are the reason."""
        spec, round = self.spec, self.round
        busy = round is not None and round.phase in (Phase.LIVE, Phase.ENDED)
        if spec is None or self.budget is None or busy or not self.complete:
            return None
        closing = round is not None and round.phase is Phase.CLOSING
        nodes = seating.candidates([*self.nodes.values()], spec, round, live=closing)
        limits, quarantines = spec.limits, self.budget.quarantines
        until = round.since + spec.policy.join_timeout_s if round else math.inf
        most = seating.form_in_any_memory(nodes, round, limits, quarantines, self.now)
        if most.workers < limits.min:
            have = seating.workers_at_hand(nodes, round, limits, quarantines, self.now)
            return BelowMinimum(have, limits.least, until, limits.unit)
        if seating.form(nodes, round, limits, quarantines, self.now).workers >= limits.min:
            return None
        lacking = shortage.find(nodes, most, limits)
        return BelowMemory(*lacking, limits.max, until) if lacking is not None else None

    def _need(self) -> Need | None:
        wait = self._wait()
        return Need(wait.have, wait.need) if wait is not None else None

    def _spent(self) -> dict[str, float] | None:
        """Return the seconds of all nodes by kind, if all are known."""
        if not self.complete or not self.ledgers:
            return None
        return dict(self.summary.spent) if self.summary is not None else totals(self.ledgers.values())

    def _waiting(self) -> str:
        if self.local and self.local.waits:
            return "; ".join(self.local.waits)
        wait = self._wait()
        return describe.waiting(wait, self.now) if wait is not None else ""

    def _last_failure(self) -> FailureStatus | None:
        if self.round is not None and self.round.failure is not None:
            e = self.round.failure.exit
            return FailureStatus(
                self.round.failure.node,
                e.slot,
                e.at,
                e.rank,
                e.code,
                e.message,
                e.traceback or None,
                e.log or None,
                e.hung,
            )
        if self.budget and self.budget.charges:
            last = self.budget.charges[-1]
            return FailureStatus(last.node, last.slot, last.at)
        return None

    def _newest(self) -> CheckpointStatus | None:
        saved = self.checkpoint.newest if self.checkpoint else None
        if saved is None:
            return None
        return CheckpointStatus(saved.name, saved.step, saved.at, max(0.0, self.now - saved.at), saved.size)


def updated(facts: Mapping[str, Fact], news: Seen) -> dict[str, Fact]:
    """The facts, by key below the job's prefix, after news of a watch."""
    known = {} if isinstance(news, Listing) else dict(facts)
    for entry in news.entries:
        if entry.fact is None:
            known.pop(entry.key, None)
        else:
            known[entry.key] = entry.fact
    return known


def _one(facts: Mapping[str, Shown], key: str, kind: type[F]) -> F | None:
    fact = facts.get(key)
    return fact if isinstance(fact, kind) else None


def _all(facts: Mapping[str, Shown], kind: type[F]) -> list[F]:
    return [fact for _, fact in sorted(facts.items()) if isinstance(fact, kind)]
