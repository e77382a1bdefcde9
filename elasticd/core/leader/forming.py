"""Between two rounds: form the next round if there are enough workers, else wait for them."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Final, NamedTuple

from elasticd.core import handover, seating, shortage
from elasticd.core.facts import Budget, Members, Outcome, Phase, RankRange, Round, Spec
from elasticd.core.leader.plan import Plan, end, write
from elasticd.core.leader.roll import Mark
from elasticd.core.leader.view import Seated, View
from elasticd.core.ports import Put
from elasticd.core.reasons import BelowMemory, BelowMinimum, Reason, RoundFormed, Settling
from elasticd.core.shortage import Shortage

SEATED_AT_ONCE: Final = 2000  # members that one decision both finds and writes; both take 10 ms


def form_or_wait(
    view: View, spec: Spec, round: Round, budget: Budget, reasons: tuple[Reason, ...], now: float
) -> Plan:
    """Return the next round if there are enough workers, else the wait for more."""
    assert view.nodes is not None
    if spec.stop:
        return end(view, round, now, Outcome.STOPPED, "stopped by its operator", reasons)
    have = view.roll.world_without(budget.quarantines, now)
    if have < spec.limits.min:
        there = seating.workers_at_hand(view.roll.candidates(), round, spec.limits, budget.quarantines, now)
        return _wait(view, round, budget, reasons, _too_few(spec, round, there), now)
    if round.phase is Phase.WAITING and have < spec.limits.max:
        # More workers may be on their way. After a closing round there is no such wait: its members have
        # already answered.
        until = max(view.roll.came_at, round.since) + spec.policy.settle_s
        if now < until:
            return Plan(wake_at=until, reasons=(*reasons, Settling(have, spec.limits.max, until)))
    facts = view.spec, view.round, view.budget, view.nodes, view.reports
    if view.seated.hold(facts):
        return _write_round(view, spec, round, budget, reasons, view.seated.members, now)
    nodes, limits = view.roll.candidates(), spec.limits
    members = seating.form(nodes, round, limits, budget.quarantines, now, view.roll.newest_holders)
    if members.workers < limits.min:
        most = seating.form_in_any_memory(nodes, round, limits, budget.quarantines, now)
        if (lacking := shortage.find(nodes, most, limits)) is not None:
            return _wait(view, round, budget, reasons, _too_small(spec, round, lacking), now)
    if len(members) > SEATED_AT_ONCE:
        return Plan(wake_at=now, seated=Seated(facts, members))
    return _write_round(view, spec, round, budget, reasons, members, now)


def _write_round(
    view: View,
    spec: Spec,
    round: Round,
    budget: Budget,
    reasons: tuple[Reason, ...],
    members: Members,
    now: float,
) -> Plan:
    """Return the transaction that writes the round of these members, or first a handover round."""
    formed = _formed(view, spec, round, members, now)
    said = RoundFormed(formed.number, formed.world_size, len(formed.members), formed.cause)
    plan = write(view, formed, budget, (*reasons, said))
    # The round must respect the limits in force, so the spec must not have changed.
    plan = replace(plan, guards=(*plan.guards, view.unchanged("spec")))
    return _forget_drained(view, spec, plan)


class _Shortfall(NamedTuple):
    """Why a job between two rounds waits, and why it ends if nothing changes."""

    reason: BelowMinimum | BelowMemory
    ends: str


def _too_few(spec: Spec, round: Round, have: int) -> _Shortfall:
    least, unit, patience_s = spec.limits.least, spec.limits.unit, spec.policy.join_timeout_s
    why = f"only {have} of the {least} workers needed came within {patience_s:g} s"
    if have >= least:
        why = f"{have} workers came within {patience_s:g} s, but they make too few units of {unit}"
    return _Shortfall(BelowMinimum(have, least, round.since + patience_s, unit), why)


def _too_small(spec: Spec, round: Round, lacking: Shortage) -> _Shortfall:
    patience_s = spec.policy.join_timeout_s
    why = f"the workers that came within {patience_s:g} s have too little memory for the sharded state"
    if lacking.need:
        why += f": {lacking.need} such workers are needed, and {lacking.have} came"
    return _Shortfall(BelowMemory(*lacking, spec.limits.max, round.since + patience_s), why)


def _wait(
    view: View,
    round: Round,
    budget: Budget,
    reasons: tuple[Reason, ...],
    wait: _Shortfall,
    now: float,
) -> Plan:
    """Wait for more workers, until the join timeout."""
    if round.phase is not Phase.WAITING:
        waiting = replace(
            round,
            phase=Phase.WAITING,
            cause=round.next_cause,
            since=now,
            closing=None,
            planned=False,
            handover=False,
            left_out=(),
            anew=False,
        )
        return write(view, waiting, budget, reasons)
    until = wait.reason.until
    if now >= until:
        return end(view, round, now, Outcome.SHORT, wait.ends, reasons)
    ends = [q.until for q in budget.quarantines if q.until > now]
    return Plan(wake_at=min([until, *ends]), reasons=(*reasons, wait.reason))


def _formed(view: View, spec: Spec, round: Round, members: Members, now: float) -> Round:
    """Return the round of these members, or first a handover round that passes the state to them."""
    assert view.nodes is not None
    passing = Members()
    giving: tuple[RankRange, ...] = ()
    if spec.inplace:
        nodes = dict(zip(view.nodes, map(attrgetter("node"), view.nodes.values()), strict=True))
        parted = view.roll[Mark.PARTED]
        passing = handover.members(round, nodes, members, view.roll.newest_age, parted, spec.limits.unit)
    if passing:
        giving, members = seating.ranks_without(passing, members), passing
    host = view.nodes[members[0].node].node
    cause = round.next_cause
    return Round(
        number=round.number + 1,
        phase=Phase.LIVE,
        members=members,
        store=f"{host.address}:{host.store_port}",
        cause=cause,
        since=now,
        took_s=now - round.since if round.phase is Phase.CLOSING else 0.0,
        restarts=round.restarts,
        failure=round.failure,
        leaving=round.leaving if passing else (),
        leave_by=round.leave_by if passing else 0.0,
        handover=bool(passing),
        left_out=giving,
        began=round.began or now,
        failures=round.failures + cause.failure,
        extent=round.extent if members is round.members else None,
    )


def _forget_drained(view: View, spec: Spec, plan: Plan) -> Plan:
    """Remove completed drains from the spec, so that the spec does not grow for ever."""
    assert view.nodes is not None
    pending = tuple(
        d for d in spec.drain if d.node in view.nodes and view.nodes[d.node].node.incarnation == d.incarnation
    )
    if pending == spec.drain:
        return plan
    return replace(plan, writes=(*plan.writes, Put("spec", replace(spec, drain=pending))))
