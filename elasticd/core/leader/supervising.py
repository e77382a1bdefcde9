"""Supervise a live round: is there a reason to end it?"""

from __future__ import annotations

import math
from dataclasses import replace

from elasticd.core import budget as budgets
from elasticd.core import handover, seating
from elasticd.core.facts import Cause, Outcome, Round, Spec
from elasticd.core.leader.plan import Plan, await_reports, close, end, write
from elasticd.core.leader.roll import Mark, in_rank_order
from elasticd.core.leader.view import View
from elasticd.core.reasons import (
    AwaitingCheckpoint,
    AwaitingHeirs,
    AwaitingRelease,
    AwaitingReturn,
    CoolingDown,
    SlotDrained,
)


def supervise(view: View, spec: Spec, round: Round, now: float) -> Plan:
    """Return the plan for a live round: end or close it if there is a reason, else wait."""
    roll = view.roll
    finished, returned = roll[Mark.FINISHED], bool(roll[Mark.RETURNED])
    if len(finished) == len(round.members):
        return end(view, round, now, Outcome.SUCCEEDED, "every worker finished")
    if spec.stop:
        return close(view, round, Cause.STOPPED, True, now)

    failure = roll.first.get(Mark.FAILED)
    if failure is not None:
        anew = bool(roll[Mark.ASTRAY])
        return close(view, round, failure.exit.cause, False, now, failure=failure, anew=anew)

    lost = roll.names(view.mark_of_lost(now), but=Mark.FINISHED)
    if round.handover:
        absent = dict.fromkeys((*lost, *roll.names(Mark.DECLINED), *roll.names(Mark.FENCED)))
        return _see_handed_over(view, round, tuple(absent), now)
    if lost or roll.count(Mark.LEFT, but=Mark.FINISHED):
        wait = None if lost else await_reports(view, now)
        idle = roll.names(Mark.LEFT, but=Mark.FINISHED)
        return wait or close(view, round, Cause.NODE_LOST, False, now, nodes=(*idle, *lost))
    if roll[Mark.BROKEN]:
        return close(view, round, Cause.WORLD_BROKEN, False, now, nodes=tuple(sorted(roll[Mark.BROKEN])))

    leaving = in_rank_order(roll.needed(Mark.LEAVING))
    if leaving:
        wait = None if returned else _await_heirs(view, spec, round, leaving, now)
        plan = wait or close(view, round, Cause.NODE_DRAINED, True, now, nodes=leaving)
        half_s = spec.policy.shutdown_s / 2
        return plan if finished else _at_a_checkpoint(view, spec, round, plan, now, half_s)

    missing, more = roll.some(Mark.MISSING, but=Mark.FINISHED)
    if missing:
        until = view.absence_counts_from
        return Plan(wake_at=until, reasons=(AwaitingReturn(missing, until, more),))
    if finished or returned:
        return Plan()  # the last steps of the job: too late to resize
    if not spec.limits.allows(round.world_size):
        plan = close(view, round, Cause.SCALED, True, now)
    else:
        plan = _drain_laggard(view, spec, round, now) or _grow_or_rest(view, spec, round, now)
    if plan.writes:
        return _at_a_checkpoint(view, spec, round, plan, now)
    if round.resizes_by:  # a resize is no longer needed
        return write(view, replace(round, resizes_by=0.0), view.budget, plan.reasons)
    return plan


def _at_a_checkpoint(
    view: View,
    spec: Spec,
    round: Round,
    plan: Plan,
    now: float,
    most_s: float = math.inf,
) -> Plan:
    """Return ``plan``, which closes the round, as soon as the script has written its next checkpoint. Wait
    until then, at most ``most_s``."""
    wait_s = min(spec.policy.checkpoint_wait_s, most_s)
    if not spec.checkpointed or spec.inplace or wait_s <= 0 or view.roll[Mark.CHECKPOINTED]:
        return plan
    if not round.resizes_by or now + wait_s < round.resizes_by:
        by = now + wait_s
        return write(view, replace(round, resizes_by=by), view.budget)
    if now >= round.resizes_by:
        return plan
    return Plan(wake_at=round.resizes_by, reasons=(AwaitingCheckpoint(round.resizes_by),))


def _drain_laggard(view: View, spec: Spec, round: Round, now: float) -> Plan | None:
    """Leave out the worst straggler's slot, if the policy says so and enough other slots remain."""
    found = view.stragglers
    if not spec.policy.straggler_drain or found is None or found.round != round.number:
        return None
    slow = [one for one in found.slow if not one.strained]  # a strain that matters also makes its slot slow
    for laggard in sorted(slow, key=lambda one: (not one.why, -one.ratio)):
        place = (laggard.node, laggard.slot)
        member = round.by_node.get(laggard.node)
        if member is None or laggard.slot not in member.slots:
            continue
        length_s = max(spec.policy.quarantine_max_s, spec.policy.quarantine_s)
        faults = tuple(one for one in found.slow if (one.node, one.slot) == place)
        without = budgets.quarantine(view.budget, place, spec.policy, now, at_least_s=length_s, faults=faults)
        if view.next_world(without, now) < spec.limits.min:
            continue
        plan = close(view, round, Cause.SLOT_DRAINED, True, now, nodes=(laggard.node,), budget=without)
        drained = SlotDrained(*place, without.quarantines[-1].until, faults)
        return replace(plan, reasons=(drained, *plan.reasons))
    return None


def _await_heirs(view: View, spec: Spec, round: Round, leaving: tuple[str, ...], now: float) -> Plan | None:
    """If no node that holds the state would stay, train on until others are ready to take the state over.

    The wait ends early enough to leave time for the handover.
    """
    assert view.nodes is not None
    going = {*leaving, *view.roll[Mark.MISSING]}
    if not spec.inplace or any(m.node not in going for m in round.members):
        return None
    if not handover.may_come(round, (registered.node for registered in view.nodes.values())):
        return None
    heirs = seating.form(view.roll.candidates(), round, spec.limits, view.budget.quarantines, now)
    if heirs.workers >= spec.limits.min:
        if round.leaving == leaving:
            return None
    elif round.leaving == leaving:
        until = round.leave_by - spec.policy.shutdown_s / 2
        return Plan(wake_at=until, reasons=(AwaitingHeirs(leaving, until),)) if now < until else None
    leave_by = round.leave_by or now + spec.policy.shutdown_s
    return write(view, replace(round, leaving=leaving, leave_by=leave_by), view.budget)


def _see_handed_over(view: View, round: Round, lost: tuple[str, ...], now: float) -> Plan:
    """Wait until the workers of a handover round have left by themselves. They wait for all members, so the
    round closes at once without those that are lost, take no part, or were killed by their fence."""
    if lost:
        return close(view, round, Cause.NODE_LOST, False, now, nodes=lost)
    if view.roll.count(Mark.LEFT, but=Mark.FINISHED) < len(round.members):
        return Plan(reasons=(AwaitingRelease(*view.roll.some(Mark.HOLDING)),))
    cause = Cause.SCALED if round.cause is Cause.SCALED else Cause.NODE_DRAINED
    return close(view, round, cause, True, now)


def _grow_or_rest(view: View, spec: Spec, round: Round, now: float) -> Plan:
    """Close the round if a larger world is possible and this one has lived long enough."""
    could_have = view.roll.world_without(view.budget.quarantines, now)
    if could_have > round.world_size:
        could_have = view.next_world(view.budget, now)
    if could_have > round.world_size:
        cooldown_s = spec.policy.grow_cooldown_s
        if spec.inplace:
            # Growing costs about one step, and new workers are ready. But a worker that does not leave in
            # time is killed, and its replacement is a reason to grow again: the job could grow for ever
            # without a step. So it trains for as long as it took to grow.
            cooldown_s = min(cooldown_s, round.took_s) if round.cause is Cause.GREW else 0.0
        ripe = round.since + cooldown_s
        if now >= ripe:
            plan = close(view, round, Cause.GREW, True, now)
            # Keys are watched separately: the guard ensures that a slot just put in quarantine does not count
            # as room.
            return replace(plan, guards=(*plan.guards, view.unchanged("budget")))
        return Plan(wake_at=ripe, reasons=(CoolingDown(round.world_size, could_have, ripe),))
    released = [q.until for q in view.budget.quarantines if q.until > now]
    return Plan(wake_at=min(released, default=None))
