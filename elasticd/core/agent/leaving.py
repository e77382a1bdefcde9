"""Leave the job: the node is drained, or the job is over."""

from __future__ import annotations

from typing import assert_never

from elasticd.core.agent.agent_state import SIGTERM, Decisions, Departure
from elasticd.core.agent.crew import stop, unreported
from elasticd.core.agent.standbys import dismiss
from elasticd.core.agent_messages import LeaveJob, Tag
from elasticd.core.facts import Drained, Outcome, Round
from elasticd.core.reasons import Draining

DRAIN_PATIENCE_S = 5.0  # how long a leaving node waits for the leader to end the round


def begin_requested_drain(do: Decisions) -> None:
    spec, me = do.state.spec, do.state.me
    if spec is None or not spec.drain or do.state.departure is not None:
        return
    if Drained(me.node, me.incarnation) in spec.drained:
        do.set(departure=Departure(0, do.now + DRAIN_PATIENCE_S))
        do.reasons.append(Draining(0))


def end_with_the_job(do: Decisions) -> None:
    """Stop the workers and exit once the job is over."""
    state, round = do.state, do.state.round
    if round is None or not state.registration.joined or not state.over or state.ended_before_joining:
        return
    stop(do, SIGTERM, state.policy.broken_s)
    if do.state.exiting is None:
        do.set(exiting=exit_of_the_job(round))


def exit_of_the_job(round: Round) -> LeaveJob:
    match round.outcome:
        case Outcome.SUCCEEDED:
            return LeaveJob(0, round.why)
        case Outcome.FAILED | None:
            return LeaveJob(1, round.why)
        case Outcome.REFUSED:
            return LeaveJob(2, round.why)
        case Outcome.SHORT:
            return LeaveJob(3, round.why)
        case Outcome.NOWHERE:
            return LeaveJob(5, round.why)
        case Outcome.DIVERGED:
            return LeaveJob(6, round.why)
        case Outcome.STOPPED:
            return LeaveJob(128 + SIGTERM, round.why)
        case _:
            assert_never(round.outcome)


def depart(do: Decisions) -> None:
    """Leave once the leader has ended the round for all nodes, at the latest at ``stays_until``."""
    state, departure = do.state, do.state.departure
    if departure is None or state.exiting is not None:
        return
    until = state.stays_until
    if state.crew is not None:
        unanswered = state.crew.order is None
        if unanswered and (do.now >= until or not state.reaches_etcd):
            stop(do, departure.workers_signal, state.policy.shutdown_s)
        elif unanswered:
            do.wakes.append(until)
        if do.state.crew is not None and (do.state.crew.alive or not do.now >= until):
            return
    elif hands_over(do):
        do.wakes.append(until)
        return
    elif _finish_not_reported_yet(do):
        return
    do.set(exiting=LeaveJob(128 + (departure.signal or SIGTERM), "drained"))


def hands_over(do: Decisions) -> bool:
    """Whether this leaving node waits for others to take over its workers' state."""
    state = do.state
    if state.departure is None or state.round is None or not state.reaches_etcd:
        return False
    asked = state.me.node in state.round.leaving or bool(state.parts_to_give)
    return bool(state.waiting) and asked and do.now < state.stays_until


def _finish_not_reported_yet(do: Decisions) -> bool:
    """Whether etcd has yet to take the report that this node's workers finished. Without the report, the job
    would repeat their work."""
    state, departure = do.state, do.state.departure
    if state.report is None or not state.report.finished or not state.reaches_etcd:
        return False
    at_once = departure is not None and departure.at_once
    busy = state.etcd.busy.keys() & {Tag.REPORT, Tag.NODE}  # either may bring the report
    return not at_once and bool(unreported(state) or busy)


def finish_leaving(do: Decisions) -> None:
    leave = do.state.exiting
    if leave is None:
        return
    if not do.state.empty:
        stop(do, SIGTERM, do.state.policy.broken_s)
        dismiss(do)
        return
    do.set(crew=None)
    do.actions.append(leave)
