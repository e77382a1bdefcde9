"""Workers die at the worst instants. The survivors continue, and end as if no worker had died."""

from functools import partial
from pathlib import Path

import pytest

from elasticd.channel.worker_messages import Source
from tests.worker.crew import Crew
from tests.worker.jobs import (
    NOTHING,
    STEPS,
    Accident,
    Gate,
    fail,
    lose_the_others,
    reads,
    train_and_agree_by_node,
    train_and_commit_now_and_then,
    train_and_count_graphs,
    train_and_exit_on_anything,
    train_and_go_on_past_anything,
    train_and_return_whatever_happens,
    train_and_swallow_everything,
    train_and_talk_before_the_commit,
    train_whatever_happens,
    train_without_commit,
    wait_for_word_of_the_third,
    work,
    work_impatiently,
    work_slowly,
    work_where_the_default_device_has_no_memory,
    work_with_torchs_checks,
)


def assert_exact(crew: Crew, folder: Path, dead: set[int], undisturbed: dict) -> None:
    """Check that every survivor has committed each step once, in order, with the outcome of the undisturbed
    training."""
    for i, hand in enumerate(crew.hands):
        if i in dead:
            assert hand.status in (-9, 1)
            continue
        errors = (folder / f"{i}.err").read_text()
        assert hand.status == 0, errors
        [outcome] = reads(folder, str(i), "outcome")
        assert [key for key in undisturbed if outcome[key] != undisturbed[key]] == [], f"worker {i} {errors}"
        committed = reads(folder, str(i), "committed")
        first = reads(folder, str(i), "entered")[0]
        assert sorted(set(committed)) == committed, "a step was made twice"
        assert first == STEPS or committed[-1] == STEPS
    for hand in crew.hands:
        if hand.status == 0:
            assert hand.done


POINTS = ["forward", "backward", "summed", "in the optimizer", "stepped", "committed"]


@pytest.mark.parametrize("point", POINTS)
def test_survivors_of_a_death_go_on_with_no_step_lost_or_repeated(crew, tmp_path, undisturbed, point):
    crew.begin(tmp_path, NOTHING, Accident(point, 4), NOTHING)
    crew.all_ended()
    assert_exact(crew, tmp_path, {1}, undisturbed)
    assert crew.settled == [(1, 3), (2, 2)]


def test_the_first_rank_is_nothing_special(crew, tmp_path, undisturbed):
    crew.begin(tmp_path, Accident("backward", 3), NOTHING, NOTHING)
    crew.all_ended()
    assert_exact(crew, tmp_path, {0}, undisturbed)


def test_a_death_is_survived_while_torch_checks_its_collectives(crew, tmp_path, undisturbed):
    crew.begin(tmp_path, NOTHING, Accident("backward", 3), NOTHING, job=work_with_torchs_checks)
    crew.all_ended()
    assert_exact(crew, tmp_path, {1}, undisturbed)


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_a_death_is_survived_whatever_the_default_device_is(crew, tmp_path, sharded):
    """A script that sets ``torch.set_default_device("cuda")`` has State's own copies on the CPU as before."""
    job = work_where_the_default_device_has_no_memory
    crew.begin(tmp_path, NOTHING, Accident("backward", 3), NOTHING, job=job, sharded=sharded)
    crew.all_ended()
    for i in (0, 2):
        assert crew.hands[i].status == 0, (tmp_path / f"{i}.err").read_text()
        assert reads(tmp_path, str(i), "committed") == [*range(1, STEPS + 1)]


def test_one_worker_goes_on_alone(crew, tmp_path, undisturbed):
    fails = Accident("forward", 5)
    crew.begin(tmp_path, fails, fails, NOTHING, fails)
    crew.all_ended()
    assert_exact(crew, tmp_path, {0, 1, 3}, undisturbed)


@pytest.mark.parametrize(
    "victim", [0, 1, 2], ids=["the first rank", "not first on its node", "first on its node"]
)
@pytest.mark.parametrize("accident", [("grouping", 0), ("agreeing", 4)], ids=lambda accident: accident[0])
def test_a_death_during_an_agreement_by_node_is_survived(crew, tmp_path, undisturbed, accident, victim):
    accidents = [Accident(*accident) if rank == victim else NOTHING for rank in range(5)]
    crew.begin(tmp_path, *accidents, body=train_and_agree_by_node)
    crew.all_ended()
    assert_exact(crew, tmp_path, {victim}, undisturbed)
    assert crew.settled == [(1, 5), (2, 4)]


def test_one_death_after_the_other_is_survived(crew, tmp_path, undisturbed):
    accidents = Accident("backward", 4), Accident("start", 4), Accident("stepped", 5), NOTHING
    crew.begin(tmp_path, *accidents)
    crew.all_ended()
    assert_exact(crew, tmp_path, {0, 1, 2}, undisturbed)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_while_the_survivors_join_is_survived(crew, tmp_path, undisturbed, victim):
    """The second worker dies when all have come for the second round, before it connects."""
    accidents = [NOTHING, NOTHING, NOTHING, Accident("backward", 4)]
    accidents[victim] = Accident("forming", 1)
    crew.begin(tmp_path, *accidents)
    crew.all_ended()
    assert_exact(crew, tmp_path, {victim, 3}, undisturbed)


def test_a_death_after_the_others_have_returned_is_survived(crew, tmp_path, undisturbed):
    crew.begin(tmp_path, NOTHING, Accident("returned", STEPS), NOTHING)
    crew.all_ended()
    assert_exact(crew, tmp_path, {1}, undisturbed)


def test_default_data_parallel_is_exact_where_its_sums_are(crew, tmp_path, undisturbed):
    crew.begin(tmp_path, NOTHING, Accident("backward", 6), exact=False)
    crew.all_ended()
    assert_exact(crew, tmp_path, {1}, undisturbed)


def test_a_function_that_swallows_exceptions_commits_no_broken_step(crew, tmp_path, undisturbed):
    crew.begin(tmp_path, NOTHING, Accident("forward", 6), exact=False, body=train_whatever_happens)
    crew.all_ended()
    assert_exact(crew, tmp_path, {1}, undisturbed)
    skipped = reads(tmp_path, "0", "skipped")[0]
    assert "gloo" in skipped or "the world ended before" in skipped, "whichever is noticed first"


@pytest.mark.parametrize(
    "body",
    [
        train_and_exit_on_anything,
        train_and_return_whatever_happens,
        train_and_go_on_past_anything,
    ],
)
def test_what_a_function_makes_of_the_end_of_its_world_is_not_its_own(crew, tmp_path, undisturbed, body):
    """One worker dies. Later another one joins, at a commit that all have agreed on."""
    late = Gate(tmp_path / "late")
    crew.begin(tmp_path, Accident("start", 6, late.wait), Accident("forward", 3), body=body)
    survivor = crew.hands[0]
    crew.until(lambda: len(survivor.entered) == 2 or survivor.status is not None)
    assert survivor.status is None, (tmp_path / "0.err").read_text()
    late.until_somebody_waits()
    crew.grow(crew.start(work, str(tmp_path), "2", body=body))
    late.open()
    crew.all_ended()
    assert_exact(crew, tmp_path, {1}, undisturbed)
    assert crew.settled == [(1, 2), (2, 1), (3, 2)]


def test_as_many_steps_are_made_as_were_asked_for_where_a_commit_covers_several(tmp_path):
    alone, disturbed = tmp_path / "alone", tmp_path / "disturbed"
    for folder, accidents in ((alone, [NOTHING]), (disturbed, [NOTHING, Accident("forward", 7)])):
        folder.mkdir()
        with Crew() as crew:
            crew.begin(folder, *accidents, body=train_and_commit_now_and_then)
            crew.all_ended()
            assert crew.hands[0].status == 0, (folder / "0.err").read_text()
        assert reads(folder, "0", "committed") == [3, 6, 9, 12]
    assert reads(disturbed, "0", "entered") == [0, 6]
    assert reads(disturbed, "0", "outcome") == reads(alone, "0", "outcome")
    assert reads(alone, "0", "outcome")[0]["seen"] == list(range(STEPS))


def test_a_function_that_swallows_even_the_end_of_its_world_spoils_nothing_for_others(
    crew, tmp_path, undisturbed
):
    """Such a worker never leaves its world. Its agent kills it in the end, and so does the test."""
    deaf = Gate(tmp_path / "deaf")
    crew.start(
        work, str(tmp_path), "0", Accident("swallowed", 6, deaf.wait), body=train_and_swallow_everything
    )
    crew.start(work, str(tmp_path), "1", Accident("forward", 6))
    crew.start(work, str(tmp_path), "2")
    crew.form()
    crew.hands[0].shunned = True
    deaf.until_somebody_waits()
    deaf.open()  # from here on the worker tries to go on, again and again, beside the others
    crew.all_ended()
    assert crew.hands[0].status is None and crew.hands[0].round == 1
    crew.hands[0].process.kill()
    crew.until(lambda: crew.hands[0].status is not None)
    assert_exact(crew, tmp_path, {0, 1}, undisturbed)
    assert crew.settled == [(1, 3), (2, 1)]
    assert reads(tmp_path, "0", "committed") == list(range(1, 7)), "nothing on its own"


def test_a_worker_one_commit_behind_takes_the_state_of_a_worker_ahead(crew, tmp_path, undisturbed):
    """Before its commit, one worker waits for a message of a worker that dies. The other worker has passed
    that point."""
    ahead, silent = Gate(tmp_path / "ahead"), Gate(tmp_path / "silent")
    accidents = [
        Accident("committed", 4, ahead.wait),
        Accident("summed", 4, wait_for_word_of_the_third),
        Accident("summed", 4, silent.wait),
    ]
    # the worker that is ahead would wait for the others to compare
    crew.begin(tmp_path, *accidents, compare=False)
    ahead.until_somebody_waits()
    silent.until_somebody_waits()
    crew.hands[2].process.kill()
    ahead.open()
    crew.all_ended()
    assert_exact(crew, tmp_path, {2}, undisturbed)
    assert crew.settled == [(1, 3), (2, 2)]
    assert [hand.entered[-1].source for hand in crew.hands[:2]] == [Source.SURVIVOR] * 2
    assert [reads(tmp_path, name, "entered") for name in "01"] == [[0, 5], [0, 5]]
    whole = list(range(1, STEPS + 1))
    assert reads(tmp_path, "0", "committed") == whole
    assert reads(tmp_path, "1", "committed") == [step for step in whole if step != 5], "it was behind"


@pytest.mark.slow
def test_survivors_keep_their_compiled_code(crew, tmp_path, undisturbed):
    crew.begin(
        tmp_path, NOTHING, Accident("backward", 6), NOTHING, body=train_and_count_graphs, compiled=True
    )
    crew.all_ended()
    assert_exact(crew, tmp_path, {1}, undisturbed)
    for name in "02":
        assert reads(tmp_path, name, "entered") == [0, 6]
        before, *since = reads(tmp_path, name, "graphs")
        assert before == 0 and since[0] > 0 and set(since) == {since[0]}


def test_an_error_of_the_users_ends_its_own_worker_only(crew, tmp_path, undisturbed):
    crew.begin(tmp_path, NOTHING, Accident("forward", 4, fail), NOTHING)
    crew.all_ended()
    assert crew.hands[1].status == 1
    assert "Mishap: the data is bad" in (tmp_path / "1.err").read_text()
    (said,) = crew.hands[1].broken
    assert (said.round, said.fails) == (1, True) and "Mishap: the data is bad" in said.why
    assert_exact(crew, tmp_path, {1}, undisturbed)


def test_survivors_wait_for_as_long_as_their_agent_knows_of_no_end(crew, tmp_path, undisturbed):
    crew.knows = False  # as when etcd is away
    one, _, other = crew.begin(tmp_path, NOTHING, Accident("backward", 4), NOTHING, job=work_impatiently)
    crew.until(lambda: one.broken and other.broken)
    assert {(said.round, said.fails) for hand in (one, other) for said in hand.broken} == {(1, False)}
    assert "gloo" in one.broken[0].why and one.status is other.status is None
    crew.knows = True
    crew.close()
    crew.all_ended()
    assert_exact(crew, tmp_path, {1}, undisturbed)
    assert crew.settled == [(1, 3), (2, 2)]


def test_a_worker_that_loses_the_others_during_a_planned_end_reports_it(crew, tmp_path, undisturbed):
    gate = Gate(tmp_path / "gate")
    crew.begin(tmp_path, NOTHING, Accident("forward", 4, partial(lose_the_others, gate)))
    gate.until_somebody_waits()
    crew.close(planned=True)
    gate.open()
    crew.until(lambda: crew.hands[1].broken)
    assert [(said.round, said.fails) for said in crew.hands[1].broken] == [(1, False)]
    crew.all_ended()
    assert_exact(crew, tmp_path, set(), undisturbed)


def test_a_newcomer_without_the_state_ends_with_an_error_if_no_group_forms(crew, tmp_path):
    crew.knows = False
    crew.begin(tmp_path, NOTHING, Accident("forming", 0), job=work_impatiently)
    crew.all_ended()
    assert crew.hands[0].status == 1 and not crew.hands[0].broken
    assert "Error: " in (tmp_path / "0.err").read_text().splitlines()[-1]


def test_without_a_commit_a_lost_worker_ends_the_training_and_the_message_says_why(crew, tmp_path):
    crew.begin(tmp_path, NOTHING, Accident("summed", 3), body=train_without_commit)
    crew.all_ended()
    assert crew.hands[0].status == 1
    assert "state.commit() was never called" in (tmp_path / "0.err").read_text().splitlines()[-1]


@pytest.mark.parametrize("undo", [None, True])
def test_a_script_that_talks_between_step_and_commit_is_told_so_and_lost_there_unless_it_can_undo(
    crew, tmp_path, undisturbed, undo
):
    crew.begin(tmp_path, NOTHING, Accident("stepped", 5), body=train_and_talk_before_the_commit, undo=undo)
    crew.all_ended()
    said = (tmp_path / "0.err").read_text()
    assert said.count("collectives are called between the optimizer's step and state.commit()") == (not undo)
    assert "collectives are called" not in (tmp_path / "1.err").read_text()
    if undo:
        assert_exact(crew, tmp_path, {1}, undisturbed)
    else:
        assert crew.hands[0].status == 1 and "call no collective in between" in said.splitlines()[-1]


def test_workers_wait_for_a_slow_one_for_longer_than_they_would_for_one_that_connects(crew, tmp_path):
    for name in ("0", "1"):
        crew.start(work_slowly, str(tmp_path), name)
    crew.form()
    crew.all_ended()
    for i, hand in enumerate(crew.hands):
        assert hand.status == 0, (tmp_path / f"{i}.err").read_text()
        assert reads(tmp_path, str(i), "committed") == [1, 2]
    assert crew.settled == [(1, 2)]
