"""Run this node's workers as the round requires: start, stop, report, release."""

from __future__ import annotations

from elasticd.core.agent.reserve import dismiss_holders
from elasticd.core.agent.state import SIGKILL, SIGTERM, Crew, Doing, State
from elasticd.core.facts import Cause, Phase, Report, Round
from elasticd.core.messages import CloseRound, GoOn, RenewStore, StartWorkers, StopWorkers, Tag
from elasticd.core.ports import Put, Unchanged
from elasticd.core.reasons import Expelled, WorkersLeaving, WorkersStarted, WorkersStopping


def follow_the_round(do: Doing) -> None:
    state, round = do.state, do.state.round
    if round is None or not state.joined:
        return
    policy = state.policy_source.policy
    if state.over:
        return  # ``leaving.heed_the_end`` stops the workers
    if round.anew:
        dismiss_holders(do)
    if state.crew is not None:
        crew = state.crew
        if round.number > crew.round.number:
            if not crew.killed:
                do.reasons.append(Expelled(crew.round.number, round.number))
            stop(do, SIGKILL, 0.0)
        elif round.number == crew.round.number and round.phase is not Phase.LIVE:
            signal = state.departure.workers_signal if state.departure else SIGTERM
            grace_s = policy.shutdown_s if round.planned else policy.broken_s
            if state.inplace and not round.anew:
                part(do, round.planned, signal, grace_s)
            else:
                stop(do, signal, grace_s)
        return
    member = round.member(state.me.node, state.me.incarnation)
    if member is None or state.released >= round.number:
        return
    if round.phase is not Phase.LIVE:
        _decline(do, round)  # the round was over before this node began it
        return
    able = state.registered and state.exiting is None and not state.renewing_store
    if not able or (state.departure is not None and not round.handover):
        return
    hosts = round.members[0] == member
    mine = frozenset(member.slots)
    store_closed = hosts and not round.store.endswith(f":{state.store_port}")
    if store_closed or state.dismissed & mine:
        # The round was formed on an old record of this node: the store has closed since, or the workers are
        # being ended.
        _decline(do, round)
        return
    do.set(
        crew=Crew(round, member, hosts, mine),
        waiting=state.waiting - mine,
        starting=state.starting - mine,
    )
    do.actions.append(StartWorkers(round, member, hosts))
    ranks = tuple(member.rank_of(s) for s in member.slots)
    do.reasons.append(WorkersStarted(round.number, ranks, round.world_size))


def _decline(do: Doing, round: Round) -> None:
    """Take no part in the round. The release tells the leader, which forms another round if needed."""
    do.set(released=round.number, told=0)


def stop(do: Doing, signal: int, grace_s: float) -> None:
    """Stop the workers, once; and again if the grace becomes shorter."""
    crew = do.state.crew
    if crew is None or not crew.alive or crew.killed or (crew.stopping and grace_s >= crew.grace_s):
        return
    do.crew(stopping=True, grace_s=grace_s, killed=signal == SIGKILL)
    others = do.state.reserve
    do.actions.append(StopWorkers(signal, grace_s, tuple(sorted(crew.alive)) if others else None))
    do.reasons.append(WorkersStopping(crew.round.number, _cause(do, crew), grace_s))


def part(do: Doing, planned: bool, signal: int, grace_s: float) -> None:
    """Have the workers leave the round and keep their process where they can; once, and again if they must
    hurry.

    There is no time limit while the only copy of the state may be in their memory.
    """
    crew = do.state.crew
    if crew is None or not crew.alive or crew.killed:
        return
    planned = planned and (crew.planned or not crew.stopping)
    hurried = _going(do) or (not planned and _outlived(do.state, crew))
    begins = not crew.stopping or (crew.parting and crew.planned and not planned)
    if not begins and not (crew.parting and hurried and not crew.hurried):
        return
    part_s = do.state.policy_source.policy.part_s if hurried else None
    do.crew(stopping=True, grace_s=grace_s, parting=True, planned=planned, hurried=hurried)
    do.actions.append(CloseRound(planned, signal, grace_s, part_s, _going(do)))
    if begins:
        do.reasons.append(WorkersLeaving(crew.round.number, _cause(do, crew), planned))


def _outlived(state: State, crew: Crew) -> bool:
    """Whether other workers, here or on another node, already hold the state."""
    round = state.round
    return state.outlived or (round is not None and round.number == crew.round.number and round.outlived)


def _going(do: Doing) -> bool:
    """Whether this node's workers end with the round, so that the state in their memory is lost."""
    state = do.state
    stopped = state.round is not None and state.round.closing is Cause.STOPPED
    return stopped or state.departure is not None


def _cause(do: Doing, crew: Crew) -> Cause:
    """Return why the round ends here: the leader's cause if there is one, else a cause on this node."""
    state, round = do.state, do.state.round
    if round is not None and round.number > crew.round.number:
        return round.cause
    if round is not None and round.closing is not None:
        return round.closing
    if state.over:
        return Cause.STOPPED
    return Cause.NODE_DRAINED if state.departure is not None else Cause.NODE_LOST


def let_go_on(do: Doing) -> None:
    """Let workers go on after their checkpoint, unless the round is to be resized there."""
    state, crew, round = do.state, do.state.crew, do.state.round
    if crew is None or not crew.held or crew.stopping:
        return
    to_be_resized = round is not None and round.number == crew.round.number and round.resizes_by > 0
    if to_be_resized and state.silent is None and do.now < crew.held_until:
        do.wakes.append(crew.held_until)
        return
    do.actions.append(GoOn(tuple(sorted(crew.held))))
    do.crew(held=frozenset())


def release(do: Doing) -> None:
    """Release the round once it is over for this node and no worker is left in it."""
    state, crew = do.state, do.state.crew
    if crew is None or crew.alive:
        return
    round = state.round
    still_live = round is not None and round.number == crew.round.number and round.phase is Phase.LIVE
    if still_live and not (crew.fenced or crew.stopping or crew.round.handover):
        return  # finished or failed: the leader has not heard yet
    told = state.report.ends if state.report is not None and state.report.round == crew.round.number else 0
    do.set(crew=None, released=max(state.released, crew.round.number), told=told)
    if crew.fenced:
        do.set(fenced=crew.round.number)
    if crew.hosts_store:
        do.set(renewing_store=True)
        do.actions.append(RenewStore())


def note_report(do: Doing) -> None:
    """Update the report for the leader. It outlives the crew, so that a late end is still told."""
    crew, before = do.state.crew, do.state.report
    if crew is None:
        return
    was_held = before is not None and before.round == crew.round.number and before.checkpointed
    stepped = not crew.alive and crew.steps > 0
    if not (
        crew.failures or crew.finished or crew.returned or crew.broken or crew.held or was_held or stepped
    ):
        return
    me = do.state.me
    report = Report(
        me.node,
        me.incarnation,
        crew.round.number,
        crew.failures,
        crew.finished,
        crew.steps,
        crew.returned,
        bool(crew.held),
        crew.broken,
    )
    if report != do.state.report:
        do.set(report=report)


def report(do: Doing) -> None:
    state = do.state
    if state.own is None or not state.registered or Tag.REPORT in state.busy:
        return
    if not (put := unreported(state)):
        return
    before = len(do.actions)
    # The guard is this node's record, which every release changes: a late report cannot replace a newer one.
    do.transact(Tag.REPORT, (Unchanged(state.me.key, state.own.revision),), put)
    if len(do.actions) > before:
        do.set(reported=state.report)


def unreported(state: State) -> tuple[Put, ...]:
    if state.report is None or state.report == state.reported:
        return ()
    return (Put(f"reports/{state.me.node}", state.report),)
