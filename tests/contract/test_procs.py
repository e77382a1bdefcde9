"""The contract of ``elasticd.core.ports.Procs``, on simulated and on real processes."""

from __future__ import annotations

from tests.contract.procs_harness import SIGKILL, SIGTERM, EndWith, ProcsHarness, Train
from tests.contract.procs_harness import harness as harness  # noqa: PLC0414  # a fixture, used by name
from tests.sim.procs import OnSigterm

LONG_S = 3600.0


def _ended(harness: ProcsHarness, count: int) -> None:
    harness.until(lambda: len(harness.exits) == count)


def _training(harness: ProcsHarness, workers: int) -> None:
    harness.until(lambda: len([s for s in harness.procs.steps().values() if s > 0]) == workers)


def test_a_worker_that_ends_is_reported_once_with_its_code_slot_and_rank(harness: ProcsHarness) -> None:
    harness.start(7, {3: EndWith(5)})
    _ended(harness, 1)
    (number, exit), *_ = harness.exits
    assert (number, exit.slot, exit.rank, exit.code, exit.fenced) == (7, 3, 0, 5, False)
    assert abs(exit.at - harness.now()) < LONG_S
    harness.procs.stop(SIGKILL, 0.0)
    assert not harness.alive()
    assert len(harness.exits) == 1


def test_a_worker_killed_by_a_signal_has_its_number_below_zero(harness: ProcsHarness) -> None:
    harness.start(1, {0: EndWith(-11)})
    _ended(harness, 1)
    assert harness.exits[0][1].code == -11


def test_ranks_are_reported_with_the_slots_they_were_assigned_to(harness: ProcsHarness) -> None:
    harness.start(1, {2: Train(), 5: Train(), 9: Train()})
    _training(harness, 3)
    harness.procs.stop(SIGTERM, LONG_S)
    _ended(harness, 3)
    assert {(e.slot, e.rank) for _, e in harness.exits} == {(2, 0), (5, 1), (9, 2)}


def test_stop_sends_the_signal(harness: ProcsHarness) -> None:
    harness.start(1, {0: Train(), 1: Train()})
    _training(harness, 2)
    harness.procs.stop(SIGTERM, LONG_S)
    _ended(harness, 2)
    assert [e.code for _, e in harness.exits] == [-SIGTERM, -SIGTERM]


def test_a_worker_may_save_and_end_with_0_when_it_is_stopped(harness: ProcsHarness) -> None:
    harness.start(1, {0: Train(OnSigterm.SAVE)})
    _training(harness, 1)
    harness.procs.stop(SIGTERM, LONG_S)
    _ended(harness, 1)
    assert harness.exits[0][1].code == 0


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(harness: ProcsHarness) -> None:
    harness.start(1, {0: Train(OnSigterm.IGNORE)})
    _training(harness, 1)
    harness.procs.stop(SIGTERM, 0.3)
    _ended(harness, 1)
    assert harness.exits[0][1].code == -SIGKILL


def test_a_second_stop_with_a_shorter_grace_shortens_it(harness: ProcsHarness) -> None:
    harness.start(1, {0: Train(OnSigterm.IGNORE)})
    _training(harness, 1)
    harness.procs.stop(SIGTERM, LONG_S)
    harness.procs.stop(SIGTERM, 0.1)
    _ended(harness, 1)
    assert harness.exits[0][1].code == -SIGKILL


def test_a_second_stop_with_a_longer_grace_does_not_lengthen_it(harness: ProcsHarness) -> None:
    harness.start(1, {0: Train(OnSigterm.IGNORE)})
    _training(harness, 1)
    harness.procs.stop(SIGTERM, 0.3)
    harness.procs.stop(SIGTERM, LONG_S)
    _ended(harness, 1)
    assert harness.exits[0][1].code == -SIGKILL


def test_stop_without_workers_does_nothing_to_the_next_round(harness: ProcsHarness) -> None:
    harness.procs.stop(SIGTERM, 0.0)
    harness.start(1, {0: Train()})
    _training(harness, 1)
    assert harness.exits == []


def test_the_grace_of_one_round_does_not_reach_into_the_next(harness: ProcsHarness) -> None:
    harness.start(1, {0: Train()})
    _training(harness, 1)
    harness.procs.stop(SIGTERM, 0.5)
    _ended(harness, 1)
    stopped_at = harness.now()
    harness.start(2, {0: Train()})
    harness.until(lambda: harness.now() > stopped_at + 1.0 and harness.procs.steps()[0] > 0)
    assert len(harness.exits) == 1


def test_workers_are_killed_when_the_fence_passes(harness: ProcsHarness) -> None:
    harness.start(1, {0: Train(OnSigterm.IGNORE), 1: Train(OnSigterm.IGNORE)})
    _training(harness, 2)
    until = harness.now() + 0.3
    harness.procs.fence(until)
    _ended(harness, 2)
    assert harness.now() >= until
    assert [(e.code, e.fenced) for _, e in harness.exits] == [(-SIGKILL, True)] * 2


def test_a_fence_moved_in_time_kills_nobody(harness: ProcsHarness) -> None:
    harness.start(1, {0: Train()})
    first = harness.now() + 0.5
    harness.procs.fence(first)
    harness.procs.fence(harness.now() + LONG_S)
    harness.until(lambda: harness.now() > first + 0.2 and harness.procs.steps()[0] > 0)
    assert harness.exits == []


def test_a_fence_taken_away_kills_nobody(harness: ProcsHarness) -> None:
    harness.start(1, {0: Train()})
    first = harness.now() + 0.5
    harness.procs.fence(first)
    harness.procs.fence(None)
    harness.until(lambda: harness.now() > first + 0.2 and harness.procs.steps()[0] > 0)
    assert harness.exits == []


def test_a_worker_started_behind_the_fence_does_not_live(harness: ProcsHarness) -> None:
    harness.procs.fence(harness.now() - 1.0)
    harness.start(1, {0: Train(OnSigterm.IGNORE)})
    _ended(harness, 1)
    assert harness.exits[0][1].fenced


def test_a_fence_that_has_passed_stays_until_it_is_moved(harness: ProcsHarness) -> None:
    harness.start(1, {0: Train()})
    _training(harness, 1)
    harness.procs.fence(harness.now())
    _ended(harness, 1)
    harness.start(2, {0: Train()})
    _ended(harness, 2)
    assert harness.exits[1][1].fenced
    harness.procs.fence(harness.now() + LONG_S)
    harness.start(3, {0: Train()})
    _training(harness, 1)
    assert len(harness.exits) == 2


def test_steps_count_from_the_start_of_the_round(harness: ProcsHarness) -> None:
    harness.start(1, {4: Train()})
    harness.until(lambda: harness.procs.steps()[4] >= 50)
    harness.procs.stop(SIGKILL, 0.0)
    _ended(harness, 1)
    assert harness.procs.steps()[4] >= 50, "what an ended worker did is still known"
    harness.start(2, {4: Train()})
    assert harness.procs.steps()[4] < 50
    _training(harness, 1)


def test_the_next_round_may_start_once_all_of_the_last_have_ended(harness: ProcsHarness) -> None:
    harness.start(1, {0: Train()})
    _training(harness, 1)
    harness.procs.stop(SIGKILL, 0.0)
    _ended(harness, 1)
    harness.start(2, {0: EndWith(3)})
    _ended(harness, 2)
    assert [number for number, _ in harness.exits] == [1, 2]
