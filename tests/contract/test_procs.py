"""The contract of ``elasticd.core.ports.Procs``, on simulated and on real processes."""

from __future__ import annotations

import pytest

from tests.contract.procs_harness import SIGKILL, SIGTERM, EndWith, InPlace, ProcsHarness, Train
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
    harness.until(lambda: not harness.alive())
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


def test_a_fence_moved_in_time_kills_no_worker(harness: ProcsHarness) -> None:
    harness.start(1, {0: Train()})
    first = harness.now() + 0.5
    harness.procs.fence(first)
    harness.procs.fence(harness.now() + LONG_S)
    harness.until(lambda: harness.now() > first + 0.2 and harness.procs.steps()[0] > 0)
    assert harness.exits == []


def test_a_removed_fence_kills_no_worker(harness: ProcsHarness) -> None:
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


# ---------------------------------------------------------------- workers that keep their process


def _leave(harness: ProcsHarness, *, planned: bool = False, leave_s: float | None = LONG_S) -> None:
    harness.procs.leave(planned, SIGTERM, LONG_S, leave_s)


def _waiting(harness: ProcsHarness, count: int) -> None:
    harness.until(lambda: len(harness.heard.waits) == count)


def test_a_worker_started_for_a_round_enters_it_once_it_is_linked(harness: ProcsHarness) -> None:
    harness.start(1, {0: InPlace(), 1: InPlace()})
    _training(harness, 2)
    assert sorted(harness.heard.linked) == [0, 1]
    assert harness.heard.waits == []


@pytest.mark.parametrize("planned", [True, False])
def test_workers_told_to_leave_wait_with_their_steps_and_go_on_in_the_next_round(
    harness: ProcsHarness, planned: bool
) -> None:
    harness.start(1, {3: InPlace(), 7: InPlace()})
    _training(harness, 2)
    before = harness.process(3), harness.process(7)
    _leave(harness, planned=planned)
    _waiting(harness, 2)
    assert {(slot, number) for slot, number, _, _ in harness.heard.waits} == {(3, 1), (7, 1)}
    assert all(steps > 0 for _, _, steps, _ in harness.heard.waits)
    assert all(age is not None and age.agreed == 1 for _, _, _, age in harness.heard.waits)
    harness.start(2, {3: InPlace(), 7: InPlace()})
    _training(harness, 2)
    assert (harness.process(3), harness.process(7)) == before
    assert sorted(harness.heard.linked) == [3, 7]
    assert harness.exits == []


def test_steps_of_a_process_that_goes_on_count_from_the_start_of_its_round(harness: ProcsHarness) -> None:
    harness.start(1, {0: InPlace()})
    harness.until(lambda: harness.procs.steps()[0] >= 50)
    _leave(harness)
    _waiting(harness, 1)
    assert harness.heard.waits[0][2] >= 50
    assert harness.procs.steps()[0] == harness.heard.waits[0][2]
    harness.start(2, {0: InPlace()})
    assert harness.procs.steps()[0] < 50
    _training(harness, 1)


def test_workers_that_are_not_linked_are_stopped_instead(harness: ProcsHarness) -> None:
    harness.start(1, {0: Train(), 1: Train()})
    _training(harness, 2)
    _leave(harness)
    _ended(harness, 2)
    assert [e.code for _, e in harness.exits] == [-SIGTERM, -SIGTERM]
    assert harness.heard.linked == harness.heard.waits == []


def test_a_linked_worker_that_does_not_leave_is_killed(harness: ProcsHarness) -> None:
    harness.start(1, {0: InPlace(leaves=False)})
    _training(harness, 1)
    _leave(harness, leave_s=0.3)
    _ended(harness, 1)
    assert harness.exits[0][1].code == -SIGKILL
    assert harness.heard.waits == []


def test_a_linked_worker_that_need_not_hurry_may_be_given_a_time_later(harness: ProcsHarness) -> None:
    harness.start(1, {0: InPlace(leaves=False)})
    _training(harness, 1)
    _leave(harness, leave_s=None)
    told_at = harness.now()
    harness.until(lambda: harness.now() > told_at + 0.3)
    assert harness.exits == []
    _leave(harness, leave_s=0.0)
    _ended(harness, 1)
    assert harness.exits[0][1].code == -SIGKILL


def test_the_time_to_leave_does_not_reach_into_the_next_round(harness: ProcsHarness) -> None:
    harness.start(1, {0: InPlace()})
    _training(harness, 1)
    told_at = harness.now()
    _leave(harness, leave_s=2.0)
    _waiting(harness, 1)
    harness.start(2, {0: InPlace()})
    harness.until(lambda: harness.now() > told_at + 2.5 and harness.procs.steps()[0] > 0)
    assert harness.exits == []


def test_to_leave_as_planned_may_become_to_leave_at_once(harness: ProcsHarness) -> None:
    harness.start(1, {0: InPlace()})
    _training(harness, 1)
    _leave(harness, planned=True)
    _leave(harness)
    _waiting(harness, 1)
    harness.start(2, {0: InPlace()})
    _training(harness, 1)
    assert len(harness.heard.waits) == 1


def test_a_standby_waits_for_its_first_round_and_has_no_steps(harness: ProcsHarness) -> None:
    harness.standby({5: InPlace()})
    _waiting(harness, 1)
    assert (harness.heard.linked, harness.heard.waits, dict(harness.procs.steps())) == (
        [5],
        [(5, 0, 0, None)],
        {},
    )
    process = harness.process(5)
    harness.start(4, {5: InPlace()})
    _training(harness, 1)
    assert harness.process(5) == process


def test_a_standby_on_its_way_enters_the_round_it_is_given_when_it_comes(harness: ProcsHarness) -> None:
    harness.standby({0: InPlace()})
    harness.start(1, {0: InPlace()})
    _training(harness, 1)
    assert (harness.heard.linked, harness.heard.waits) == ([0], [])


def test_a_process_that_ended_while_it_waited_is_not_replaced(harness: ProcsHarness) -> None:
    """The caller does not know of the end yet, so it knows of no process that the kernel takes down."""
    harness.standby({0: InPlace(), 1: InPlace()})
    _waiting(harness, 2)
    harness.procs.stop(SIGKILL, 0.0, (1,))
    _ended(harness, 1)
    harness.start(1, {0: InPlace(), 1: InPlace()}, waiting=(0, 1))
    assert [(number, exit.slot) for number, exit in harness.exits] == [(0, 1)]
    assert set(harness.procs.steps()) == {0}


def test_a_replacement_may_come_to_wait_while_the_others_train(harness: ProcsHarness) -> None:
    harness.start(1, {0: InPlace(), 1: InPlace()})
    _training(harness, 2)
    harness.procs.stop(SIGKILL, 0.0, (1,))
    _ended(harness, 1)
    harness.standby({1: InPlace()})
    _waiting(harness, 1)
    assert harness.heard.waits == [(1, 0, 0, None)]
    _leave(harness)
    _waiting(harness, 2)
    harness.start(2, {0: InPlace(), 1: InPlace()})
    _training(harness, 2)
    assert len(harness.exits) == 1


def test_workers_outside_the_round_keep_waiting(harness: ProcsHarness) -> None:
    harness.start(1, {0: InPlace(), 1: InPlace()})
    _training(harness, 2)
    spare = harness.process(1)
    _leave(harness)
    _waiting(harness, 2)
    harness.start(2, {0: InPlace()})
    _training(harness, 1)
    assert set(harness.procs.steps()) == {0}
    _leave(harness)
    _waiting(harness, 3)
    assert harness.heard.waits[2][:2] == (0, 2), "only who acts is told to leave"
    harness.start(3, {0: InPlace(), 1: InPlace()})
    _training(harness, 2)
    assert harness.process(1) == spare


def test_stop_may_be_for_some_slots_only(harness: ProcsHarness) -> None:
    harness.start(1, {0: Train(), 1: Train()})
    _training(harness, 2)
    harness.procs.stop(SIGTERM, LONG_S, (1,))
    _ended(harness, 1)
    harness.procs.stop(SIGTERM, LONG_S, (9,))
    assert harness.exits[0][1].slot == 1
    assert harness.process(0)


def test_an_exit_tells_the_round_that_the_process_was_given_last_and_its_rank_there(
    harness: ProcsHarness,
) -> None:
    harness.start(1, {2: InPlace(), 5: InPlace()})
    harness.standby({8: InPlace()})
    _training(harness, 2)
    _leave(harness)
    _waiting(harness, 3)
    harness.start(2, {5: InPlace()})
    _training(harness, 1)
    harness.procs.stop(SIGKILL, 0.0)
    _ended(harness, 3)
    told = {exit.slot: (number, exit.rank) for number, exit in harness.exits}
    assert told == {2: (1, 0), 5: (2, 0), 8: (0, 8)}


def test_the_fence_kills_waiting_workers_too(harness: ProcsHarness) -> None:
    harness.standby({0: InPlace()})
    _waiting(harness, 1)
    harness.procs.fence(harness.now())
    _ended(harness, 1)
    (number, exit), *_ = harness.exits
    assert (number, exit.fenced) == (0, True)
