from dataclasses import replace

import pytest

from elasticd.core.facts import Cause, Exit, Failure, Phase, Round
from elasticd.telemetry.outage import Outage, Recovery
from tests.core import build

NOW = build.NOW


def live(number: int, *, cause: Cause = Cause.START, since: float = NOW) -> Round:
    return build.round(number, {"a": 2, "b": 2}, cause=cause, since=since)


def closing(number: int, why: Cause, at: float, *, planned: bool = False) -> Round:
    return replace(live(number), phase=Phase.CLOSING, closing=why, planned=planned, since=at)


def trained(number: int = 1) -> Outage:
    still, recovery = Outage().see(live(number), 0.0).first_step(NOW + 1)
    assert recovery is None, "a job that starts recovers from nothing"
    return still


def failed_at(at: float) -> Failure:
    return Failure("b", Exit(1, 3, -9, at))


def test_a_failed_worker_stops_training_from_its_exit_to_the_next_first_step() -> None:
    still = trained().see(closing(1, Cause.WORKER_FAILED, NOW + 10.3), NOW + 9.9)
    formed = replace(live(2, cause=Cause.WORKER_FAILED, since=NOW + 11), failure=failed_at(NOW + 10))
    _, recovery = still.see(formed, 0.0).first_step(NOW + 14)
    assert recovery == Recovery(Cause.WORKER_FAILED, pytest.approx(0.3), 4.0)


def test_the_outage_of_a_lost_node_begins_at_the_last_step_of_any_worker() -> None:
    still = trained().see(closing(1, Cause.NODE_LOST, NOW + 15), NOW + 10)
    _, recovery = still.see(live(2, cause=Cause.NODE_LOST, since=NOW + 16), 0.0).first_step(NOW + 17)
    assert recovery == Recovery(Cause.NODE_LOST, 5.0, 7.0)


def test_a_resize_is_planned_and_lasts_from_its_decision() -> None:
    still = trained().see(closing(1, Cause.GREW, NOW + 20, planned=True), NOW + 19.9)
    _, recovery = still.see(live(2, cause=Cause.GREW, since=NOW + 21), 0.0).first_step(NOW + 22)
    assert recovery == Recovery(Cause.GREW, None, 2.0)


def test_a_round_that_never_stepped_prolongs_the_standstill_before_it() -> None:
    still = trained().see(closing(1, Cause.NODE_LOST, NOW + 15), NOW + 10)
    still = still.see(live(2, cause=Cause.NODE_LOST, since=NOW + 16), NOW + 10)
    still = still.see(closing(2, Cause.WORKER_FAILED, NOW + 20), NOW + 10)
    formed = replace(live(3, cause=Cause.WORKER_FAILED, since=NOW + 21), failure=failed_at(NOW + 19))
    _, recovery = still.see(formed, NOW + 10).first_step(NOW + 30)
    assert recovery == Recovery(Cause.NODE_LOST, 5.0, 20.0)


def test_a_round_whose_end_was_not_seen_is_known_by_its_successor() -> None:
    formed = live(2, cause=Cause.NODE_LOST, since=NOW + 16)
    _, recovery = trained().see(formed, NOW + 10).first_step(NOW + 17)
    assert recovery == Recovery(Cause.NODE_LOST, 6.0, 7.0)


def test_only_the_first_step_of_a_round_ends_a_standstill() -> None:
    still = trained().see(closing(1, Cause.NODE_LOST, NOW + 15), NOW + 10)
    still, first = still.see(live(2, since=NOW + 16), 0.0).first_step(NOW + 17)
    assert first is not None
    assert still.first_step(NOW + 18) == (still, None)


def test_clocks_that_disagree_make_no_negative_time() -> None:
    still = trained().see(closing(1, Cause.WORKER_FAILED, NOW + 10), NOW + 9)
    formed = replace(live(2, cause=Cause.WORKER_FAILED, since=NOW + 11), failure=failed_at(NOW + 99))
    _, recovery = still.see(formed, 0.0).first_step(NOW + 9.5)
    assert recovery == Recovery(Cause.WORKER_FAILED, 0.0, 0.0)
