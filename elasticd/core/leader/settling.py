"""Settle a closing round: await its members, charge the budget, and decide what comes next."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from elasticd.core import budget as budgets
from elasticd.core.facts import Budget, Cause, Failure, Outcome, Round, Spec
from elasticd.core.leader.forming import form_or_wait
from elasticd.core.leader.plan import Plan, await_reports, end, write
from elasticd.core.leader.roll import SHOWN_MAX, Mark, Roll, in_rank_order
from elasticd.core.leader.view import View
from elasticd.core.page_layout import Fatal
from elasticd.core.reasons import AwaitingRelease, AwaitingReturn, FailureCharged, Reason, SlotQuarantined

_OUTCOMES = {
    Fatal.NOT_FINITE: Outcome.DIVERGED,
    Fatal.NO_CHECKPOINT: Outcome.NOWHERE,
    Fatal.BAD_DATA: Outcome.REFUSED,
}


def settle(view: View, spec: Spec, round: Round, now: float) -> Plan:
    """Settle the round once every member has released it or is lost: charge the budget, then decide what
    comes next."""
    assert view.reports is not None
    roll = view.roll
    if roll[Mark.ASTRAY] and not round.anew:  # the round was closed for another reason
        return write(view, replace(round, planned=False, anew=True), view.budget)
    awaited = _await_members(view, spec, round, now)
    if awaited is not None:
        return awaited

    if len(roll[Mark.FINISHED]) == len(round.members):
        # The run functions of all workers had returned when the round closed, so the job is done.
        return end(view, round, now, Outcome.SUCCEEDED, "every worker finished")
    if _is_disturbed(roll):  # not all workers have passed on what they were to pass on
        round = replace(round, planned=False)
    fatal = roll.first.get(Mark.FATAL)
    if fatal is not None and fatal.exit.fatal is not None:
        ended = replace(round, failure=fatal)
        return end(view, ended, now, _OUTCOMES[fatal.exit.fatal], _last_line(fatal.exit.message))
    budget, newest = view.budget, roll.newest_age
    goes_on_from = newest.step if newest is not None else None
    reasons: tuple[Reason, ...] = ()
    round, failure = _blame(round, roll)
    if failure is not None:
        round, budget, reasons, over = _charge(view, spec, round, failure, goes_on_from, now)
        if over is not None:
            return end(view, round, now, *over, reasons)
    elif budgets.progressed(round, view.reports.values(), commits=spec.inplace):
        budget = budgets.note_progress(budget)
    if round.closing is Cause.WORLD_BROKEN and goes_on_from is not None:
        budget = budgets.note_broken_world(budget, goes_on_from, now)
        if (why := budgets.why_broken_too_often(budget, spec.policy, now)) is not None:
            return end(view, replace(round, failure=None), now, Outcome.FAILED, why)
    if spec.stop:
        return end(view, round, now, Outcome.STOPPED, "stopped by its operator", reasons)
    return form_or_wait(view, spec, round, budget, reasons, now)


def _blame(round: Round, roll: Roll) -> tuple[Round, Failure | None]:
    """Return the round with its true cause of closing, and the failure to charge; None if there is no failure
    to charge."""
    failure = roll.first.get(Mark.FAILED)
    broken = round.closing is Cause.WORLD_BROKEN
    charged = round.closing is not None and round.closing.charged
    if any(roll.needed(Mark.MISSING)) or roll[Mark.FENCED]:
        # The workers that failed first are those that talked to the lost node. They are not to blame.
        return (replace(round, closing=Cause.NODE_LOST) if charged or broken else round), None
    if broken and failure is not None:  # a worker failed, and took long to end
        return replace(round, closing=Cause.WORKER_FAILED), failure
    if round.closing in (Cause.GREW, Cause.SCALED):
        own = roll.first.get(Mark.RAISED)
        if own is not None:  # a newcomer that always fails at once would otherwise resize the job for ever
            return replace(round, closing=Cause.WORKER_FAILED), own
    return round, failure if charged else None


class _Charged(NamedTuple):
    """A round with a charged failure. ``over``: the outcome and why, if the job ends now."""

    round: Round
    budget: Budget
    reasons: tuple[Reason, ...]
    over: tuple[Outcome, str] | None = None


def _charge(
    view: View, spec: Spec, round: Round, failure: Failure, goes_on_from: int | None, now: float
) -> _Charged:
    """Charge the budget with the failure. ``goes_on_from``: the newest step that workers hold in memory; None
    if they hold none."""
    assert view.reports is not None
    roll, budget, reports = view.roll, view.budget, view.reports.values()
    progressed = budgets.progressed(round, reports, commits=spec.inplace)
    failed = roll.reports_of(Mark.FAILED)
    unrunnable = None if progressed else budgets.why_unrunnable(budget, round, failure, failed)
    if budgets.any_step_seen(budget, round, reports, commits=spec.inplace):
        budget = replace(budget, stepped=True)
    else:
        progressed = progressed or not budgets.may_repeat(failure, round.failure)
    budget = budgets.charge(budget, failure, progressed, spec.policy, now, goes_on_from)
    round = replace(round, restarts=round.restarts + 1, failure=failure)
    budget, reasons = _judge_slot(view, spec, budget, failure, now)
    step = budgets.nonfinite_step(roll.reports_of(Mark.ASTRAY))
    if step is not None:
        budget = budgets.note_rollback(budget, step)
        if (why := budgets.why_no_rollback(budget)) is not None:
            return _Charged(round, budget, reasons, (Outcome.DIVERGED, why))
    why = unrunnable or budgets.why_exhausted(budget, spec.policy, commits=spec.inplace)
    return _Charged(round, budget, reasons, (Outcome.FAILED, why) if why is not None else None)


def _await_members(view: View, spec: Spec, round: Round, now: float) -> Plan | None:
    """Return the plan to wait until every member has released the round and reported, or is lost; None when
    there is nothing to wait for."""
    roll = view.roll
    if roll[Mark.HOLDING]:
        trained = round.handover or roll[Mark.FINISHED] or roll[Mark.RETURNED]
        # Who is outliving has left.
        some_never_came = not trained and len(roll[Mark.LEFT]) > len(roll[Mark.OUTLIVING])
        if round.planned and (_is_disturbed(roll) or (spec.inplace and some_never_came)):
            # Workers that still save, or have yet to join or to leave, may wait for lost workers, or for
            # workers that have declined the round.
            return write(view, replace(round, planned=False), view.budget)
        waits = AwaitingRelease(*roll.some(Mark.HOLDING))
        if not round.outlived and roll[Mark.OUTLIVING]:
            by = round.since + spec.policy.part_s
            if now >= by:
                return write(view, replace(round, outlived=True), view.budget)
            return Plan(wake_at=by, reasons=(waits,))
        return Plan(reasons=(waits,))
    if (wait := await_reports(view, now)) is not None:
        return wait
    gone = roll[view.mark_of_lost(now)]
    if any(member.node not in gone for member in roll.needed(Mark.MISSING)):
        names, until = in_rank_order(roll.needed(Mark.MISSING)), view.absence_counts_from
        absent = AwaitingReturn(names[:SHOWN_MAX], until, len(names[SHOWN_MAX:]))
        return Plan(wake_at=until, reasons=(absent,))
    return None


def _is_disturbed(roll: Roll) -> bool:
    """Whether workers of the round were lost or failed, so that its end is not as it was planned."""
    disturbances = Mark.BROKEN, Mark.FAILED, Mark.FENCED
    return any(roll[mark] for mark in disturbances) or any(roll.needed(Mark.MISSING))


def _last_line(message: str) -> str:
    """Return the last line of a traceback, without the exception's name."""
    line = next((line for line in reversed(message.splitlines()) if line.strip()), "a worker ended the job")
    return re.sub(r"^(\S+: )+", "", line.strip())


def _judge_slot(
    view: View, spec: Spec, budget: Budget, failure: Failure, now: float
) -> tuple[Budget, tuple[Reason, ...]]:
    """Return the budget and reasons for a charge. A slot that fails alone is put in quarantine if enough
    others remain."""
    policy = spec.policy
    charged = FailureCharged(failure, len(budget.charges), policy.restarts_max)
    place = budgets.failing_slot(budget, policy)
    if place is None:
        return budget, (charged,)
    without = budgets.quarantine(budget, place, policy, now)
    if view.next_world(without, now) < spec.limits.min:
        return budget, (charged,)
    return without, (charged, SlotQuarantined(*place, without.quarantines[-1].until))
