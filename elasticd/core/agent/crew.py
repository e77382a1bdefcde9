"""Run this node's workers as the round requires: start, stop, report, release."""

from __future__ import annotations

from dataclasses import replace

from elasticd.core.agent.agent_state import (
    SIGKILL,
    SIGTERM,
    AgentState,
    Crew,
    Decisions,
    Leaving,
    Released,
    Stopping,
)
from elasticd.core.agent.lingering import hold_back, in_the_way
from elasticd.core.agent.standbys import dismiss_holders
from elasticd.core.agent_messages import (
    ContinueWorkers,
    LeaveRound,
    RenewStore,
    StartWorkers,
    StopWorkers,
    Tag,
)
from elasticd.core.facts import Cause, Phase, Report, Round
from elasticd.core.lifecycle import Life, become
from elasticd.core.ports import Put, Unchanged
from elasticd.core.reasons import Expelled, WorkersLeaving, WorkersStarted, WorkersStopping

RELEASE_S = 0.5  # how long the report of a failure waits for the release, from the order to leave


def follow_the_round(do: Decisions) -> None:
    state, round = do.state, do.state.round
    if round is None or not state.registration.joined:
        return
    policy = state.policy
    if state.over:
        return  # ``leaving.end_with_the_job`` stops the workers
    if round.anew:
        dismiss_holders(do)
    if state.crew is not None:
        crew = state.crew
        if state.spec is not None and state.spec.stop and state.spec.kill:
            stop(do, SIGKILL, 0.0)
        if round.number > crew.round.number:
            if crew.order != Stopping(0.0):
                do.reasons.append(Expelled(crew.round.number, round.number))
            stop(do, SIGKILL, 0.0)
        elif round.number == crew.round.number and round.phase is not Phase.LIVE:
            signal = state.departure.workers_signal if state.departure else SIGTERM
            grace_s = policy.shutdown_s if round.planned else policy.broken_s
            if state.inplace and not round.anew:
                leave(do, round.planned, signal, grace_s)
            else:
                stop(do, signal, grace_s)
        return
    member = round.member(state.me.node, state.me.incarnation)
    if member is None or state.released.round >= round.number:
        return
    if round.phase is not Phase.LIVE:
        _decline(do, round)  # the round was over before this node began it
        return
    able = state.registered and state.exiting is None and not state.renewing_store
    if not able or (state.departure is not None and not (round.handover or state.parts_to_give)):
        return
    store_closed = member.hosts_store and not round.store.endswith(f":{state.store_port}")
    waiting = {slot: state.standbys[slot] for slot in member.slots if slot in state.standbys}
    has_lost_parts = state.features.sharded and not state.waiting >= {*member.slots}
    if store_closed or Life.STOPPING in waiting.values() or has_lost_parts:
        # The round was formed on an old record of this node: the store has closed since, or the workers are
        # being ended, or one has ended whose part of the state another node may have, too.
        _decline(do, round)
        return
    fresh = [slot for slot in member.slots if slot not in waiting]
    pid = in_the_way(state) if fresh else None
    if pid is not None:
        hold_back(do, fresh, pid)
        return
    do.set(
        crew=Crew(
            round,
            member,
            {slot: become(waiting.get(slot), Life.TRAINING) for slot in member.slots},
            Report(state.me.node, state.me.incarnation, round.number),
        ),
        standbys={slot: life for slot, life in state.standbys.items() if slot not in waiting},
    )
    do.actions.append(StartWorkers(round, member, tuple(sorted(waiting))))
    if member.hosts_store:  # now, so that the release need not wait for a port
        do.set(renewing_store=True)
        do.actions.append(RenewStore())
    ranks = tuple(member.rank_of(s) for s in member.slots)
    do.reasons.append(WorkersStarted(round.number, ranks, round.world_size))


def _decline(do: Decisions, round: Round) -> None:
    """Take no part in the round. The release tells the leader, which forms another round if needed."""
    do.set(released=replace(do.state.released, round=round.number, ends=0, declined=round.number))


def stop(do: Decisions, signal: int, grace_s: float) -> None:
    """Stop the workers. Another call has an effect only if its grace is shorter."""
    crew = do.state.crew
    if crew is None or not crew.alive:
        return
    if isinstance(crew.order, Stopping) and grace_s >= crew.order.grace_s:
        return
    do.crew(order=Stopping(grace_s), workers=_told(crew, Life.STOPPING))
    others = do.state.standbys
    do.actions.append(StopWorkers(signal, grace_s, tuple(sorted(crew.alive)) if others else None))
    do.reasons.append(WorkersStopping(crew.round.number, _cause(do, crew), grace_s))


def leave(do: Decisions, planned: bool, signal: int, grace_s: float) -> None:
    """Have the workers leave the round and keep their process where they can.

    Another call has an effect only if it is more urgent. There is no time limit while the only copy of the
    state may be in the workers' memory.
    """
    crew = do.state.crew
    if crew is None or not crew.alive or isinstance(crew.order, Stopping):
        return
    before = crew.order
    planned = planned and (before is None or before.planned)
    hurried = _departs(do) or (not planned and _outlived(do.state))
    begins = before is None or (before.planned and not planned)
    if before is not None and not begins and (before.hurried or not hurried):
        return
    leave_s = do.state.policy.part_s if hurried else None
    since = before.since if before is not None else do.now
    do.crew(order=Leaving(planned, hurried, grace_s, since), workers=_told(crew, Life.LEAVING))
    do.actions.append(LeaveRound(planned, signal, grace_s, leave_s, _going(do, crew)))
    if begins and Life.DYING not in crew.workers.values():  # else the exit follows, and tells the cause
        tell_that_they_leave(do)


def tell_that_they_leave(do: Decisions) -> None:
    """Say that the workers leave the round, and why."""
    crew = do.state.crew
    if crew is not None and isinstance(crew.order, Leaving):
        do.reasons.append(WorkersLeaving(crew.round.number, _cause(do, crew), crew.order.planned))


def _told(crew: Crew, order: Life) -> dict[int, Life]:
    """Return the workers' states after an order to leave or to stop. A failing worker ends by itself."""
    return {
        slot: become(life, order) if life in (Life.TRAINING, Life.LEAVING) and life is not order else life
        for slot, life in crew.workers.items()
    }


def _outlived(state: AgentState) -> bool:
    """Whether other workers, here or on another node, already hold the state."""
    return state.outlived or (state.round_of_crew is not None and state.round_of_crew.outlived)


def _going(do: Decisions, crew: Crew) -> tuple[int, ...]:
    """Return the slots whose workers are not in the next round."""
    if _departs(do):
        return crew.member.slots
    round, member = do.state.round_of_crew, crew.member
    return tuple(s for s in member.slots if round is not None and round.leaves_out(member.rank_of(s)))


def _departs(do: Decisions) -> bool:
    """Whether this node's workers end with the round, so that the state in their memory is lost."""
    state = do.state
    stopped = state.round is not None and state.round.closing is Cause.STOPPED
    return stopped or state.departure is not None


def _cause(do: Decisions, crew: Crew) -> Cause:
    """Return why the round ends here: the leader's cause if there is one, else a cause on this node."""
    state, round = do.state, do.state.round
    if round is not None and round.number > crew.round.number:
        return round.cause
    if round is not None and round.closing is not None:
        return round.closing
    if state.over:
        return Cause.STOPPED
    if state.departure is not None:
        return Cause.NODE_DRAINED
    return crew.report.exits[0].cause if crew.report.exits else Cause.NODE_LOST


def continue_after_checkpoint(do: Decisions) -> None:
    """Let workers go on after their checkpoint, unless the round is to be resized there."""
    state, crew, round = do.state, do.state.crew, do.state.round_of_crew
    if crew is None or not crew.report.checkpointed or crew.order is not None:
        return
    to_be_resized = round is not None and round.resizes_by > 0
    if crew.held and to_be_resized and state.etcd.silent is None and do.now < crew.held_until:
        do.wakes.append(crew.held_until)
        return
    if crew.held:
        do.actions.append(ContinueWorkers(tuple(sorted(crew.held))))
    do.crew(held=frozenset(), report=replace(crew.report, checkpointed=False))


def release(do: Decisions) -> None:
    """Release the round once it is over for this node and no worker is left in it."""
    state, crew = do.state, do.state.crew
    if crew is None or crew.alive:
        return
    round = state.round_of_crew
    still_live = round is not None and round.phase is Phase.LIVE
    if still_live and not (crew.fenced or crew.order is not None or crew.round.handover):
        return  # the crew's workers finished or failed, and the leader has not closed the round yet
    told = state.report.ends if state.report is not None and state.report.round == crew.round.number else 0
    newest = max(state.released.round, crew.round.number)
    fenced = crew.round.number if crew.fenced else state.released.fenced
    do.set(crew=None, released=Released(newest, told, fenced, state.released.declined))


def note_report(do: Decisions) -> None:
    """Update the report for the leader. The report outlives the crew: etcd may take it only later."""
    crew, before = do.state.crew, do.state.report
    if crew is None:
        return
    report = replace(crew.report, finished=True) if crew.finished else crew.report
    if before is None or before.round != report.round:
        news = report.exits or report.finished or report.returned or report.checkpointed or report.broken
        if not news and (crew.alive or not report.steps):
            return  # steps alone are reported only once no worker is left that makes steps
    if report != before:
        do.set(report=report)


def report(do: Decisions) -> None:
    state = do.state
    if state.registration.own is None or not state.registered or Tag.REPORT in state.etcd.busy:
        return
    if state.renewing_store:
        return  # the node's record is written next, and the report with it
    if Tag.NODE in state.etcd.busy:
        return  # the guard needs the revision of the record that is being written
    if (until := report_waits_until(state)) > do.now:
        do.wakes.append(until)
        return
    if not (put := unreported(state)):
        return
    before = len(do.actions)
    # The guard is this node's record, which every release changes: a late report of a round that this node
    # has released replaces nothing. A late report of the same round is seen, and replaced in turn.
    do.transact(Tag.REPORT, (Unchanged(state.me.key, state.registration.own.revision),), put)
    if len(do.actions) > before:
        do.registration(reported=state.report)


def report_waits_until(state: AgentState) -> float:
    """Return the time until which the report of a failure waits for the release of the round; 0 if it does
    not wait. The leader decides nothing meanwhile.

    From the two together, the leader closes the round and forms the next in one transaction. The report waits
    only at the leader, and only if no other node is in the round: other nodes must hear at once that the
    round is over.
    """
    crew, round = state.crew, state.round_of_crew
    if crew is None or round is None or round.nodes > 1 or round.phase is not Phase.LIVE:
        return 0.0
    if state.leads is None or not crew.alive or not crew.report.exits:
        return 0.0
    if not isinstance(crew.order, Leaving) or crew.order.planned:
        return 0.0
    return crew.order.since + RELEASE_S


def unreported(state: AgentState) -> tuple[Put, ...]:
    if state.report is None or state.report == state.registration.reported:
        return ()
    return (Put(state.me.report_key, state.report),)
