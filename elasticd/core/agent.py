"""The agent of one node: joins the job, runs its workers in each round, and leaves.

``step(state, event, now)`` takes in one event and returns the new state, what to do, why, and when
to be woken if nothing happens. Level-triggered: an event changes what is known, and all that
follows is decided from the whole of it, so that lost, late and repeated answers do no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

from elasticd.core.facts import (
    Drained,
    Exit,
    Leadership,
    Member,
    Node,
    Outcome,
    Phase,
    Report,
    Round,
    Spec,
)
from elasticd.core.messages import (
    Action,
    Answered,
    CheckProcess,
    Event,
    Fence,
    KeeperLost,
    LeaseChanged,
    Leave,
    LookAround,
    PortReserved,
    ProcessGone,
    RenewStore,
    Saw,
    SawOthers,
    Signalled,
    StartWorkers,
    StopWorkers,
    StoreComplained,
    Tag,
    Tick,
    Transact,
    WorkerExited,
)
from elasticd.core.ports import (
    Answer,
    Applied,
    Delete,
    Entry,
    Guard,
    Held,
    LeaseNews,
    Lost,
    Put,
    Silent,
    StillThere,
    Unchanged,
    Write,
)
from elasticd.core.reasons import (
    Draining,
    Expelled,
    LeadsNow,
    LeaseLost,
    NameTaken,
    PolicyDiffers,
    Reason,
    StoreAway,
    StoreBack,
    WorkerEnded,
    WorkersStarted,
    WorkersStopping,
)

SIGKILL, SIGTERM = 9, 15  # core knows no signal module of any platform; these are POSIX's
RETRY_S = 0.5  # after an unknown or refused write: by then the watch has shown why
CONNECT_PATIENCE_S = 5.0  # how long an agent that has not joined yet waits for etcd
DRAIN_PATIENCE_S = 5.0  # how long a leaving node waits for the leader to end the round for it


# ---------------------------------------------------------------- state


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this agent is. ``host`` tells machines apart (name and boot id), ``pid`` is its own."""

    node: str
    incarnation: str
    address: str
    slots: tuple[int, ...]
    host: str
    pid: int

    @property
    def key(self) -> str:
        return f"nodes/{self.node}"


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers here, of one round. ``alive``: slots whose worker has not ended yet."""

    round: Round
    member: Member
    hosts_store: bool
    alive: frozenset[int]
    failures: tuple[Exit, ...] = ()
    stopping: bool = False
    grace_s: float = 0.0
    killed: bool = False
    fenced: bool = False
    steps: int = 0

    @property
    def finished(self) -> bool:
        return not (self.alive or self.failures or self.stopping or self.fenced)


@dataclass(frozen=True, slots=True)
class Departure:
    """The node is leaving: since a signal (0: asked by the operator), patient until then."""

    signal: int
    patient_until: float


@dataclass(frozen=True, slots=True)
class State:
    """All an agent knows. ``wanted`` is the spec its command line asks for.

    ``history``: the revision of a round that had ended before this agent came, which is no news.
    ``retry_at``: writes that are not to be tried again before a time.
    """

    me: Identity
    wanted: Spec
    etcd_grace_s: float
    store_port: int
    store_name: str = "etcd"
    seen: Mapping[str, Entry] = field(default_factory=dict)
    others: int | None = None
    joined: bool = False
    history: int = -1
    lease_until: float | None = None
    silent: Silent | None = None
    fence_again_at: float = 0.0
    own: Entry | None = None
    crew: Crew | None = None
    released: int = 0
    fenced: int = 0
    renewing_store: bool = False
    report: Report | None = None
    reported: Report | None = None
    departure: Departure | None = None
    name_taken_until: float | None = None
    busy: Mapping[Tag, Transact] = field(default_factory=dict)
    retry_at: Mapping[Tag, float] = field(default_factory=dict)
    exiting: Leave | None = None
    gone: bool = False

    @property
    def registered(self) -> bool:
        return self.own is not None and self.own.fact is not None

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
    def over(self) -> bool:
        """Whether the job has ended, which may be news or not: see ``old_news``."""
        return self.round is not None and self.round.phase is Phase.ENDED

    @property
    def old_news(self) -> bool:
        """Whether the job had ended before this agent came. By revision: a job that is run again
        and ends before it has formed a world ends with the same round number."""
        return self.over and self.seen["round"].revision <= self.history

    @property
    def leads(self) -> Entry | None:
        """The leader key, if it is this agent's."""
        entry = self.seen.get("leader")
        mine = Leadership(self.me.node, self.me.incarnation)
        return entry if entry and entry.fact == mine and self.registered else None

    @property
    def policy_source(self) -> Spec:
        return self.spec or self.wanted


@dataclass(frozen=True, slots=True)
class Step:
    state: State
    actions: tuple[Action, ...] = ()
    reasons: tuple[Reason, ...] = ()
    wake_at: float | None = None


@dataclass(slots=True)
class _Doing:
    """What one step has decided so far. Lives no longer than the step."""

    state: State
    now: float
    actions: list[Action] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    wakes: list[float] = field(default_factory=list)

    def set(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]

    def crew(self, **changes: object) -> None:
        assert self.state.crew is not None
        self.set(crew=replace(self.state.crew, **changes))  # type: ignore[arg-type]

    def transact(self, tag: Tag, guards: tuple[Guard, ...], writes: tuple[Write, ...]) -> None:
        """One write of a kind at a time, and none while the store is silent or has just refused."""
        if tag in self.state.busy or self.state.silent is not None:
            return
        retry_at = self.state.retry_at.get(tag, 0.0)
        if self.now < retry_at:
            self.wakes.append(retry_at)
            return
        action = Transact(tag, guards, writes)
        self.set(busy={**self.state.busy, tag: action})
        self.actions.append(action)


def start(
    me: Identity, wanted: Spec, store_port: int, etcd_grace_s: float, store_name: str = "etcd"
) -> State:
    """An agent that knows nothing yet. The driver then watches the keys of ``watched``."""
    return State(me, wanted, etcd_grace_s, store_port, store_name)


def watched(me: Identity) -> tuple[str, ...]:
    """The keys that every agent follows; only the leader follows more."""
    return ("spec", "round", "leader", me.key)


def step(state: State, event: Event, now: float) -> Step:
    """One event. Never blocks, never fails on an event that is possible."""
    do = _Doing(state, now)
    if not state.gone:
        _absorb(do, event)
        _decide(do)
    return Step(do.state, tuple(do.actions), tuple(do.reasons), min(do.wakes, default=None))


# ---------------------------------------------------------------- taking in


def _absorb(do: _Doing, event: Event) -> None:
    state = do.state
    match event:
        case Saw(entry):
            _saw(do, entry)
        case SawOthers(count):
            do.set(others=count)
        case Answered(tag, answer):
            _answered(do, tag, answer)
        case LeaseChanged(news):
            _lease(do, news)
        case WorkerExited():
            _exited(do, event)
        case PortReserved(port):
            do.set(store_port=port, renewing_store=False)
        case StoreComplained(why, forgot):
            if not state.joined:  # later on it is one bad day of many, and is only logged
                do.set(exiting=state.exiting or Leave(2, why))
            elif forgot:  # round numbers fence everything, and may now be given twice
                do.set(exiting=state.exiting or Leave(4, why))
        case Signalled(signal):
            _signalled(do, signal)
        case ProcessGone(incarnation):
            key = state.seen.get(state.me.key)
            if key and isinstance(key.fact, Node) and key.fact.incarnation == incarnation:
                _evict(do, key, key.fact)
        case KeeperLost():
            if state.crew:
                do.crew(alive=frozenset(), fenced=True)
            why = "the process that keeps the workers was killed, so this node leaves"
            do.set(exiting=state.exiting or Leave(128 + SIGTERM, why))
        case Tick():
            pass
        case _:
            assert_never(event)


def _saw(do: _Doing, entry: Entry) -> None:
    old = do.state.seen.get(entry.key)
    if old is not None and entry.revision and entry.revision < old.revision:
        return
    do.set(seen={**do.state.seen, entry.key: entry})
    if entry.key == do.state.me.key:
        own = do.state.own
        mine = isinstance(entry.fact, Node) and entry.fact.incarnation == do.state.me.incarnation
        if mine:
            do.set(own=entry, name_taken_until=None)
        elif own is None or entry.revision >= own.revision or not entry.revision:
            do.set(own=None, reported=None)
    if entry.key == "leader" and do.state.leads and (old is None or old.fact != entry.fact):
        do.reasons.append(LeadsNow())


def _answered(do: _Doing, tag: Tag, answer: Answer) -> None:
    asked = do.state.busy.get(tag)
    do.set(busy={t: a for t, a in do.state.busy.items() if t is not tag})
    if isinstance(answer, Applied):
        for write in asked.writes if asked else ():
            if write.key in do.state.seen:  # our own news: no need to wait for the watch
                _saw(do, _written(do.state.seen[write.key], write, answer.revision))
        return
    # The view is older than the store. News is on its way; if it is not, try again later.
    do.set(retry_at={**do.state.retry_at, tag: do.now + RETRY_S})
    if asked and any(isinstance(w, Put) and isinstance(w.fact, Report) for w in asked.writes):
        do.set(reported=None)
    elif tag is Tag.SPEC:
        do.set(others=None)  # somebody may have come meanwhile


def _written(old: Entry, write: Write, revision: int) -> Entry:
    if isinstance(write, Delete):
        return Entry(old.key, None, revision, 0)
    created = old.created if old.fact is not None else revision
    return Entry(old.key, write.fact, revision, created)


def _lease(do: _Doing, news: LeaseNews) -> None:
    state = do.state
    match news:
        case Held(until):
            if state.silent is not None:
                do.reasons.append(StoreBack(do.now - state.silent.since))
            do.set(lease_until=until, silent=None)
            do.actions.append(Fence(until))
        case Lost():
            do.set(own=None, reported=None, lease_until=None)
            do.reasons.append(LeaseLost())
            # The others count us as lost once they have waited as long for us to register again.
            do.actions.append(Fence(do.now + state.policy_source.policy.node_ttl_s))
        case Silent(_, cut_off):
            # A silent store that is not merely cut off from here serves nobody else either, so no
            # world can have formed without us: training goes on beyond the lease.
            if state.silent is None or state.silent.cut_off != cut_off:
                fence = (state.lease_until or do.now) if cut_off else None
                do.reasons.append(StoreAway(cut_off, fence))
                if fence is not None:
                    do.actions.append(Fence(fence))
            do.set(silent=news)
        case _:
            assert_never(news)


def _exited(do: _Doing, event: WorkerExited) -> None:
    crew = do.state.crew
    exit = event.exit
    if crew is None or crew.round.number != event.round or exit.slot not in crew.alive:
        return
    own_doing = crew.stopping or exit.fenced
    do.crew(
        alive=crew.alive - {exit.slot},
        fenced=crew.fenced or exit.fenced,
        steps=max(crew.steps, event.steps),
        failures=crew.failures if own_doing or not exit.failed else (*crew.failures, exit),
    )
    if not own_doing:
        do.reasons.append(WorkerEnded(event.round, exit.slot, exit.rank, exit.code, exit.message))


def _signalled(do: _Doing, signal: int) -> None:
    departure = do.state.departure
    if departure is None:
        do.set(departure=Departure(signal, do.now + DRAIN_PATIENCE_S))
        do.reasons.append(Draining(signal))
    elif not departure.signal:  # drained by its operator, and then asked by the platform, as is usual
        do.set(departure=replace(departure, signal=signal))
    else:  # asked twice: at once
        do.set(departure=Departure(signal, do.now))
        _stop(do, SIGKILL, 0.0)


# ---------------------------------------------------------------- deciding


def _decide(do: _Doing) -> None:
    _heed_the_operator(do)
    _outlast_the_store(do)
    _notice_a_false_start(do)
    if not do.state.joined and do.state.exiting is None and do.state.departure is None:
        _join(do)
    _follow_the_round(do)
    _note_report(do)
    _release(do)
    _depart(do)
    if do.state.exiting is None:
        _register(do)
        _report(do)
        _campaign(do)
    _exit(do)


def _heed_the_operator(do: _Doing) -> None:
    spec, me = do.state.spec, do.state.me
    if spec and do.state.departure is None and Drained(me.node, me.incarnation) in spec.drain:
        do.set(departure=Departure(0, do.now + DRAIN_PATIENCE_S))
        do.reasons.append(Draining(0))


def _outlast_the_store(do: _Doing) -> None:
    silent = do.state.silent
    if silent is None or do.state.exiting is not None:
        return
    grace_s, joined = do.state.etcd_grace_s, do.state.joined
    if not joined:
        grace_s = min(grace_s, CONNECT_PATIENCE_S)
    until = silent.since + grace_s
    if do.now >= until:
        code = 4 if joined else 2  # an etcd that never answered was probably mistyped
        do.set(exiting=Leave(code, f"{do.state.store_name} has not answered for {grace_s:g} s"))
    else:
        do.wakes.append(until)
        _train_on(do, silent)


def _train_on(do: _Doing, silent: Silent) -> None:
    """While nobody is served, workers outlive the lease, but not an agent that is stopped meanwhile:
    it would not learn that etcd is back, and that a new world has formed without it."""
    if silent.cut_off or do.state.crew is None:
        return
    ttl_s = do.state.policy_source.policy.node_ttl_s  # for as long a returned leader misses nobody
    if do.now >= do.state.fence_again_at:
        do.actions.append(Fence(max(do.now + 0.8 * ttl_s, do.state.lease_until or 0.0)))
        do.set(fence_again_at=do.now + ttl_s / 5)
    do.wakes.append(do.state.fence_again_at)


def _notice_a_false_start(do: _Doing) -> None:
    """The spec we joined by belonged to a job that was just ending: join again, afresh."""
    state = do.state
    withdrawn = state.joined and "spec" in state.seen and state.spec is None
    if withdrawn and (state.round is None or state.old_news):
        do.set(joined=False)


def _join(do: _Doing) -> None:
    """Agree with the job on what it is, or be the one that says so."""
    state = do.state
    if "spec" not in state.seen or "round" not in state.seen or state.me.key not in state.seen:
        return
    spec, round, wanted = state.spec, state.round, state.wanted
    if round is not None and state.over:
        if spec is None and round.outcome is Outcome.SUCCEEDED:
            why = "this job has already finished; give the run another --job to train again"
            do.set(exiting=Leave(0, why))
            return
        do.set(history=state.seen["round"].revision)
    if spec is None:
        # A job that has just ended has no spec either; if we have not seen its end yet, we must not
        # start it again.
        guards = (Unchanged("spec", 0), Unchanged("round", state.seen["round"].revision if round else 0))
        do.transact(Tag.SPEC, guards, (Put("spec", wanted),))
        return
    difference = _difference(spec, wanted)
    if difference is None:
        do.set(joined=True)
        other_policy = tuple(
            name
            for name in type(spec.policy).__dataclass_fields__
            if getattr(spec.policy, name) != getattr(wanted.policy, name)
        )
        if other_policy:
            do.reasons.append(PolicyDiffers(other_policy))
    elif state.others is None:
        do.actions.append(LookAround())
        do.set(others=-1)  # asked
    elif state.others == 0:
        # A job nobody works on any more: what it was is not binding.
        guard = Unchanged("spec", state.seen["spec"].revision)
        do.transact(
            Tag.SPEC,
            (guard,),
            (Put("spec", wanted), Delete("budget"), Delete("reports/", prefix=True)),
        )
    elif state.others > 0:
        do.set(exiting=Leave(2, difference))


def _difference(spec: Spec, wanted: Spec) -> str | None:
    if spec.asked != wanted.asked:
        return (
            f"this job runs with --min {spec.asked.min} --max {spec.asked.max}, not with "
            f"--min {wanted.asked.min} --max {wanted.asked.max}; use the same limits, another --job, "
            "or `elasticd scale`"
        )
    if spec.fingerprint != wanted.fingerprint:
        return (
            f"this job runs another script ({spec.script}, not {wanted.script} as it is here); "
            "use the same script, or another --job"
        )
    return None


def _register(do: _Doing) -> None:
    """Keep the node's record in etcd what it should be."""
    state = do.state
    if not state.joined or state.lease_until is None or state.me.key not in state.seen:
        return
    if state.renewing_store:
        return  # the next round may be formed on this record, and needs the new store's port
    key = state.seen[state.me.key]
    if state.own is None:
        if state.departure is not None:
            return
        if isinstance(key.fact, Node) and key.fact.incarnation != state.me.incarnation:
            _wait_for_name(do, key, key.fact)
        elif key.fact is None:
            put = Put(state.me.key, _record(state), leased=True)
            do.transact(Tag.NODE, (Unchanged(state.me.key, 0),), (put,))
    elif state.own.fact != _record(state):
        put = Put(state.me.key, _record(state), leased=True)
        # With the release goes what is not told yet: the leader settles the round on it.
        before = len(do.actions)
        guard = Unchanged(state.me.key, state.own.revision)
        do.transact(Tag.NODE, (guard,), (put, *_unreported(state)))
        if len(do.actions) > before:
            do.set(reported=state.report)


def _record(state: State) -> Node:
    me = state.me
    return Node(
        name=me.node,
        incarnation=me.incarnation,
        address=me.address,
        slots=me.slots,
        released=state.released,
        store_port=state.store_port,
        pid=me.pid,
        host=me.host,
        draining=state.departure is not None,
        fenced=state.fenced,
    )


def _wait_for_name(do: _Doing, key: Entry, holder: Node) -> None:
    """An earlier agent of this name may just have died; its lease says so within its TTL."""
    state = do.state
    if state.silent is not None:
        do.set(name_taken_until=None)  # nobody's lease runs out meanwhile: count anew afterwards
        return
    if state.name_taken_until is None:
        until = do.now + 2 * state.policy_source.policy.node_ttl_s + 1.0
        do.set(name_taken_until=until)
        do.reasons.append(NameTaken(until))
        if holder.host == state.me.host:
            do.actions.append(CheckProcess(holder.pid, holder.incarnation))
    elif do.now >= state.name_taken_until:
        why = f"another agent of this job is already called {state.me.node}; give this one another --node"
        do.set(exiting=Leave(2, why))
        return
    assert do.state.name_taken_until is not None
    do.wakes.append(do.state.name_taken_until)


def _evict(do: _Doing, key: Entry, dead: Node) -> None:
    """What a dead agent of this node has on its lease, which nobody else need wait out."""
    guards, writes = [Unchanged(key.key, key.revision)], [Delete(key.key)]
    leader = do.state.seen.get("leader")
    if leader and leader.fact == Leadership(dead.name, dead.incarnation):
        guards.append(Unchanged("leader", leader.revision))
        writes.append(Delete("leader"))
    do.transact(Tag.EVICT, tuple(guards), tuple(writes))


def _campaign(do: _Doing) -> None:
    state = do.state
    leader = state.seen.get("leader")
    if not (state.registered and leader and leader.fact is None and state.departure is None):
        return
    assert state.own is not None
    put = Put("leader", Leadership(state.me.node, state.me.incarnation), leased=True)
    do.transact(Tag.LEAD, (Unchanged("leader", 0), StillThere(state.me.key, state.own.created)), (put,))


# ---------------------------------------------------------------- the round


def _follow_the_round(do: _Doing) -> None:
    state, round = do.state, do.state.round
    if round is None or not state.joined:
        return
    policy = state.policy_source.policy
    if state.over:
        if state.old_news:
            return
        _stop(do, SIGTERM, policy.broken_s)
        if do.state.exiting is None:
            do.set(exiting=_epitaph(round))
        return
    if state.crew is not None:
        crew = state.crew
        if round.number > crew.round.number:
            if not crew.killed:
                do.reasons.append(Expelled(crew.round.number, round.number))
            _stop(do, SIGKILL, 0.0)
        elif round.number == crew.round.number and round.phase is not Phase.LIVE:
            signal = state.departure.signal if state.departure else 0
            _stop(do, signal or SIGTERM, policy.shutdown_s if round.planned else policy.broken_s)
        return
    member = round.member(state.me.node, state.me.incarnation)
    if member is None or state.released >= round.number:
        return
    if round.phase is not Phase.LIVE:
        do.set(released=round.number)  # it was over before we began, and the leader waits for us
    elif state.registered and state.departure is None and state.exiting is None and not state.renewing_store:
        hosts = round.members[0] == member
        if hosts and not round.store.endswith(f":{state.store_port}"):
            # It was formed on a record written before we closed an older store; ask for another.
            do.set(released=round.number)
            return
        do.set(crew=Crew(round, member, hosts, frozenset(member.slots)))
        do.actions.append(StartWorkers(round, member, hosts))
        ranks = tuple(member.rank_of(s) for s in member.slots)
        do.reasons.append(WorkersStarted(round.number, ranks, round.world_size))


def _stop(do: _Doing, signal: int, grace_s: float) -> None:
    """Stop the workers, once; and once more if it must be sooner."""
    crew = do.state.crew
    if crew is None or not crew.alive or crew.killed or (crew.stopping and grace_s >= crew.grace_s):
        return
    do.crew(stopping=True, grace_s=grace_s, killed=signal == SIGKILL)
    do.actions.append(StopWorkers(signal, grace_s))
    round = do.state.round
    cause = (round.closing if round else None) or crew.round.cause
    do.reasons.append(WorkersStopping(crew.round.number, cause, grace_s))


def _release(do: _Doing) -> None:
    """Once no worker of a round is left and the round is over (for us), say so."""
    state, crew = do.state, do.state.crew
    if crew is None or crew.alive:
        return
    round = state.round
    still_live = round is not None and round.number == crew.round.number and round.phase is Phase.LIVE
    if still_live and not (crew.fenced or crew.stopping):
        return  # finished or failed: the leader has yet to hear of it
    do.set(crew=None, released=max(state.released, crew.round.number))
    if crew.fenced:
        do.set(fenced=crew.round.number)
    if crew.hosts_store:
        do.set(renewing_store=True)
        do.actions.append(RenewStore())


def _note_report(do: _Doing) -> None:
    """What the leader must know of this round; it outlives the crew, lest a late word be lost."""
    crew = do.state.crew
    if crew is None or not (crew.failures or crew.finished):
        return
    me = do.state.me
    report = Report(me.node, me.incarnation, crew.round.number, crew.failures, crew.finished, crew.steps)
    if report != do.state.report:
        do.set(report=report)


def _report(do: _Doing) -> None:
    state = do.state
    if state.own is None or not state.registered or Tag.REPORT in state.busy:
        return
    if not (put := _unreported(state)):
        return
    before = len(do.actions)
    # Guarded by our record, which every release changes: a late report cannot undo a newer one.
    do.transact(Tag.REPORT, (Unchanged(state.me.key, state.own.revision),), put)
    if len(do.actions) > before:
        do.set(reported=state.report)


def _unreported(state: State) -> tuple[Put, ...]:
    if state.report is None or state.report == state.reported:
        return ()
    return (Put(f"reports/{state.me.node}", state.report),)


# ---------------------------------------------------------------- leaving


def _epitaph(round: Round) -> Leave:
    match round.outcome:
        case Outcome.SUCCEEDED:
            return Leave(0, round.why)
        case Outcome.FAILED | None:
            return Leave(1, round.why)
        case Outcome.SHORT:
            return Leave(3, round.why)
        case Outcome.STOPPED:
            return Leave(128 + SIGTERM, round.why)
        case _:
            assert_never(round.outcome)


def _depart(do: _Doing) -> None:
    """A draining node lets the leader end the round for everybody, but not for ever."""
    state, departure = do.state, do.state.departure
    if departure is None or state.exiting is not None:
        return
    if state.crew is not None:
        unanswered = not (state.crew.stopping or state.crew.killed)
        if unanswered and (do.now >= departure.patient_until or not state.registered or state.silent):
            _stop(do, departure.signal or SIGTERM, state.policy_source.policy.shutdown_s)
        elif unanswered:
            do.wakes.append(departure.patient_until)
        if do.state.crew is not None and (do.state.crew.alive or not do.now >= departure.patient_until):
            return
    do.set(exiting=Leave(128 + (departure.signal or SIGTERM), "drained"))


def _exit(do: _Doing) -> None:
    leave = do.state.exiting
    if leave is None:
        return
    if do.state.crew is not None and do.state.crew.alive:
        _stop(do, SIGTERM, do.state.policy_source.policy.broken_s)
        return
    do.set(gone=True, crew=None)
    do.actions.append(leave)
