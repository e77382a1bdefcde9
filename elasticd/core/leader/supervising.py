"""Supervise a live round: is there a reason to end it?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from elasticd.core import budget as budgets
from elasticd.core import handover, world
from elasticd.core.facts import Cause, Outcome, Report, Round, Spec
from elasticd.core.leader.members import candidates_for, has_left, is_certainly_lost, is_leaving, is_present
from elasticd.core.leader.plan import Plan, close, end, write
from elasticd.core.leader.view import View
from elasticd.core.ports import Put
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
    assert view.nodes is not None
    assert view.reports is not None
    lives = {m.node: m.incarnation for m in round.members}
    reports = {
        name: r
        for name, r in view.reports.items()
        if r.round == round.number and r.incarnation == lives.get(name)
    }
    finished = {name for name, r in reports.items() if r.finished}
    returned = any(r.returned for r in reports.values())
    if all(m.node in finished for m in round.members):
        return end(view, round, now, Outcome.SUCCEEDED, "every worker finished")
    if spec.stop:
        return close(view, round, Cause.STOPPED, True, now)

    failure = budgets.first_failure(round, reports.values())
    if failure is not None:
        anew = budgets.nonfinite_step(round, reports.values()) is not None
        return close(view, round, failure.exit.cause, False, now, failure=failure, anew=anew)

    missing = [m.node for m in round.members if m.node not in finished and not is_present(view, m)]
    lost = tuple(node for node in missing if is_certainly_lost(view, node, now))
    idle = [m.node for m in round.members if m.node not in finished and has_left(view, m, round.number)]
    if round.handover:
        return _see_handed_over(view, round, idle, lost, now)
    if idle or lost:
        return close(view, round, Cause.NODE_LOST, False, now, nodes=(*idle, *lost))
    broken = tuple(sorted(name for name, r in reports.items() if r.broken))
    if broken:
        return close(view, round, Cause.WORLD_BROKEN, False, now, nodes=broken)

    # A node whose workers have finished may leave, unless others may still need its store.
    needed = [m for m in round.members if m.node not in finished or m is round.members[0]]
    leaving = [m.node for m in needed if is_present(view, m) and is_leaving(view, spec, m)]
    if leaving:
        wait = None if returned else _await_heirs(view, spec, round, tuple(leaving), now)
        plan = wait or close(view, round, Cause.NODE_DRAINED, True, now, nodes=tuple(leaving))
        half_s = spec.policy.shutdown_s / 2
        return plan if finished else _at_a_checkpoint(view, spec, round, reports.values(), plan, now, half_s)

    if missing:
        until = view.absence_counts_from
        return Plan(wake_at=until, reasons=(AwaitingReturn(tuple(missing), until),))
    if finished or returned:
        return Plan()  # the last steps of the job: too late to resize
    if not spec.limits.min <= round.world_size <= spec.limits.max:
        plan = close(view, round, Cause.SCALED, True, now)
    else:
        plan = _drain_laggard(view, spec, round, now) or _grow_or_rest(view, spec, round, now)
    if plan.writes:
        return _at_a_checkpoint(view, spec, round, reports.values(), plan, now)
    if round.resizes_by:  # a resize is no longer needed
        return write(view, replace(round, resizes_by=0.0), view.budget, plan.reasons)
    return plan


def _at_a_checkpoint(
    view: View,
    spec: Spec,
    round: Round,
    reports: Iterable[Report],
    plan: Plan,
    now: float,
    most_s: float = math.inf,
) -> Plan:
    """Return ``plan``, which closes the round, as soon as the script has written its next checkpoint. Wait
    until then, at most ``most_s``."""
    wait_s = min(spec.policy.checkpoint_wait_s, most_s)
    if not spec.checkpointed or spec.inplace or wait_s <= 0 or any(r.checkpointed for r in reports):
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
    members = {(m.node, slot) for m in round.members for slot in m.slots}
    for laggard in sorted(found.slow, key=lambda one: (not one.why, -one.ratio)):
        place = (laggard.node, laggard.slot)
        if place not in members:
            continue
        length_s = max(spec.policy.quarantine_max_s, spec.policy.quarantine_s)
        without = budgets.quarantine(view.budget, place, spec.policy, now, at_least_s=length_s)
        rest = world.form(
            candidates_for(view, spec, round, live=True), round, spec.limits, without.quarantines, now
        )
        if world.size(rest) < spec.limits.min:
            continue
        plan = close(view, round, Cause.SLOT_DRAINED, True, now, nodes=(laggard.node,))
        drained = SlotDrained(*place, without.quarantines[-1].until)
        return replace(
            plan,
            guards=(*plan.guards, view.unchanged("budget")),
            writes=(*plan.writes, Put("budget", without)),
            reasons=(drained, *plan.reasons),
        )
    return None


def _await_heirs(view: View, spec: Spec, round: Round, leaving: tuple[str, ...], now: float) -> Plan | None:
    """If no node that holds the state would stay, train on until others are ready to take the state over.

    The wait ends early enough to leave time for the handover.
    """
    assert view.nodes is not None
    stay = [m for m in round.members if m.node not in leaving and is_present(view, m)]
    nodes = [registered.node for registered in view.nodes.values()]
    if not spec.inplace or stay or not handover.may_come(round, nodes):
        return None
    heirs = world.form(candidates_for(view, spec, round), round, spec.limits, view.budget.quarantines, now)
    if world.size(heirs) >= spec.limits.min:
        if round.leaving == leaving:
            return None
    elif round.leaving == leaving:
        until = round.leave_by - spec.policy.shutdown_s / 2
        return Plan(wake_at=until, reasons=(AwaitingHeirs(leaving, until),)) if now < until else None
    leave_by = round.leave_by or now + spec.policy.shutdown_s
    return write(view, replace(round, leaving=leaving, leave_by=leave_by), view.budget)


def _see_handed_over(
    view: View, round: Round, idle: Sequence[str], lost: tuple[str, ...], now: float
) -> Plan:
    """Wait until the workers of a handover round have left by themselves."""
    if lost:
        return close(view, round, Cause.NODE_LOST, False, now, nodes=lost)
    holding = tuple(m.node for m in round.members if m.node not in idle)
    if holding:
        return Plan(reasons=(AwaitingRelease(holding),))
    return close(view, round, Cause.NODE_DRAINED, True, now)


def _grow_or_rest(view: View, spec: Spec, round: Round, now: float) -> Plan:
    """Close the round if a larger world is possible and this one has lived long enough."""
    could_have = world.size(
        world.form(
            candidates_for(view, spec, round, live=True), round, spec.limits, view.budget.quarantines, now
        )
    )
    if could_have > round.world_size:
        # In place, growing costs about one step, and new workers are ready.
        ripe = round.since + (0.0 if spec.inplace else spec.policy.grow_cooldown_s)
        if now >= ripe:
            plan = close(view, round, Cause.GREW, True, now)
            # Keys are watched separately: the guard ensures that a slot just put in quarantine does not count
            # as room.
            return replace(plan, guards=(*plan.guards, view.unchanged("budget")))
        return Plan(wake_at=ripe, reasons=(CoolingDown(round.world_size, could_have, ripe),))
    released = [q.until for q in view.budget.quarantines if q.until > now]
    return Plan(wake_at=min(released, default=None))
