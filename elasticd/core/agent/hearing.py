"""Take in an event: update the agent's state. ``stepping`` then makes the decisions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from elasticd.core.agent.agent_state import (
    SIGKILL,
    SIGTERM,
    Crew,
    Decisions,
    Departure,
    Leaving,
    Lingering,
    Stopping,
)
from elasticd.core.agent.crew import leave, stop, tell_that_they_leave
from elasticd.core.agent.leaving import DRAIN_PATIENCE_S
from elasticd.core.agent.membership import take_over_record
from elasticd.core.agent.standbys import lose_standby
from elasticd.core.agent_messages import (
    Answered,
    ContinueWorkers,
    Event,
    KeySeen,
    LeaseChanged,
    LeaveJob,
    OtherNodesCounted,
    PortReserved,
    ProcessGone,
    ResourceExhausted,
    RoundWritten,
    Signalled,
    StoreComplained,
    StoreFilled,
    Tag,
    Tick,
    WardenLost,
    WorkerExited,
)
from elasticd.core.facts import Exit, Node, Phase, Report
from elasticd.core.lifecycle import Life, become
from elasticd.core.ports import (
    Answer,
    Applied,
    Entry,
    LeaseExpired,
    LeaseHeld,
    LeaseNews,
    Put,
    StoreSilent,
    WorkerBroke,
    WorkerCheckpointed,
    WorkerGone,
    WorkerLingers,
    WorkerLinked,
    WorkerReturned,
    WorkerWaiting,
    Write,
    entry_of,
)
from elasticd.core.reasons import (
    Draining,
    LeadsNow,
    LeaseLost,
    ScriptCheckpointed,
    StandbyReady,
    StoreAway,
    StoreBack,
    StoreFull,
    StoreHasRoom,
    WorkerEnded,
)

HELD_S = 10.0  # how long a worker waits after its checkpoint, so that the leader can resize the round there
RETRY_S = 0.5  # from a refused or unanswered write to the next; meanwhile the watch shows the newer entries


def absorb(do: Decisions, event: Event) -> None:
    state = do.state
    match event:
        case KeySeen(entry):
            _saw(do, entry)
        case OtherNodesCounted(count):
            do.registration(others=count)
        case Answered(tag, answer):
            _answered(do, tag, answer)
        case RoundWritten(round, revision):
            _wrote(do, (Put("round", round),), revision)
        case LeaseChanged(news):
            _lease(do, news)
        case WorkerExited():
            _exited(do, event)
        case WorkerLinked(slot):
            do.features(inplace=True)
            do.set(linked=state.linked | {slot})
        case WorkerWaiting():
            _waits(do, event)
        case WorkerReturned(_, number):
            if state.crew is not None and state.crew.round.number == number:
                do.crew(report=replace(state.crew.report, returned=True))
        case WorkerBroke(slot, number, fails):
            _broke(do, slot, number, fails)
        case WorkerCheckpointed():
            _checkpointed(do, event)
        case WorkerLingers(slot, pid, failed):
            do.takedown(lingering={**state.takedown.lingering, pid: Lingering(slot, do.now)})
            if failed:
                _dies(do, slot)
        case WorkerGone(gone):
            left = {pid: one for pid, one in state.takedown.lingering.items() if pid != gone}
            do.takedown(lingering=left)
        case PortReserved(port):
            do.set(store_port=port, renewing_store=False)
        case StoreComplained(why, forgot):
            if not state.registration.joined:  # after joining, an error of the store is only logged
                do.set(exiting=state.exiting or LeaveJob(2, why))
            elif forgot:  # the store may give out round numbers again, and no number may recur
                do.set(
                    exiting=state.exiting or LeaveJob(4, f"{why}; start the job again on each of its nodes")
                )
        case StoreFilled(why):
            if why and not state.etcd.full:
                do.etcd(full_since=do.now)
                do.reasons.append(StoreFull(why))
            elif state.etcd.full and not why:
                do.reasons.append(StoreHasRoom(do.now - state.etcd.full_since))
            do.etcd(full=why)
        case Signalled(signal):
            _signalled(do, signal)
        case ProcessGone(incarnation):
            key = state.seen.get(state.me.key)
            if key and isinstance(key.fact, Node) and key.fact.incarnation == incarnation:
                take_over_record(do, key, key.fact)
        case ResourceExhausted(why):
            do.set(exiting=state.exiting or LeaveJob(3, why))
        case WardenLost():
            if state.crew:
                workers = state.crew.workers
                fenced = {slot: become(workers[slot], Life.FENCED) for slot in state.crew.alive}
                do.crew(workers={**workers, **fenced})
            do.set(standbys={})
            do.takedown(lingering={})
            why = "leaves, as its warden, the parent process of its workers, was killed"
            do.set(exiting=state.exiting or LeaveJob(128 + SIGTERM, why))
        case Tick():
            pass
        case _:
            assert_never(event)


def _saw(do: Decisions, entry: Entry) -> None:
    old = do.state.seen.get(entry.key)
    if old is not None and entry.revision and entry.revision < old.revision:
        return
    do.set(seen={**do.state.seen, entry.key: entry})
    if entry.key == do.state.me.key:
        own = do.state.registration.own
        mine = isinstance(entry.fact, Node) and entry.fact.incarnation == do.state.me.incarnation
        if mine:
            if not do.state.registered:
                _distrust_absences(do)
            do.registration(own=entry, name_taken_until=None)
        elif own is None or entry.revision >= own.revision or not entry.revision:
            do.registration(own=None, reported=None)
    if isinstance(entry.fact, Report) and entry.fact.incarnation == do.state.me.incarnation:
        do.registration(reported=entry.fact)
    if entry.key == "leader" and do.state.leads and (old is None or old.fact != entry.fact):
        do.reasons.append(LeadsNow())


def _answered(do: Decisions, tag: Tag, answer: Answer) -> None:
    asked = do.state.etcd.busy.get(tag)
    do.etcd(busy={t: a for t, a in do.state.etcd.busy.items() if t is not tag})
    if isinstance(answer, Applied):
        _wrote(do, asked.writes if asked else (), answer.revision)
        return
    # A guard failed or no answer came. The watch will bring newer entries; then the write is tried again.
    do.etcd(retry_at={**do.state.etcd.retry_at, tag: do.now + RETRY_S})
    if asked and any(isinstance(w, Put) and isinstance(w.fact, Report) for w in asked.writes):
        do.registration(reported=None)
    elif tag is Tag.SPEC:
        do.registration(others=None)  # another node may have joined meanwhile: count again


def _wrote(do: Decisions, writes: Iterable[Write], revision: int) -> None:
    """Take what this node wrote, of the keys that the agent watches, and do not wait for the watch."""
    for write in writes:
        if (old := do.state.seen.get(write.key)) is not None:
            _saw(do, entry_of(write, revision, old.created if old.fact is not None else revision))


def _lease(do: Decisions, news: LeaseNews) -> None:
    state = do.state
    match news:
        case LeaseHeld(until):
            ttl_s = state.policy.node_ttl_s
            if do.now > until - 3 / 4 * ttl_s:  # a late answer: etcd was stopped, and may drop leases now
                _distrust_absences(do)
            _hear_from_store(do)
            do.etcd(lease_until=until)
        case LeaseExpired(late_s):
            _hear_from_store(do)
            do.registration(own=None, reported=None)
            do.etcd(lease_until=None)
            do.reasons.append(LeaseLost(state.policy.node_ttl_s, late_s))
        case StoreSilent(_, cut_off):
            if state.etcd.silent is None or state.etcd.silent.cut_off != cut_off:
                fence = max(state.etcd.fence, do.now) if cut_off and not state.config.alone else None
                do.reasons.append(StoreAway(cut_off, fence))
            do.etcd(silent=news)
        case _:
            assert_never(news)


def _hear_from_store(do: Decisions) -> None:
    """Note that etcd answers."""
    silent = do.state.etcd.silent
    if silent is not None:
        do.reasons.append(StoreBack(do.now - silent.since))
        do.etcd(silent=None)
        _distrust_absences(do)


def _distrust_absences(do: Decisions) -> None:
    """Count no node as lost for one TTL: after an outage other agents may be about to register."""
    do.etcd(absence_counts_from=do.now + do.state.policy.node_ttl_s)


def _waits(do: Decisions, event: WorkerWaiting) -> None:
    state, slot, crew = do.state, event.slot, do.state.crew
    before = state.standbys.get(slot)
    if crew is not None and slot in crew.alive:
        before = crew.workers[slot]
        if event.round != crew.round.number or before is Life.STOPPING:
            return  # the worker has not entered this round yet, or it is about to end
        unbidden = crew.order is None and not crew.round.handover
        do.crew(
            workers={**crew.workers, slot: become(before, Life.WAITING)},
            report=replace(
                crew.report,
                steps=max(crew.report.steps, event.steps),
                broken=crew.report.broken or unbidden,
            ),
        )
    elif before is Life.STOPPING:
        return
    if before is Life.STARTING:
        do.reasons.append(StandbyReady(slot))
    do.features(
        inplace=True,
        sharded=state.features.sharded or event.sharded,
        memory=event.memory or state.features.memory,
    )
    do.set(
        standbys={**state.standbys, slot: Life.WAITING},
        ages={s: a for s, a in state.ages.items() if s != slot} | ({slot: event.age} if event.age else {}),
        setbacks={s: b for s, b in state.setbacks.items() if s != slot},
    )


def _broke(do: Decisions, slot: int, number: int, fails: bool) -> None:
    crew = do.state.crew
    if crew is None or crew.round.number != number or slot not in crew.alive:
        return
    if isinstance(crew.order, Stopping):
        return  # the worker ends because it was told to
    if fails:  # the worker's exit follows, with its error
        do.crew(workers={**crew.workers, slot: become(crew.workers[slot], Life.FAILING)})
    else:
        do.crew(report=replace(crew.report, broken=True))


def _checkpointed(do: Decisions, event: WorkerCheckpointed) -> None:
    crew = do.state.crew
    do.features(checkpointed=True)
    do.reasons.append(ScriptCheckpointed(event.round, event.slot, event.path))
    if crew is not None and crew.round.number == event.round and event.slot in crew.alive:
        do.crew(
            held=crew.held | {event.slot},
            held_until=do.now + HELD_S,
            report=replace(crew.report, checkpointed=True),
        )
    else:
        do.actions.append(ContinueWorkers((event.slot,)))


def _dies(do: Decisions, slot: int) -> None:
    """Have the other workers of the node leave the round at once. How the worker ended is told later."""
    crew = do.state.crew
    if crew is None or crew.workers.get(slot) is not Life.TRAINING or crew.alive == {slot} or not _trains(do):
        return
    do.crew(workers={**crew.workers, slot: become(Life.TRAINING, Life.DYING)})
    leave(do, False, SIGTERM, do.state.policy.broken_s)


def _exited(do: Decisions, event: WorkerExited) -> None:
    crew, exit = do.state.crew, event.exit
    linked = exit.slot in do.state.linked
    do.set(linked=do.state.linked - {exit.slot})
    if exit.slot in do.state.standbys:
        lose_standby(do, exit)
        return
    # A process that ended while it waited, just before its round began, was not told the round's number.
    if crew is None or crew.round.number < event.round or exit.slot not in crew.alive:
        return
    number = event.round
    if not number:  # a standby that has just become a member: until then its rank was a guess
        number, exit = crew.round.number, replace(exit, rank=crew.member.rank_of(exit.slot))
    life, order = crew.workers[exit.slot], crew.order
    if life is Life.FAILING:
        exit = replace(exit, raised=True)
    # Workers that leave at a commit must agree on the commit, so the others would wait for a dead worker.
    missed = isinstance(order, Leaving) and order.planned and exit.failed and exit.code != -SIGTERM
    killed = life is Life.LEAVING and linked and _killed_with_the_first(crew, exit)
    by_itself = not exit.fenced and (life in (Life.TRAINING, Life.FAILING, Life.DYING) or missed or killed)
    if exit.fenced:
        end = Life.FENCED
    elif by_itself or (life is Life.LEAVING and linked and not exit.failed):
        end = Life.FAILED if exit.failed else Life.FINISHED
    else:
        end = Life.STOPPED
    do.crew(
        workers={**crew.workers, exit.slot: become(life, end)},
        held=crew.held - {exit.slot},
        report=replace(
            crew.report,
            exits=with_exit(crew.report.exits, exit) if end is Life.FAILED else crew.report.exits,
            steps=max(crew.report.steps, event.steps),
        ),
    )
    if by_itself:
        log = exit.log if exit.failed else ""
        do.reasons.append(
            WorkerEnded(number, exit.slot, exit.rank, exit.code, exit.message, exit.hung, log, exit.at)
        )
    if missed or (end is Life.FAILED and _trains(do)):
        leave(do, False, SIGTERM, do.state.policy.broken_s)
    elif life is Life.DYING:
        tell_that_they_leave(do)


def _killed_with_the_first(crew: Crew, exit: Exit) -> bool:
    """Whether a leaving worker was killed from outside, as was the worker whose exit made the others leave.
    The agent itself kills no leaving worker before the grace is over."""
    order, before = crew.order, crew.report.exits
    if not before or not isinstance(order, Leaving) or exit.code >= 0 or exit.code == -SIGTERM:
        return False
    return exit.at < min(one.at for one in before) + order.grace_s


def _trains(do: Decisions) -> bool:
    """Whether the workers train in place, in a round that is live. The end of one of them ends the round, so
    the others on its node need not wait until the leader says so."""
    crew, round = do.state.crew, do.state.round_of_crew
    live = round is not None and round.phase is Phase.LIVE and not round.handover
    return do.state.inplace and live and crew is not None and crew.order is None


def with_exit(exits: tuple[Exit, ...], exit: Exit) -> tuple[Exit, ...]:
    """Return the exits with one more, and the tracebacks of those that may be named as the cause. When a
    worker of a large job dies, all others may fail within a moment, and etcd takes all reports."""
    exits = (*exits, exit)
    kinds = exits, [one for one in exits if one.raised], [one for one in exits if one.fatal is not None]
    named = {min(some, key=lambda one: (one.at, one.rank)).slot for some in kinds if some}
    return tuple(one if one.slot in named else replace(one, traceback="") for one in exits)


def _signalled(do: Decisions, signal: int) -> None:
    departure = do.state.departure
    if departure is None:
        do.set(departure=Departure(signal, do.now + DRAIN_PATIENCE_S))
        do.reasons.append(Draining(signal))
    elif not departure.signal:  # the operator drains the node, and then the platform usually sends a signal
        do.set(departure=replace(departure, signal=signal))
    else:  # the second signal: leave at once
        do.set(departure=Departure(signal, do.now, at_once=True))
        stop(do, SIGKILL, 0.0)
