"""The leader of a job: from what etcd shows, the next thing to write.

Level-triggered: each event updates the view, then ``decide`` looks at the whole of it. So a new
leader needs nothing but the view, and failover is not a special case. Every plan is one guarded
transaction; the driver adds the guard that this agent still leads.

    waiting --enough workers--> live --broken, drained, resized--> closing --all released--+
       ^                         |                                                         |
       |                         +--all finished--> ended <--budget spent, stopped---------+
       +--too few workers------------------------------------------------------------------+
                                            (else the next round is live at once)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elasticd.core import budget as budgets
from elasticd.core import handover, world
from elasticd.core.facts import (
    Budget,
    Cause,
    Drained,
    Failure,
    Member,
    Node,
    Outcome,
    Phase,
    Report,
    Resume,
    Round,
    Spec,
    Stragglers,
)
from elasticd.core.page import Fatal
from elasticd.core.ports import (
    Changes,
    Delete,
    Entry,
    Guard,
    Listing,
    Put,
    Seen,
    Unchanged,
    Write,
)
from elasticd.core.reasons import (
    AwaitingHeirs,
    AwaitingRelease,
    AwaitingReturn,
    BelowMinimum,
    CoolingDown,
    FailureCharged,
    JobEnded,
    Reason,
    RoundClosing,
    RoundFormed,
    Settling,
    SlotDrained,
    SlotQuarantined,
)


@dataclass(frozen=True, slots=True)
class Registered:
    """A node as the leader sees it. ``created``: revision of its registration; ``seen_at``: when
    this leader first saw this incarnation, in seconds since the epoch."""

    node: Node
    created: int
    seen_at: float


@dataclass(frozen=True, slots=True)
class View:
    """All the leader knows. A revision is None until its key has been listed, 0 if it is absent.

    ``absence_counts_from``: before this time a node that is not registered may only be late, since
    etcd was away and leases ran out that nobody could renew.
    """

    spec: Spec | None = None
    spec_revision: int | None = None
    round: Round | None = None
    round_revision: int | None = None
    budget: Budget = field(default_factory=Budget)
    budget_revision: int | None = None
    nodes: Mapping[str, Registered] | None = None
    reports: Mapping[str, Report] | None = None
    absence_counts_from: float = 0.0
    stragglers: Stragglers | None = None

    @property
    def complete(self) -> bool:
        return (
            self.spec is not None
            and self.round_revision is not None
            and self.budget_revision is not None
            and self.nodes is not None
            and self.reports is not None
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What to write, or until when to wait; ``reasons`` say why either way."""

    guards: tuple[Guard, ...] = ()
    writes: tuple[Write, ...] = ()
    wake_at: float | None = None
    reasons: tuple[Reason, ...] = ()


# ---------------------------------------------------------------- seeing


def see(view: View, seen: Seen, scope: str, now: float) -> View:
    """The view after news of ``scope``: a key, or a prefix that ends in a slash."""
    if isinstance(seen, Listing):
        listed = {e.key for e in seen.entries}
        gone = [Entry(key, None, 0, 0) for key in _known(view, scope) if key not in listed]
        return _mark_listed(_apply(view, (*gone, *seen.entries), now), scope)
    if isinstance(seen, Changes):
        return _apply(view, seen.entries, now)
    raise AssertionError(f"not news of the store: {seen!r}")


def _known(view: View, scope: str) -> list[str]:
    match scope:
        case "spec" | "round" | "budget" | "stragglers":
            return [scope]
        case "nodes/":
            return [f"nodes/{name}" for name in view.nodes or ()]
        case "reports/":
            return [f"reports/{name}" for name in view.reports or ()]
    raise AssertionError(f"the leader does not watch {scope!r}")


def _mark_listed(view: View, scope: str) -> View:
    if scope == "nodes/" and view.nodes is None:
        return replace(view, nodes={})
    if scope == "reports/" and view.reports is None:
        return replace(view, reports={})
    return view


def _apply(view: View, entries: tuple[Entry, ...], now: float) -> View:
    nodes = dict(view.nodes) if view.nodes is not None else None
    reports = dict(view.reports) if view.reports is not None else None
    for e in entries:
        revision = e.revision if e.fact is not None else 0
        kind, _, name = e.key.partition("/")
        match kind, e.fact:
            case "spec", (Spec() | None) as fact:
                view = replace(view, spec=fact, spec_revision=revision)
            case "round", (Round() | None) as fact:
                view = replace(view, round=fact, round_revision=revision)
            case "budget", (Budget() | None) as fact:
                view = replace(view, budget=fact or Budget(), budget_revision=revision)
            case "stragglers", (Stragglers() | None) as fact:
                view = replace(view, stragglers=fact)
            case "nodes", Node() as node:
                nodes = {} if nodes is None else nodes
                old = nodes.get(name)
                same = old is not None and old.node.incarnation == node.incarnation
                nodes[name] = Registered(node, e.created, old.seen_at if same and old else now)
            case "nodes", None:
                if nodes is not None:
                    nodes.pop(name, None)
            case "reports", Report() as report:
                reports = {} if reports is None else reports
                reports[name] = report
            case "reports", None:
                if reports is not None:
                    reports.pop(name, None)
            case _:
                pass  # a key of no interest to the leader
    return replace(view, nodes=nodes, reports=reports)


_OUTCOMES = {Fatal.NOT_FINITE: Outcome.DIVERGED, Fatal.NO_CHECKPOINT: Outcome.NOWHERE}

# ---------------------------------------------------------------- deciding


def decide(view: View, now: float) -> Plan:
    """The next step of the job. Pure: the same view at the same time gives the same plan."""
    if not view.complete:
        return Plan()
    assert view.spec is not None
    round = view.round
    if round is None or round.phase is Phase.ENDED:
        return _open(view, now)
    match round.phase:
        case Phase.WAITING:
            return _form_or_wait(view, view.spec, round, view.budget, (), now)
        case Phase.LIVE:
            return _supervise(view, view.spec, round, now)
        case Phase.CLOSING:
            return _settle(view, view.spec, round, now)


def _open(view: View, now: float) -> Plan:
    """A job that has never run here, or one that runs again after it ended."""
    number = 0 if view.round is None else view.round.number
    waiting = Round(number, Phase.WAITING, (), "", Cause.START, now)
    plan = _write(view, waiting, Budget())
    assert view.spec_revision is not None
    assert view.spec is not None
    forgotten = (Delete("checkpoint"),) if view.spec.policy.resume is Resume.NEVER else ()
    return replace(
        plan,
        # A job ends by one transaction that also deletes its spec, but the two are watched apart:
        # without this guard the old spec and the end of its job would look like a new job.
        guards=(*plan.guards, Unchanged("spec", view.spec_revision)),
        writes=(*plan.writes, Delete("reports/", prefix=True), Delete("ledger/", prefix=True), *forgotten),
    )


def _supervise(view: View, spec: Spec, round: Round, now: float) -> Plan:
    """Something to end the live round for?"""
    assert view.nodes is not None
    assert view.reports is not None
    reports = {
        name: r
        for name, r in view.reports.items()
        if r.round == round.number and round.member(name, r.incarnation)
    }
    finished = {name for name, r in reports.items() if r.finished}
    returned = any(r.returned for r in reports.values())
    if all(m.node in finished for m in round.members):
        return _end(view, round, now, Outcome.SUCCEEDED, "every worker finished")
    if spec.stop:
        return _close(view, round, Cause.STOPPED, True, now)

    failure = budgets.first_failure(round, reports.values())
    if failure is not None:
        cause = Cause.WORKER_HUNG if failure.exit.hung else Cause.WORKER_FAILED
        return _close(view, round, cause, False, now, failure=failure)

    missing = [m.node for m in round.members if m.node not in finished and not _present(view, m)]
    lost = tuple(node for node in missing if _surely_gone(view, node, now))
    idle = [
        m.node
        for m in round.members
        if m.node not in finished and _present(view, m) and _released(view, m, round.number)
    ]
    if round.handover:
        return _see_handed_over(view, round, idle, lost, now)
    if idle or lost:
        return _close(view, round, Cause.NODE_LOST, False, now, nodes=(*idle, *lost))

    leaving = [m.node for m in round.members if _present(view, m) and _leaving(view, spec, m)]
    if leaving:
        wait = None if returned else _await_heirs(view, spec, round, tuple(leaving), now)
        return wait or _close(view, round, Cause.NODE_DRAINED, True, now, nodes=tuple(leaving))

    if missing:
        until = view.absence_counts_from
        return Plan(wake_at=until, reasons=(AwaitingReturn(tuple(missing), until),))
    if finished or returned:
        return Plan()  # the last steps of the job: no time to resize
    if not spec.limits.min <= round.world_size <= spec.limits.max:
        return _close(view, round, Cause.SCALED, True, now)
    return _drain_laggard(view, spec, round, now) or _grow_or_rest(view, spec, round, now)


def _drain_laggard(view: View, spec: Spec, round: Round, now: float) -> Plan | None:
    """Leave out the slot that lags behind most, where people want that and enough others remain."""
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
            _candidates(view, spec, round, live=True), round, spec.limits, without.quarantines, now
        )
        if world.size(rest) < spec.limits.min:
            continue
        plan = _close(view, round, Cause.SLOT_DRAINED, True, now, nodes=(laggard.node,))
        assert view.budget_revision is not None
        drained = SlotDrained(*place, without.quarantines[-1].until)
        return replace(
            plan,
            guards=(*plan.guards, Unchanged("budget", view.budget_revision)),
            writes=(*plan.writes, Put("budget", without)),
            reasons=(drained, *plan.reasons),
        )
    return None


def _await_heirs(view: View, spec: Spec, round: Round, leaving: tuple[str, ...], now: float) -> Plan | None:
    """Where nobody would stay who holds the state, train on until others are ready to take it; but not
    for so long that there is no time left for that."""
    assert view.nodes is not None
    stay = [m for m in round.members if m.node not in leaving and _present(view, m)]
    nodes = [registered.node for registered in view.nodes.values()]
    if not spec.inplace or stay or not handover.may_come(round, nodes):
        return None
    heirs = world.form(_candidates(view, spec, round), round, spec.limits, view.budget.quarantines, now)
    if world.size(heirs) >= spec.limits.min:
        if round.leaving == leaving:
            return None
    elif round.leaving == leaving:
        until = round.leave_by - spec.policy.shutdown_s / 2
        return Plan(wake_at=until, reasons=(AwaitingHeirs(leaving, until),)) if now < until else None
    leave_by = round.leave_by or now + spec.policy.shutdown_s
    return _write(view, replace(round, leaving=leaving, leave_by=leave_by), view.budget)


def _see_handed_over(
    view: View, round: Round, idle: Sequence[str], lost: tuple[str, ...], now: float
) -> Plan:
    """Its workers leave by themselves."""
    if lost:
        return _close(view, round, Cause.NODE_LOST, False, now, nodes=lost)
    holding = tuple(m.node for m in round.members if m.node not in idle)
    if holding:
        return Plan(reasons=(AwaitingRelease(holding),))
    return _close(view, round, Cause.NODE_DRAINED, True, now)


def _grow_or_rest(view: View, spec: Spec, round: Round, now: float) -> Plan:
    """Is a larger world possible, and has this one lived long enough?"""
    could_have = world.size(
        world.form(
            _candidates(view, spec, round, live=True), round, spec.limits, view.budget.quarantines, now
        )
    )
    if could_have > round.world_size:
        # In place, growing costs the time of a step, and whoever joins is ready.
        ripe = round.since + (0.0 if spec.inplace else spec.policy.grow_cooldown_s)
        if now >= ripe:
            plan = _close(view, round, Cause.GREW, True, now)
            # Keys are watched apart: a slot just quarantined is no room to grow into.
            assert view.budget_revision is not None
            return replace(plan, guards=(*plan.guards, Unchanged("budget", view.budget_revision)))
        return Plan(wake_at=ripe, reasons=(CoolingDown(round.world_size, could_have, ripe),))
    released = [q.until for q in view.budget.quarantines if q.until > now]
    return Plan(wake_at=min(released, default=None))


def _settle(view: View, spec: Spec, round: Round, now: float) -> Plan:
    """Once every member has released the closing round or is lost: what did it cost, what next?"""
    assert view.nodes is not None
    assert view.reports is not None
    missing = tuple(m.node for m in round.members if not _present(view, m))
    fenced = tuple(m.node for m in round.members if _present(view, m) and _fenced(view, m, round.number))
    holding = tuple(
        m.node for m in round.members if _present(view, m) and not _released(view, m, round.number)
    )
    if holding:
        if round.planned and (missing or budgets.first_failure(round, view.reports.values())):
            # Whoever still saves, or has yet to leave, may be waiting for those that are lost.
            return _write(view, replace(round, planned=False), view.budget)
        return Plan(reasons=(AwaitingRelease(holding),))
    if not all(_surely_gone(view, node, now) for node in missing):
        until = view.absence_counts_from
        return Plan(wake_at=until, reasons=(AwaitingReturn(missing, until),))

    if all(_finished(view, m, round.number) for m in round.members):
        # Their run functions had all returned when the round was closed: the job is done.
        return _end(view, round, now, Outcome.SUCCEEDED, "every worker finished")
    budget = view.budget
    reasons: tuple[Reason, ...] = ()
    failure = budgets.first_failure(round, view.reports.values())
    fatal = budgets.first_failure(round, view.reports.values(), fatal=True)
    if fatal is not None and fatal.exit.fatal is not None:
        ended = replace(round, failure=fatal)
        return _end(view, ended, now, _OUTCOMES[fatal.exit.fatal], _last_line(fatal.exit.message))
    charged = round.closing is not None and round.closing.charged
    if (missing or fenced) and charged:
        # The workers that failed first are those that talked to the lost node: not their fault.
        round, charged = replace(round, closing=Cause.NODE_LOST), False
    if charged and failure is not None:
        progressed = budgets.progressed(round, view.reports.values(), round.lived_s)
        budget = budgets.charge(budget, failure, progressed, spec.policy, now)
        round = replace(round, restarts=round.restarts + 1, failure=failure)
        budget, reasons = _judge_slot(view, spec, round, budget, failure, now)
        why = budgets.exhausted(budget, spec.policy)
        if why is not None:
            return _end(view, round, now, Outcome.FAILED, why, reasons)
    if spec.stop:
        return _end(view, round, now, Outcome.STOPPED, "stopped by its operator", reasons)
    return _form_or_wait(view, spec, round, budget, reasons, now)


def _last_line(message: str) -> str:
    """What a traceback ends with, without the name of the exception."""
    line = next((line for line in reversed(message.splitlines()) if line.strip()), "a worker wanted it so")
    return re.sub(r"^(\S+: )+", "", line.strip())


def _judge_slot(
    view: View, spec: Spec, round: Round, budget: Budget, failure: Failure, now: float
) -> tuple[Budget, tuple[Reason, ...]]:
    """Charge said aloud; and a slot that fails alone is kept out while enough others remain."""
    policy = spec.policy
    charged = FailureCharged(failure, len(budget.charges), policy.restarts_max)
    place = budgets.suspect(budget, policy)
    if place is None:
        return budget, (charged,)
    without = budgets.quarantine(budget, place, policy, now)
    rest = world.form(_candidates(view, spec, round), round, spec.limits, without.quarantines, now)
    if world.size(rest) < spec.limits.min:
        return budget, (charged,)
    return without, (charged, SlotQuarantined(*place, without.quarantines[-1].until))


def _form_or_wait(
    view: View, spec: Spec, round: Round, budget: Budget, reasons: tuple[Reason, ...], now: float
) -> Plan:
    """The next round if there are enough workers, else a job that waits for them."""
    assert view.nodes is not None
    if spec.stop:
        return _end(view, round, now, Outcome.STOPPED, "stopped by its operator", reasons)
    candidates = _candidates(view, spec, round)
    members = world.form(candidates, round, spec.limits, budget.quarantines, now)
    have, waiting = world.size(members), round.phase is Phase.WAITING

    if have < spec.limits.min:
        if not waiting:
            cause = round.closing or round.cause
            return _write(
                view,
                replace(
                    round,
                    phase=Phase.WAITING,
                    cause=cause,
                    since=now,
                    closing=None,
                    planned=False,
                    handover=False,
                ),
                budget,
                reasons,
            )
        until = round.since + spec.policy.join_timeout_s
        if now >= until:
            why = (
                f"only {have} of the {spec.limits.min} workers needed came within "
                f"{spec.policy.join_timeout_s:g} s"
            )
            return _end(view, round, now, Outcome.SHORT, why, reasons)
        ends = [q.until for q in budget.quarantines if q.until > now]
        return Plan(
            wake_at=min([until, *ends]), reasons=(*reasons, BelowMinimum(have, spec.limits.min, until))
        )

    if waiting and have < spec.limits.max:
        # More may be on their way. A round that closes has no such wait: whoever it was made of
        # has answered already.
        last = max(view.nodes[n.name].seen_at for n in candidates)
        until = max(last, round.since) + spec.policy.settle_s
        if now < until:
            return Plan(wake_at=until, reasons=(*reasons, Settling(have, spec.limits.max, until)))

    nodes = {name: registered.node for name, registered in view.nodes.items()}
    passing = handover.members(round, nodes, members) if spec.inplace else ()
    members = passing or members
    host = nodes[members[0].node]
    cause = round.cause if waiting else (round.closing or round.cause)
    formed = Round(
        number=round.number + 1,
        phase=Phase.LIVE,
        members=members,
        store=f"{host.address}:{host.store_port}",
        cause=cause,
        since=now,
        restarts=round.restarts,
        failure=round.failure,
        leaving=round.leaving if passing else (),
        leave_by=round.leave_by if passing else 0.0,
        handover=bool(passing),
    )
    said = RoundFormed(formed.number, formed.world_size, len(members), cause)
    plan = _write(view, formed, budget, (*reasons, said))
    assert view.spec_revision is not None
    # Within the limits that are in force, not those of a moment ago.
    plan = replace(plan, guards=(*plan.guards, Unchanged("spec", view.spec_revision)))
    return _forget_drained(view, spec, plan)


def _forget_drained(view: View, spec: Spec, plan: Plan) -> Plan:
    """Drains that were carried out leave the spec, so that it does not grow for ever."""
    assert view.nodes is not None
    pending = tuple(
        d for d in spec.drain if d.node in view.nodes and view.nodes[d.node].node.incarnation == d.incarnation
    )
    if pending == spec.drain:
        return plan
    return replace(plan, writes=(*plan.writes, Put("spec", replace(spec, drain=pending))))


# ---------------------------------------------------------------- what a member is up to


def _present(view: View, member: Member) -> bool:
    assert view.nodes is not None
    known = view.nodes.get(member.node)
    return known is not None and known.node.incarnation == member.incarnation


def _surely_gone(view: View, node: str, now: float) -> bool:
    """Whether an absent member has been replaced, or can no longer be merely late."""
    assert view.nodes is not None
    return node in view.nodes or now >= view.absence_counts_from


def _released(view: View, member: Member, number: int) -> bool:
    assert view.nodes is not None
    return view.nodes[member.node].node.released >= number


def _fenced(view: View, member: Member, number: int) -> bool:
    assert view.nodes is not None
    return view.nodes[member.node].node.fenced >= number


def _finished(view: View, member: Member, number: int) -> bool:
    assert view.reports is not None
    report = view.reports.get(member.node)
    return (
        report is not None
        and report.finished
        and (report.incarnation, report.round) == (member.incarnation, number)
    )


def _leaving(view: View, spec: Spec, member: Member) -> bool:
    assert view.nodes is not None
    return view.nodes[member.node].node.draining or Drained(member.node, member.incarnation) in spec.drain


def _candidates(view: View, spec: Spec, round: Round, *, live: bool = False) -> list[Node]:
    """Nodes that may be in the next round, in order of arrival; while ``round`` is live its own
    members count although they have not released it."""
    assert view.nodes is not None
    known = sorted(view.nodes.values(), key=lambda r: (r.created, r.node.name))
    return [
        _offering(r.node, spec, round, live)
        for r in known
        if Drained(r.node.name, r.node.incarnation) not in spec.drain
        and (
            world.available(r.node, round)
            or (live and not r.node.draining and round.member(r.node.name, r.node.incarnation))
        )
    ]


def _offering(node: Node, spec: Spec, round: Round, live: bool) -> Node:
    """The node with the slots it has to offer: where workers keep their process, those in the live
    round and those with a worker that waits."""
    if not spec.inplace:
        return node
    member = round.member(node.name, node.incarnation) if live else None
    there = set(node.ready) | set(member.slots if member else ())
    return replace(node, slots=tuple(slot for slot in node.slots if slot in there))


# ---------------------------------------------------------------- writing


def _write(view: View, round: Round, budget: Budget, reasons: tuple[Reason, ...] = ()) -> Plan:
    """One transaction: the round, and the budget if it changed."""
    assert view.round_revision is not None
    assert view.budget_revision is not None
    guards: list[Guard] = [Unchanged("round", view.round_revision)]
    writes: list[Write] = [Put("round", round)]
    if budget != view.budget:
        guards.append(Unchanged("budget", view.budget_revision))
        writes.append(Put("budget", budget))
    return Plan(tuple(guards), tuple(writes), reasons=reasons)


def _close(
    view: View,
    round: Round,
    cause: Cause,
    planned: bool,
    now: float,
    *,
    nodes: tuple[str, ...] = (),
    failure: Failure | None = None,
) -> Plan:
    closing = replace(
        round, phase=Phase.CLOSING, closing=cause, planned=planned, since=now, lived_s=now - round.since
    )
    return _write(view, closing, view.budget, (RoundClosing(round.number, cause, nodes, failure),))


def _end(
    view: View,
    round: Round,
    now: float,
    outcome: Outcome,
    why: str,
    reasons: tuple[Reason, ...] = (),
) -> Plan:
    """The job is over. Only the round stays, as its epitaph; the budget goes with the rest."""
    ended = replace(round, phase=Phase.ENDED, since=now, outcome=outcome, why=why)
    assert view.round_revision is not None
    return Plan(
        guards=(Unchanged("round", view.round_revision),),
        writes=(
            Put("round", ended),
            Delete("spec"),
            Delete("budget"),
            Delete("reports/", prefix=True),
        ),
        reasons=(*reasons, JobEnded(outcome, why)),
    )
