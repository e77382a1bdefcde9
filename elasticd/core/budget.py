"""The restart budget: the price of a failed round, and when a job must end.

The rule has an intensity and a period, as in Erlang's supervisors: at most ``restarts_max`` charged failures
within ``restart_window_s``. Only a failure of the user's code is charged, once per round.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter

from elasticd.core.facts import (
    BrokenWorldCount,
    Budget,
    Cause,
    Charge,
    Failure,
    Laggard,
    Policy,
    Quarantine,
    Report,
    RollbackCount,
    Round,
)

_IMPORT_ERROR = re.compile(r"(?:ModuleNotFoundError|ImportError|SyntaxError|IndentationError|TabError)\b")
BAD_USAGE = 2  # the exit code of a program that refuses its arguments, as argparse has it
PROGRESS_AFTER_S = 60.0  # a round that lived this long made progress, even if no step was seen
ASTRAY_MAX = 3  # rollbacks from one step; the next try may succeed, after a flipped bit or with other data


def earliest(failures: Iterable[Failure | None]) -> Failure | None:
    """Return the earliest of the failures; later ones are usually its consequences."""
    return min(filter(None, failures), key=attrgetter("exit.at", "exit.rank", "node"), default=None)


def nonfinite_step(reports: Iterable[Report]) -> int | None:
    """Return the step at which a loss or gradient was not finite, if a worker ended to go back to a
    checkpoint."""
    return max((report.astray for report in reports if report.astray is not None), default=None)


def progressed(round: Round, reports: Iterable[Report], *, commits: bool = False) -> bool:
    """Whether the round made progress: a worker made a step, or the round lived long. ``commits``: the
    workers commit their steps, so only a step counts."""
    stepped = any(r.steps > 0 for r in reports if r.round == round.number)
    return stepped or (not commits and round.lived_s >= PROGRESS_AFTER_S)


def any_step_seen(budget: Budget, round: Round, reports: Iterable[Report], *, commits: bool = False) -> bool:
    """Whether any step of the job was seen, so that steps tell its progress. ``commits``: see
    ``progressed``."""
    return commits or budget.stepped or any(r.steps > 0 for r in reports if r.round == round.number)


def may_repeat(failure: Failure, before: Failure | None) -> bool:
    """Whether the failure may repeat in every round: it is an error exit, and equal to the failure before."""
    exit = failure.exit
    return exit.code > 0 and (
        before is None or (before.exit.code, before.exit.message) == (exit.code, exit.message)
    )


def why_unrunnable(budget: Budget, round: Round, failure: Failure, reports: Iterable[Report]) -> str | None:
    """Return why a restart cannot help. On every node of the job's first round, the script refused its input,
    or failed to import with the same error as in ``failure``. None otherwise. ``reports``: of the members
    that report a failure."""
    if budget.total or round.cause is not Cause.START:
        return None
    error, refused = failure.exit.message, failure.exit.code == BAD_USAGE
    if not refused and not _IMPORT_ERROR.match(error):
        return None
    nodes = set()
    for report in reports:
        failed = [exit for exit in report.exits if exit.failed]
        if any(exit.code != BAD_USAGE if refused else exit.message != error for exit in failed):
            return None
        if failed:
            nodes.add(report.node)
    if nodes != round.by_node.keys():
        return None
    if refused:
        return f"the script refuses its input: it ended with exit code {BAD_USAGE}"
    return f"the script cannot be run: {error.splitlines()[0]}"


def charge(
    budget: Budget, failure: Failure, progressed: bool, policy: Policy, now: float, step: int | None = None
) -> Budget:
    """Return the budget after one more failure, without charges older than ``restart_window_s``.

    ``step``: see ``Charge``. If ``step`` is larger than the last charge's step, rounds that ended as planned
    made progress in between.
    """
    last = budget.charges[-1].step if budget.charges else None
    progressed = progressed or (step is not None and last is not None and step > last)
    recent = tuple(c for c in budget.charges if c.at > now - policy.restart_window_s)
    new = Charge(now, failure.node, failure.exit.slot, progressed, step)
    return replace(budget, charges=(*recent, new), total=budget.total + 1)


def note_progress(budget: Budget) -> Budget:
    """Return the budget after a round that made progress and ended without a failure."""
    if not budget.charges or budget.charges[-1].progressed:
        return budget
    last = replace(budget.charges[-1], progressed=True)
    return replace(budget, charges=(*budget.charges[:-1], last))


def note_rollback(budget: Budget, step: int) -> Budget:
    """Return the budget after a loss or gradient was not finite at this step of the job."""
    before = budget.astray
    if before is None or step > before.step:
        return replace(budget, astray=RollbackCount(step, 1))
    return replace(budget, astray=replace(before, times=before.times + 1))


def why_no_rollback(budget: Budget) -> str | None:
    """Return why going back does not help any more, in a sentence; None while it may help."""
    astray = budget.astray
    if astray is None or astray.times < ASTRAY_MAX:
        return None
    return (
        f"{astray.times} times the training came to a value that is NaN or infinite, and never beyond step "
        f"{astray.step}: going back to the last checkpoint does not help (--on-nonfinite=rollback)"
    )


def note_broken_world(budget: Budget, step: int, now: float) -> Budget:
    """Return the budget after the workers lost each other and continue from this step: nothing is charged."""
    before = budget.apart
    if before is None or step > before.step:
        return replace(budget, apart=BrokenWorldCount(step, 1, now))
    return replace(budget, apart=replace(before, times=before.times + 1))


def why_broken_too_often(budget: Budget, policy: Policy, now: float) -> str | None:
    """Return why workers that lose each other should not try again, in a sentence; else None.

    The job waits for the join timeout, since a network may be away for that long. A script that makes one
    worker wait in vain would otherwise repeat for ever.
    """
    apart = budget.apart
    if apart is None or not 0 < policy.futile_max <= apart.times:
        return None
    if now < apart.since + policy.join_timeout_s:
        return None
    return (
        f"{apart.times} times in a row within {now - apart.since:.0f} s the workers lost each other, and "
        f"never got beyond step {apart.step}; their errors are in the events named worker.broken"
    )


def why_exhausted(budget: Budget, policy: Policy, *, commits: bool = False) -> str | None:
    """Return why the job must end now, in a sentence; None while it may go on. ``commits``: see
    ``progressed``."""
    spent = len(budget.charges)
    futile = 0
    for c in reversed(budget.charges):
        if c.progressed:
            break
        futile += 1
    if spent > policy.restarts_max:
        if policy.restarts_max == 0:
            return "a worker failed, and no restarts are allowed"
        allowed = "1 is" if policy.restarts_max == 1 else f"{policy.restarts_max} are"
        return (
            f"the restart budget is spent: {spent} failures within "
            f"{policy.restart_window_s:g} s, where {allowed} allowed"
        )
    if futile >= policy.futile_max > 0:
        what = "committed step" if commits else "step of progress"
        return f"{futile} failures in a row without a single {what}"
    return None


def restarts_left(budget: Budget, policy: Policy, now: float) -> int:
    """Return the number of failures that the job still survives."""
    recent = sum(c.at > now - policy.restart_window_s for c in budget.charges)
    return max(0, policy.restarts_max - recent)


def failing_slot(budget: Budget, policy: Policy) -> tuple[str, int] | None:
    """Return the slot that alone caused the last ``quarantine_after`` failures; None if several did."""
    last = budget.charges[-policy.quarantine_after :]
    if len(last) < policy.quarantine_after or policy.quarantine_after < 1:
        return None
    places = {(c.node, c.slot) for c in last}
    return places.pop() if len(places) == 1 else None


def quarantine(
    budget: Budget,
    place: tuple[str, int],
    policy: Policy,
    now: float,
    *,
    at_least_s: float = 0.0,
    faults: tuple[Laggard, ...] = (),
) -> Budget:
    """Return the budget with the slot in quarantine, for these faults. Each quarantine is longer than the one
    before; one is forgotten ``restart_window_s`` after its end."""
    known = {(q.node, q.slot): q for q in budget.quarantines if q.until + policy.restart_window_s > now}
    before = known.pop(place, None)
    times = before.times + 1 if before else 1
    doublings = min(times - 1, 64)  # limited, so that 2.0**doublings does not overflow
    length_s = max(at_least_s, min(policy.quarantine_s * 2.0**doublings, policy.quarantine_max_s))
    added = Quarantine(*place, now + length_s, times, faults)
    return replace(budget, quarantines=(*known.values(), added))
