"""The restart budget: what a failure costs, when the budget is spent, and which slot is to blame."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.core import budget
from elasticd.core.facts import Budget, Charge, Failure, Policy, Quarantine
from tests.core.build import NOW, charges, exit, report, round

POLICY = Policy(restarts_max=3, restart_window_s=100.0, futile_max=4, quarantine_after=3)
LIVE = round(7, {"a": 2, "b": 2})


def failure(name: str = "a", slot: int = 0) -> Failure:
    return Failure(name, exit(slot))


# ---------------------------------------------------------------- whose failure counts


def test_the_first_failure_by_the_clock_is_the_cause_wherever_it_was() -> None:
    early, late = exit(1, 3, at=NOW - 9), exit(0, 0, at=NOW - 8)
    found = budget.earliest([report("a", 7, late).failure, None, report("b", 7, early).failure])
    assert found == Failure("b", early)


def test_of_failures_at_the_same_moment_the_lowest_rank_is_named() -> None:
    one, two = exit(1, 1, at=NOW), exit(0, 0, at=NOW)
    assert report("a", 7, one, two).failure == Failure("a", two)
    assert budget.earliest([Failure("a", one), Failure("b", two)]) == Failure("b", two)


def test_a_success_is_no_failure() -> None:
    assert report("a", 7, exit(code=0), finished=True).failure is None
    assert budget.earliest([]) is None


@pytest.mark.parametrize(
    ("steps", "lived_s", "useful"), [(0, 1.0, False), (1, 1.0, True), (0, budget.PROGRESS_AFTER_S, True)]
)
def test_a_round_was_of_use_if_a_step_was_made_or_it_lived_long(
    steps: int, lived_s: float, useful: bool
) -> None:
    assert budget.progressed(replace(LIVE, lived_s=lived_s), [report("a", 7, steps=steps)]) is useful


def test_of_workers_that_commit_only_what_they_have_committed_counts_as_progress() -> None:
    long = replace(LIVE, lived_s=10 * budget.PROGRESS_AFTER_S)
    assert not budget.progressed(long, [report("a", 7)], commits=True)
    assert budget.progressed(LIVE, [report("a", 7, steps=1)], commits=True)


def test_steps_of_another_round_are_no_progress() -> None:
    assert not budget.progressed(LIVE, [report("a", 6, steps=100)])


# ---------------------------------------------------------------- what a failure costs


def test_a_charge_is_counted_and_old_ones_leave_the_window() -> None:
    old = Budget((Charge(NOW - 100, "a", 0, True), Charge(NOW - 99, "b", 1, True)), total=2)
    new = budget.charge(old, failure("c", 2), True, POLICY, NOW)
    assert new.charges == (Charge(NOW - 99, "b", 1, True), Charge(NOW, "c", 2, True))
    assert new.total == 3


@pytest.mark.parametrize(
    ("steps", "lost"),
    [
        ((50, 50), False),
        ((50, 50, 50), True),
        ((50, 48, 49), True),
        ((50, 50, 51, 50), False),  # each a little further than the last
        ((50, 50, 51, 50, 51), True),
    ],
)
def test_going_back_helps_as_long_as_it_leads_further(steps: tuple[int, ...], lost: bool) -> None:
    been = Budget()
    for at, step in enumerate(steps):  # each a day after the last
        been = budget.charge(
            budget.note_rollback(been, step), failure("a", 0), True, POLICY, NOW + 86400 * at
        )
    assert (budget.why_no_rollback(been) is not None) == lost


def test_the_budget_bears_as_many_failures_as_allowed_and_not_one_more() -> None:
    spent = Budget()
    for i in range(3):
        spent = budget.charge(spent, failure(), True, POLICY, NOW + i)
        assert budget.why_exhausted(spent, POLICY) is None
        assert budget.restarts_left(spent, POLICY, NOW + i) == 2 - i
    spent = budget.charge(spent, failure(), True, POLICY, NOW + 3)
    why = budget.why_exhausted(spent, POLICY)
    assert why is not None and "4 failures within 100 s, where 3 are allowed" in why


def test_a_budget_of_one_is_told_as_one() -> None:
    policy = replace(POLICY, restarts_max=1)
    spent = Budget()
    for i in range(2):
        spent = budget.charge(spent, failure(), True, policy, NOW + i)
    assert "2 failures within 100 s, where 1 is allowed" in str(budget.why_exhausted(spent, policy))


def test_the_budget_refills_as_charges_leave_the_window() -> None:
    spent = charges(*[("a", 0)] * 3, at=NOW, progressed=True)
    assert budget.restarts_left(spent, POLICY, NOW + 99) == 0
    assert budget.restarts_left(spent, POLICY, NOW + 100) == 3


def test_no_restarts_allowed_means_the_first_failure_ends_the_job() -> None:
    strict = replace(POLICY, restarts_max=0)
    assert budget.why_exhausted(Budget(), strict) is None
    why = budget.why_exhausted(budget.charge(Budget(), failure(), True, strict, NOW), strict)
    assert why == "a worker failed, and no restarts are allowed"


def test_failures_without_progress_end_the_job_before_the_budget_does() -> None:
    patient = replace(POLICY, restarts_max=100)
    assert budget.why_exhausted(charges(*[("a", 0)] * 3), patient) is None
    why = budget.why_exhausted(charges(*[("a", 0)] * 4), patient)
    assert why is not None and "4 failures in a row without a single step" in why


def test_progress_in_between_forgives_what_was_futile() -> None:
    patient = replace(POLICY, restarts_max=100)
    futile, useful = Charge(NOW, "a", 0, False), Charge(NOW, "a", 0, True)
    assert (
        budget.why_exhausted(Budget((futile, futile, futile, useful, futile, futile, futile)), patient)
        is None
    )


@pytest.mark.parametrize(
    ("steps", "futile"), [((5, 5, 5, 5), True), ((5, 5, 6, 6), False), ((5, 5, 4, 4), True)]
)
def test_steps_committed_between_failures_forgive_too(steps: tuple[int, ...], futile: bool) -> None:
    """The rounds end in order to grow. The newcomer fails at once, and the others make progress."""
    patient, spent = replace(POLICY, restarts_max=100), Budget()
    for i, step in enumerate(steps):
        spent = budget.charge(spent, failure(), False, patient, NOW + i, step)
    why = budget.why_exhausted(spent, patient, commits=True)
    assert why == ("4 failures in a row without a single committed step" if futile else None)


def test_futility_can_be_switched_off() -> None:
    patient = replace(POLICY, restarts_max=100, futile_max=0)
    assert budget.why_exhausted(charges(*[("a", 0)] * 50), patient) is None


@given(st.lists(st.tuples(st.floats(0, 60), st.booleans()), max_size=40), st.integers(0, 6))
def test_the_budget_is_never_overspent(failures: list[tuple[float, bool]], allowed: int) -> None:
    """A job that continues after each charge, unless it is told to end, never has too many charges in any
    window."""
    policy = replace(POLICY, restarts_max=allowed)
    spent, now, borne = Budget(), NOW, []
    for pause_s, progressed in failures:
        now += pause_s
        spent = budget.charge(spent, failure(), progressed, policy, now)
        assert 0 <= budget.restarts_left(spent, policy, now) <= allowed
        if budget.why_exhausted(spent, policy) is not None:
            break
        borne.append(now)
    for end in borne:
        assert sum(end - policy.restart_window_s < at <= end for at in borne) <= allowed


# ---------------------------------------------------------------- which slot is to blame


def test_a_slot_that_failed_alone_is_suspect_after_enough_failures_in_a_row() -> None:
    assert budget.failing_slot(charges(("a", 1), ("a", 1)), POLICY) is None
    assert budget.failing_slot(charges(("b", 0), ("a", 1), ("a", 1), ("a", 1)), POLICY) == ("a", 1)


@pytest.mark.parametrize("other", [("b", 1), ("a", 0)])
def test_a_failure_elsewhere_clears_the_suspicion(other: tuple[str, int]) -> None:
    assert budget.failing_slot(charges(("a", 1), ("a", 1), other), POLICY) is None
    assert budget.failing_slot(charges(("a", 1), other, ("a", 1), ("a", 1)), POLICY) is None


def test_quarantine_can_be_switched_off() -> None:
    assert budget.failing_slot(charges(*[("a", 1)] * 9), replace(POLICY, quarantine_after=0)) is None


def test_each_quarantine_is_twice_as_long_up_to_a_limit() -> None:
    policy = replace(POLICY, quarantine_s=30.0, quarantine_max_s=200.0)
    spent, now, lengths = Budget(), NOW, []
    for _ in range(5):
        spent = budget.quarantine(spent, ("a", 1), policy, now)
        (only,) = spent.quarantines
        lengths.append(only.until - now)
        now = only.until + 1
    assert lengths == [30, 60, 120, 200, 200]


def test_a_slot_may_fail_for_weeks() -> None:
    """Doubling without a bound overflowed a float after some thousand failures."""
    known = Budget(quarantines=(Quarantine("a", 1, NOW, 5000),))
    (only,) = budget.quarantine(known, ("a", 1), POLICY, NOW).quarantines
    assert only == Quarantine("a", 1, NOW + POLICY.quarantine_max_s, 5001)


def test_a_quarantine_is_forgotten_a_window_after_its_end() -> None:
    known = Budget(
        quarantines=(Quarantine("a", 1, NOW - 100, 3), Quarantine("b", 0, NOW - 100, 2)),
    )
    (only,) = budget.quarantine(known, ("a", 1), POLICY, NOW).quarantines
    assert (only.node, only.slot, only.times) == ("a", 1, 1)


def test_others_stay_in_quarantine() -> None:
    known = Budget(quarantines=(Quarantine("b", 0, NOW + 5, 2), Quarantine("c", 0, NOW - 99, 2)))
    after = budget.quarantine(known, ("a", 1), POLICY, NOW).quarantines
    assert [(q.node, q.times) for q in after] == [("b", 2), ("c", 2), ("a", 1)]
