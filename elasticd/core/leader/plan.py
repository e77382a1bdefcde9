"""The leader's plan: one guarded transaction, or a time to wake up."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticd.core.facts import Budget, Cause, Failure, Outcome, Phase, Round
from elasticd.core.leader.view import View
from elasticd.core.ports import Delete, Guard, Put, Write
from elasticd.core.reasons import JobEnded, Reason, RoundClosing


@dataclass(frozen=True, slots=True)
class Plan:
    """The writes, or the time until which to wait. ``reasons`` explain the plan. ``waiting``: why the job
    waits, in a plan that names hung workers or stragglers."""

    guards: tuple[Guard, ...] = ()
    writes: tuple[Write, ...] = ()
    wake_at: float | None = None
    reasons: tuple[Reason, ...] = ()
    waiting: tuple[Reason, ...] = ()


def write(view: View, round: Round, budget: Budget, reasons: tuple[Reason, ...] = ()) -> Plan:
    """Return a transaction that writes the round, and the budget if it changed."""
    guards: list[Guard] = [view.unchanged("round")]
    writes: list[Write] = [Put("round", round)]
    if budget != view.budget:
        guards.append(view.unchanged("budget"))
        writes.append(Put("budget", budget))
    return Plan(tuple(guards), tuple(writes), reasons=reasons)


def close(
    view: View,
    round: Round,
    cause: Cause,
    planned: bool,
    now: float,
    *,
    nodes: tuple[str, ...] = (),
    failure: Failure | None = None,
    anew: bool = False,
) -> Plan:
    closing = replace(
        round,
        phase=Phase.CLOSING,
        closing=cause,
        planned=planned,
        since=now,
        lived_s=now - round.since,
        resizes_by=0.0,
        anew=anew,
    )
    return write(view, closing, view.budget, (RoundClosing(round.number, cause, nodes, failure),))


def end(
    view: View,
    round: Round,
    now: float,
    outcome: Outcome,
    why: str,
    reasons: tuple[Reason, ...] = (),
) -> Plan:
    """Return the end of the job. Only the round's record stays, to tell the outcome."""
    ended = replace(round, phase=Phase.ENDED, since=now, outcome=outcome, why=why)
    return Plan(
        guards=(view.unchanged("round"),),
        writes=(
            Put("round", ended),
            Delete("spec"),
            Delete("budget"),
            Delete("reports/", prefix=True),
        ),
        reasons=(*reasons, JobEnded(outcome, why)),
    )
