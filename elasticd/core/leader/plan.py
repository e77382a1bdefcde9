"""The leader's plan: one guarded transaction, or a time to wake up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from elasticd.core import round_parts, seating
from elasticd.core.facts import Budget, Cause, Failure, Outcome, Phase, RankRange, Round
from elasticd.core.leader.roll import Mark
from elasticd.core.leader.view import NOT_JUDGED, NOT_SEATED, Judged, Seated, View
from elasticd.core.ports import Delete, Guard, Put, Write
from elasticd.core.reasons import AwaitingRelease, JobEnded, Reason, RoundClosing

REPORT_S: Final = 5.0  # a report comes within milliseconds, unless etcd is slow


@dataclass(frozen=True, slots=True)
class Plan:
    """The writes, or the time until which to wait. ``ahead``: writes without effect by themselves, for which
    the transaction has no room; each is a transaction before it, under the same guards. ``reasons`` explain
    the plan. ``waiting``: why the job waits, in a plan that names hung workers or stragglers. ``judged``
    and ``seated``: what the next decision need not find out again."""

    guards: tuple[Guard, ...] = ()
    writes: tuple[Write, ...] = ()
    ahead: tuple[tuple[Write, ...], ...] = ()
    wake_at: float | None = None
    reasons: tuple[Reason, ...] = ()
    waiting: tuple[Reason, ...] = ()
    judged: Judged = NOT_JUDGED
    seated: Seated = NOT_SEATED

    @property
    def may_be_joined(self) -> bool:
        """Whether the writes may be in one transaction with others. etcd refuses a transaction that deletes
        what it writes."""
        return not self.ahead and not any(isinstance(w, Delete) and w.prefix for w in self.writes)


def write(view: View, round: Round, budget: Budget, reasons: tuple[Reason, ...] = ()) -> Plan:
    """Return a transaction that writes the round, and the budget if it changed."""
    guards: list[Guard] = [view.unchanged("round")]
    record = round_parts.record_of(round, view.part_sizes)
    *ahead, last = _in_batches(_unwritten_parts(view, round, record), view.part_sizes.at_once)
    writes: list[Write] = [*last, Put("round", record)]
    if budget != view.budget:
        guards.append(view.unchanged("budget"))
        writes.append(Put("budget", budget))
    before = view.round
    if before is not None and before.number != record.number and round_parts.has_parts(before):
        writes.append(Delete(round_parts.folder_of(before.number), prefix=True))
    return Plan(tuple(guards), tuple(writes), tuple(ahead), reasons=reasons)


def _unwritten_parts(view: View, round: Round, record: Round) -> tuple[Put, ...]:
    """Return the parts, unless etcd has them: a round is written at each change of its phase."""
    before, extent = view.round, record.extent
    if before is not None and before.extent is not None and extent is not None:
        there = before.number, before.extent.digest, before.extent.parts
        if there == (record.number, extent.digest, extent.parts):
            return ()
    return round_parts.parts_of(round, record)


def _in_batches(parts: tuple[Put, ...], most: int) -> list[tuple[Put, ...]]:
    """Return the parts in batches, and at least one batch."""
    return [parts[i : i + most] for i in range(0, len(parts), most)] or [()]


def await_reports(view: View, now: float) -> Plan | None:
    """Return the plan to wait for the reports of nodes that have released the round; None if all are here. A
    release and its report are watched separately, so the leader may see the release first."""
    roll, nodes = view.roll, view.nodes
    assert nodes is not None
    due = (nodes[name].news_at + REPORT_S for name in roll[Mark.TO_REPORT])
    until = next((at for at in due if now < at), None)
    if until is None:
        return None
    return Plan(wake_at=until, reasons=(AwaitingRelease(*roll.some(Mark.TO_REPORT)),))


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
    budget: Budget | None = None,
) -> Plan:
    """Return the transaction that closes the round. ``budget``: of the next round, if other than the present
    one; the transaction writes it, too."""
    budget = budget or view.budget
    closing = replace(
        round,
        phase=Phase.CLOSING,
        closing=cause,
        planned=planned,
        since=now,
        lived_s=now - round.since,
        resizes_by=0.0,
        anew=anew,
        left_out=_left_out(view, round, budget, now) if planned else (),
    )
    return write(view, closing, budget, (RoundClosing(round.number, cause, nodes, failure),))


def _left_out(view: View, round: Round, budget: Budget, now: float) -> tuple[RankRange, ...]:
    """Return the ranks whose workers keep their process and are not in the next round."""
    spec = view.spec
    if round.handover:
        return round.left_out
    if spec is None or not spec.inplace or spec.stop:
        return ()
    return seating.left_out(view.roll.candidates(live=True), round, spec.limits, budget.quarantines, now)


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
            Put("round", round_parts.without_parts(ended, view.part_sizes)),
            Delete("spec"),
            Delete("budget"),
            Delete("reports/", prefix=True),
            Delete(round_parts.FOLDER, prefix=True),
        ),
        reasons=(*reasons, JobEnded(outcome, why)),
    )
