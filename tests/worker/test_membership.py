"""Workers join and leave on purpose, or die: no process restarts, and no step is made twice."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from elasticd.channel.worker_messages import Holds, Source
from tests.e2e.line import Line
from tests.worker.crew import Crew
from tests.worker.jobs import (
    NOTHING,
    STEPS,
    Accident,
    Gate,
    reads,
    run_out_of_memory,
    train_astray,
    train_with_a_group_of_its_own,
    train_with_own_randomness,
    wait_for_word_of_anyone,
    work,
    work_by_messages,
    work_patiently,
    work_tensor_by_tensor,
    work_twice,
)
from tests.worker.test_survival import assert_exact


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


def at(gate: Gate) -> Accident:
    return Accident("start", 4, gate.wait_and_leave)


def grow(
    crew: Crew, folder: Path, gate: Gate, count: int, *accidents: Accident, job: Callable[..., None] = work
) -> None:
    """Form a round of the first ``count`` workers. While one of them is at the gate, have all leave at a
    commit, so that the other workers join."""
    for i, accident in enumerate(accidents):
        crew.start(job, str(folder), str(i), accident)
    crew.all_waiting(*crew.hands)
    crew.form(*crew.hands[:count])
    gate.until_somebody_waits()
    crew.close(planned=True)
    gate.open()


def test_newcomers_join_at_a_commit_that_all_agree_on(crew, tmp_path, gate, undisturbed):
    grow(crew, tmp_path, gate, 2, at(gate), NOTHING, NOTHING, NOTHING)
    crew.all_ended()
    assert_exact(crew, tmp_path, set(), undisturbed)
    assert crew.settled == [(1, 2), (2, 4)]
    assert reads(tmp_path, "0", "committed") == reads(tmp_path, "1", "committed") == list(range(1, STEPS + 1))
    assert reads(tmp_path, "2", "entered") == reads(tmp_path, "0", "entered")[1:]


def test_a_worker_leaves_at_a_commit_and_the_others_redo_nothing(crew, tmp_path, gate, undisturbed):
    _, _, leaver = crew.begin(tmp_path, at(gate), NOTHING, NOTHING)
    gate.until_somebody_waits()
    leaver.shunned = True
    crew.close(planned=True)
    gate.open()
    crew.until(lambda: leaver.waiting)
    assert leaver.waiting.state == Holds.WHOLE
    leaver.process.kill()
    crew.all_ended()
    crew.until(lambda: leaver.status is not None)
    assert_exact(crew, tmp_path, {2}, undisturbed)
    steps = [reads(tmp_path, name, "committed") for name in "012"]
    assert steps[0] == steps[1] == list(range(1, STEPS + 1))
    assert steps[2] == steps[0][: len(steps[2])] and steps[2][-1] == reads(tmp_path, "0", "entered")[1]


@pytest.mark.parametrize(("survivors", "victim"), [(1, 1), (2, 3)])
def test_a_newcomer_that_dies_while_it_takes_the_state_costs_the_others_nothing(
    crew, tmp_path, gate, undisturbed, survivors, victim
):
    """Two workers join at once. The first passes the state on to the second. If the first dies, perhaps no
    worker but the sender has the state."""
    accidents = [at(gate), *[NOTHING] * (survivors + 1)]
    accidents[victim] = Accident("receiving", 1)
    grow(crew, tmp_path, gate, survivors, *accidents)
    crew.all_ended()
    assert_exact(crew, tmp_path, {victim}, undisturbed)
    assert crew.settled == [(1, survivors), (2, survivors + 2), (3, survivors + 1)]


def test_a_worker_asked_to_leave_before_all_have_joined_hands_over_first(crew, tmp_path, gate, undisturbed):
    grow(crew, tmp_path, gate, 1, at(gate), NOTHING)
    leaver, _ = crew.hands
    crew.until(lambda: leaver.round == 2)
    crew.close(planned=True)
    leaver.shunned = True
    crew.until(lambda: leaver.waiting)
    leaver.process.kill()
    crew.all_ended()
    crew.until(lambda: leaver.status is not None)
    assert_exact(crew, tmp_path, {0}, undisturbed)
    assert crew.settled == [(1, 1), (2, 2), (3, 1)]
    # The commit at which the worker left: the first, or the second if it was told late.
    assert reads(tmp_path, "1", "entered")[0] in reads(tmp_path, "0", "committed")[4:]


def test_in_a_handover_the_heirs_get_the_state_and_no_worker_trains(crew, tmp_path, gate, undisturbed):
    crew.least = 4  # the next round is formed by hand
    grow(crew, tmp_path, gate, 1, at(gate), NOTHING, NOTHING)
    leaver, *heirs = crew.hands
    crew.form(*heirs, leaver, handover=True)
    crew.until(lambda: all(hand.waiting and hand.waiting.round == 2 for hand in crew.hands))
    assert [hand.waiting.state for hand in crew.hands] == [Holds.WHOLE] * 3
    leaver.process.kill()
    crew.until(lambda: leaver.status is not None)
    crew.form(*heirs)
    crew.all_ended()
    assert_exact(crew, tmp_path, {0}, undisturbed)
    [began], [one], [other] = (reads(tmp_path, name, "entered") for name in "012")
    assert began == 0 and one == other == reads(tmp_path, "0", "committed")[-1] >= 5


@pytest.mark.parametrize("job", [work, work_by_messages, work_tensor_by_tensor])
def test_a_source_that_dies_while_it_sends_is_replaced_by_another(crew, tmp_path, gate, undisturbed, job):
    grow(crew, tmp_path, gate, 2, Accident("sending", 2), at(gate), NOTHING, job=job)
    crew.all_ended()
    assert_exact(crew, tmp_path, {0}, undisturbed)


def lose_the_source(crew: Crew, folder: Path, gate: Gate, job: Callable[..., None]) -> None:
    """Have a newcomer take over the state of the only other worker, which dies on the way."""
    sends, takes = Gate(folder / "sends"), Gate(folder / "takes")
    source = Accident("start", 4, gate.wait_and_leave, then=Accident("sending", 1, sends.wait))
    newcomer = Accident("receiving", 1, takes.wait)
    grow(crew, folder, gate, 1, source, newcomer, job=job)
    crew.until(lambda: all(hand.round == 2 for hand in crew.hands))
    takes.until_somebody_waits()
    crew.hands[0].process.kill()
    takes.open()


@pytest.mark.parametrize("job", [work, work_tensor_by_tensor])
def test_a_newcomer_never_trains_from_a_state_that_has_arrived_in_part(crew, tmp_path, gate, job):
    lose_the_source(crew, tmp_path, gate, job)
    crew.all_ended()
    assert crew.hands[1].status == 1 and not reads(tmp_path, "1", "committed")
    assert "another worker's state of which the rest was lost" in (tmp_path / "1.err").read_text()


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("job", [work, work_tensor_by_tensor])
def test_a_newcomer_that_got_a_part_of_a_state_begins_with_the_next_workers_own(
    crew, tmp_path, gate, undisturbed, job, is_first
):
    lose_the_source(crew, tmp_path, gate, job)
    crew.least = 3  # the next round is formed by hand
    newcomer = crew.hands[1]
    crew.until(lambda: newcomer.waiting)
    assert newcomer.waiting.state is Holds.TORN
    fresh = crew.start(job, str(tmp_path), "2")
    crew.form(*((newcomer, fresh) if is_first else (fresh, newcomer)))
    crew.all_ended()
    assert_exact(crew, tmp_path, {0}, undisturbed)


@pytest.mark.parametrize("job", [work, work_by_messages])
@pytest.mark.parametrize(
    ("point", "transfer", "victim"),
    [("receiving", 1, 2), ("sending", 2, 0)],
)
def test_a_worker_without_memory_to_take_or_send_the_state_dies_of_it_alone(
    crew, tmp_path, gate, undisturbed, job, point, transfer, victim
):
    accidents = [NOTHING, at(gate), NOTHING]
    accidents[victim] = Accident(point, transfer, run_out_of_memory)
    grow(crew, tmp_path, gate, 2, *accidents, job=job)
    crew.all_ended()
    assert crew.hands[victim].status == 1
    assert "can't allocate memory" in (tmp_path / f"{victim}.err").read_text()
    assert_exact(crew, tmp_path, {victim}, undisturbed)
    assert crew.settled == [(1, 2), (2, 3), (3, 2)]


def test_a_worker_that_wakes_after_it_was_replaced_has_no_part_in_what_the_others_make(
    crew, tmp_path, undisturbed
):
    """A worker was stopped in its step, and the others continued without it. Its own result of that step
    differs, and no other worker gets it."""
    asleep, held = Gate(tmp_path / "asleep"), Gate(tmp_path / "held")
    committed = [Gate(tmp_path / "committed-0"), Gate(tmp_path / "committed-2")]
    accidents = [Accident("committed", 4, gate.wait) for gate in committed]
    accidents[0].then = Accident("start", 7, held.wait)
    crew.start(work, str(tmp_path), "0", accidents[0])
    crew.start(work, str(tmp_path), "1", Accident("summed", 4, asleep.wait), body=train_astray)
    crew.start(work, str(tmp_path), "2", accidents[1])
    crew.form()
    asleep.until_somebody_waits()
    sleeper = crew.hands[1]
    os.kill(sleeper.process.pid, signal.SIGSTOP)
    sleeper.shunned = True
    for gate in committed:
        gate.until_somebody_waits()
    crew.close()
    for gate in committed:
        gate.open()
    crew.until(lambda: crew.round == 2)
    held.until_somebody_waits()
    os.kill(sleeper.process.pid, signal.SIGCONT)
    asleep.open()
    crew.until(lambda: sleeper.waiting)
    assert (sleeper.waiting.round, sleeper.waiting.state, sleeper.waiting.agreed) == (1, Holds.WHOLE, 1)
    assert reads(tmp_path, "1", "committed") == [1, 2, 3, 4, 5], "it did make it, too late"
    sleeper.shunned = False
    crew.close(planned=True)
    held.open()
    crew.all_ended()
    assert_exact(crew, tmp_path, set(), undisturbed)
    assert crew.settled == [(1, 3), (2, 2), (3, 3)]
    assert [hand.entered[-1].source for hand in crew.hands] == [Source.SURVIVOR] * 3
    assert reads(tmp_path, "0", "committed") == reads(tmp_path, "2", "committed") == list(range(1, STEPS + 1))
    assert reads(tmp_path, "1", "entered") == [0, reads(tmp_path, "0", "entered")[-1]]


def test_a_collective_of_a_group_that_the_script_made_is_aborted_too(crew, tmp_path, undisturbed):
    """One worker is stopped before the collective. Another one is in it."""
    outside, inside = Gate(tmp_path / "outside"), Gate(tmp_path / "inside")
    accidents = Accident("met", 4, inside.wait), Accident("start", 4, outside.wait)
    _, stopped = crew.begin(tmp_path, *accidents, body=train_with_a_group_of_its_own)
    outside.until_somebody_waits()
    inside.until_somebody_waits()
    os.kill(stopped.process.pid, signal.SIGSTOP)
    stopped.shunned = True
    crew.close()
    inside.open()
    crew.all_ended()
    stopped.process.kill()
    crew.until(lambda: stopped.status is not None)
    assert_exact(crew, tmp_path, {1}, undisturbed)
    assert crew.settled == [(1, 2), (2, 1)]


def test_a_worker_that_waits_for_a_message_from_any_rank_survives_the_sender(crew, tmp_path, undisturbed):
    crew.begin(tmp_path, Accident("start", 4, wait_for_word_of_anyone), Accident("start", 4))
    crew.all_ended()
    assert_exact(crew, tmp_path, {1}, undisturbed)
    assert crew.settled == [(1, 2), (2, 1)]


def test_a_worker_leaves_though_the_network_to_the_store_that_it_waits_on_is_cut(crew, tmp_path):
    """The connection is neither closed nor answered."""
    one, other = [crew.start(work_patiently, str(tmp_path), name) for name in "01"]
    crew.all_waiting(one, other)
    other.process.kill()
    crew.until(lambda: other.status is not None)
    lines: list[Line] = []

    def led(port: int) -> int:
        lines.append(Line("127.0.0.1", port))
        return lines[-1].port

    crew.led = led
    other.waiting = one.waiting  # as if the other worker had come
    crew.least = 3  # form no other round
    try:
        crew.form(one, other)
        Gate(tmp_path / "gate").until_somebody_waits()
        lines[0].cut()
        crew.close()
        crew.until(lambda: one.waiting)
        assert one.waiting.round == 1
    finally:
        for line in lines:
            line.close()


def test_ranks_that_draw_for_themselves_go_on_doing_so(crew, tmp_path):
    """Numbers that each rank has drawn by itself must not become the same for all ranks after a recovery."""
    accidents = NOTHING, NOTHING, Accident("start", 5)
    crew.begin(tmp_path, *accidents, body=train_with_own_randomness, steps=8)
    crew.all_ended()
    drew = [reads(tmp_path, name, "drew") for name in "01"]
    assert len(drew[0]) == len(drew[1]) == 8 and set(drew[0]).isdisjoint(drew[1])
    for rank, mine in enumerate(drew):
        torch.manual_seed(rank)
        assert mine == [torch.rand(1).item() for _ in range(8)]


def test_a_worker_whose_agent_is_gone_ends_with_a_message(crew, tmp_path):
    hand = crew.start(work, str(tmp_path), "0", NOTHING)
    crew.all_waiting(hand)
    hand.channel.socket.shutdown(socket.SHUT_RDWR)
    crew.all_ended()
    assert hand.status == 1
    assert "the agent of this worker has exited" in (tmp_path / "0.err").read_text().splitlines()[-1]


def test_a_second_run_function_is_refused_in_one_sentence(crew, tmp_path):
    hand = crew.start(work_twice, str(tmp_path), "0")
    crew.form(hand)
    crew.all_ended()
    assert hand.status == 1
    assert "a run function has returned already" in (tmp_path / "0.err").read_text().splitlines()[-1]


def test_newcomers_find_survivors_of_a_group_that_never_came_about(crew, tmp_path, undisturbed):
    for i in range(3):
        crew.start(work, str(tmp_path), str(i), Accident("forming", 0) if i == 1 else NOTHING)
    crew.all_waiting(*crew.hands)
    crew.form(*crew.hands[:2])
    crew.all_ended()
    assert_exact(crew, tmp_path, {1}, undisturbed)
    assert crew.settled == [(1, 2), (2, 2)]


def test_the_crew_hears_all_that_a_worker_said_before_it_notes_the_workers_end(crew, tmp_path):
    crew.begin(tmp_path, NOTHING)
    (hand,) = crew.hands
    hand.process.join()  # let the test be slower than the worker, as it may be on some machines
    crew.all_ended()
    assert hand.status == 0 and hand.done
