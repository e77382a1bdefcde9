"""The restart budget: what a broken round costs, and when a job has had enough.

Intensity and period, as in Erlang's supervisors: at most ``restarts_max`` charged failures within
``restart_window_s``. Only a failure of the user's code is charged, once per broken round.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from elasticd.core.facts import (
    Apart,
    Astray,
    Budget,
    Cause,
    Charge,
    Failure,
    Policy,
    Quarantine,
    Report,
    Round,
)

_IMPORT_ERROR = re.compile(r"(?:ModuleNotFoundError|ImportError|SyntaxError|IndentationError|TabError)\b")
PROGRESS_AFTER_S = 60.0  # a round that lived this long counts as progress even without a step seen
ASTRAY_MAX = 3  # to go back is worth a try: it may have been a bit that flipped, or data that is dealt anew


def first_failure(
    round: Round, reports: Iterable[Report], *, fatal: bool = False, raised: bool = False
) -> Failure | None:
    """The failure that broke the round: the earliest, as the others are usually its echoes. ``fatal``: of
    those only that the job is to end with; ``raised``: of those that were nobody else's doing for sure."""
    failures = [
        f
        for f in _exits(round, reports)
        if f.exit.failed and (f.exit.fatal is not None or not fatal) and (f.exit.raised or not raised)
    ]
    return min(failures, key=lambda f: (f.exit.at, f.exit.rank), default=None)


def astray_at(round: Round, reports: Iterable[Report]) -> int | None:
    """The step at which the round's workers came to what is NaN or infinite, if some ended to go back."""
    return max((f.exit.astray for f in _exits(round, reports) if f.exit.astray is not None), default=None)


def _exits(round: Round, reports: Iterable[Report]) -> list[Failure]:
    """Of the round's workers, however they ended."""
    return [
        Failure(report.node, exit)
        for report in reports
        if report.round == round.number and round.member(report.node, report.incarnation)
        for exit in report.exits
    ]


def progressed(round: Round, reports: Iterable[Report], lived_s: float, *, commits: bool = False) -> bool:
    """Whether the round was of any use: some worker took a step, or it lived long. ``commits``: its workers
    commit what they do, so that nothing else counts, for however long they tried."""
    stepped = any(r.steps > 0 for r in reports if r.round == round.number)
    return stepped or (not commits and lived_s >= PROGRESS_AFTER_S)


def visible(budget: Budget, round: Round, reports: Iterable[Report], *, commits: bool = False) -> bool:
    """Whether the job's steps can be seen: some have been. ``commits``: as above."""
    return commits or budget.stepped or any(r.steps > 0 for r in reports if r.round == round.number)


def alike(failure: Failure, before: Failure | None) -> bool:
    """Whether the failure may come each time anew: it is an error, and the one there was before."""
    exit = failure.exit
    return exit.code > 0 and (
        before is None or (before.exit.code, before.exit.message) == (exit.code, exit.message)
    )


def unrunnable(budget: Budget, round: Round, reports: Iterable[Report]) -> str | None:
    """Why another try makes no sense, though it is the first failure: wherever the script was started, it
    could not be imported. None if that is not so, or cannot be told."""
    if budget.total or round.cause is not Cause.START:
        return None
    failures = [failure for failure in _exits(round, reports) if failure.exit.failed]
    errors = {failure.exit.message for failure in failures}
    everywhere = {failure.node for failure in failures} == {member.node for member in round.members}
    if not everywhere or len(errors) != 1 or not _IMPORT_ERROR.match(error := errors.pop()):
        return None
    return f"the script cannot be run: {error.splitlines()[0]}"


def charge(
    budget: Budget, failure: Failure, progressed: bool, policy: Policy, now: float, step: int | None = None
) -> Budget:
    """The budget after one more failure; charges that left the window are forgotten. ``step``: see
    ``Charge``; if it is beyond the last one's, rounds in between that ended in good order were of use."""
    last = budget.charges[-1].step if budget.charges else None
    progressed = progressed or (step is not None and last is not None and step > last)
    recent = tuple(c for c in budget.charges if c.at > now - policy.restart_window_s)
    new = Charge(now, failure.node, failure.exit.slot, progressed, step)
    return replace(budget, charges=(*recent, new), total=budget.total + 1)


def get_on(budget: Budget) -> Budget:
    """The budget after a round that was of use and ended without a failure: the job has made progress."""
    if not budget.charges or budget.charges[-1].progressed:
        return budget
    last = replace(budget.charges[-1], progressed=True)
    return replace(budget, charges=(*budget.charges[:-1], last))


def go_back(budget: Budget, step: int) -> Budget:
    """The budget after the training has come to what is NaN or infinite at this step of the job."""
    before = budget.astray
    if before is None or step > before.step:
        return replace(budget, astray=Astray(step, 1))
    return replace(budget, astray=replace(before, times=before.times + 1))


def lost(budget: Budget) -> str | None:
    """Why going back does not help any more, in a sentence; None while it may."""
    astray = budget.astray
    if astray is None or astray.times < ASTRAY_MAX:
        return None
    return (
        f"{astray.times} times the training came to a value that is NaN or infinite, and never beyond step "
        f"{astray.step}: going back to the last checkpoint does not help (--on-nonfinite=rollback)"
    )


def come_apart(budget: Budget, step: int, now: float) -> Budget:
    """The budget after workers have lost each other, who go on from this step of the job: no charge."""
    before = budget.apart
    if before is None or step > before.step:
        return replace(budget, apart=Apart(step, 1, now))
    return replace(budget, apart=replace(before, times=before.times + 1))


def hopeless(budget: Budget, policy: Policy, now: float) -> str | None:
    """Why workers that lose each other need not try again, in a sentence; None while they may: a network may
    be away for as long as nodes may be, but a script may have one of them wait in vain every time."""
    apart = budget.apart
    if apart is None or not 0 < policy.futile_max <= apart.times:
        return None
    if now < apart.since + policy.join_timeout_s:
        return None
    return (
        f"{apart.times} times in a row within {now - apart.since:.0f} s the workers lost each other, and "
        f"never got beyond step {apart.step}; what they ran into is in the events named worker.broken"
    )


def exhausted(budget: Budget, policy: Policy, *, commits: bool = False) -> str | None:
    """Why the job must end now, in a sentence, or None while it may go on. ``commits``: as above."""
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


def left(budget: Budget, policy: Policy, now: float) -> int:
    """How many more failures the job survives."""
    recent = sum(c.at > now - policy.restart_window_s for c in budget.charges)
    return max(0, policy.restarts_max - recent)


def suspect(budget: Budget, policy: Policy) -> tuple[str, int] | None:
    """The slot that failed alone, ``quarantine_after`` times in a row, if there is one."""
    last = budget.charges[-policy.quarantine_after :]
    if len(last) < policy.quarantine_after or policy.quarantine_after < 1:
        return None
    places = {(c.node, c.slot) for c in last}
    return places.pop() if len(places) == 1 else None


def quarantine(
    budget: Budget, place: tuple[str, int], policy: Policy, now: float, *, at_least_s: float = 0.0
) -> Budget:
    """The budget with the slot kept out: longer each time, forgotten a window after its end."""
    known = {(q.node, q.slot): q for q in budget.quarantines if q.until + policy.restart_window_s > now}
    before = known.pop(place, None)
    times = before.times + 1 if before else 1
    doublings = min(times - 1, 64)  # more of them than any float needs, and fewer than overflow one
    length_s = max(at_least_s, min(policy.quarantine_s * 2.0**doublings, policy.quarantine_max_s))
    return replace(budget, quarantines=(*known.values(), Quarantine(*place, now + length_s, times)))
