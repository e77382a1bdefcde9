"""Workers that train a sharded model join, leave and die. The other workers keep their process, and lose no
step."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from elasticd.channel.worker_messages import Source
from elasticd.worker.sharding.expected_state import expected_slots
from tests.worker import shardjob
from tests.worker.audited import assert_each_sample_is_used_once
from tests.worker.crew import Crew, outcome_alone
from tests.worker.jobs import NOTHING, Accident, Gate, reads
from tests.worker.shardjob import STEPS
from tests.worker.worlds import in_world


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the losses and the outcome of an undisturbed training in one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    outcome = outcome_alone(shardjob.train, folder)
    assert not any(reads(folder, "alone", "keeps_beginning"))
    return {"outcome": outcome, "losses": reads(folder, "alone", "losses")}


def close(expected: Any, rounding: float = 1e-9) -> Any:
    """Whether two nested values are equal within rounding."""
    if isinstance(expected, dict):
        return {name: close(value, rounding) for name, value in expected.items()}
    if isinstance(expected, list):
        return [close(value, rounding) for value in expected]
    return pytest.approx(expected, rel=rounding, abs=rounding / 1000)


def assert_trained(
    crew: Crew,
    folder: Path,
    workers: Iterable[int],
    undisturbed: dict[str, Any],
    rounding: float = 1e-9,
) -> None:
    """Check that these workers have ended well, with the outcome of the undisturbed training."""
    for number in workers:
        assert crew.hands[number].status == 0, (folder / f"{number}.err").read_text()
        assert reads(folder, str(number), "outcome")[-1] == close(undisturbed["outcome"], rounding)


def assert_like(
    crew: Crew,
    folder: Path,
    survivors: Collection[int],
    undisturbed: dict[str, Any],
    rounding: float = 1e-9,
    again: Sequence[int] = (),
) -> None:
    """Check that the survivors have committed each step once, with the losses and the outcome of the
    undisturbed training, and that none keeps the whole model after a commit. ``again``: the commits that they
    have made twice."""
    assert_trained(crew, folder, survivors, undisturbed, rounding)
    for name in map(str, survivors):
        committed = reads(folder, name, "committed")
        assert sorted(committed) == sorted([*set(committed), *again]), "a step was made twice"
        assert committed[-1:] in ([], [STEPS])
        for step, *numbers in reads(folder, name, "losses"):
            assert [step, *numbers] == close(undisturbed["losses"][step], rounding)
        assert not any(reads(folder, name, "keeps_beginning")), "the whole model is in the host's memory"


OTHERS = [("forward", 0), ("summed", 2), ("stepped", 1)]


@pytest.mark.parametrize(
    ("point", "victim"), [("copying", 1), *(pytest.param(*at, marks=pytest.mark.slow) for at in OTHERS)]
)
def test_survivors_of_a_death_go_on_with_the_copies_of_the_lost_shard(
    crew, tmp_path, undisturbed, point, victim
):
    accidents = [NOTHING] * 3
    accidents[victim] = Accident(point, 4)
    crew.begin(tmp_path, *accidents, job=shardjob.train)
    crew.all_ended()
    survivors = {0, 1, 2} - {victim}
    assert_like(crew, tmp_path, survivors, undisturbed)
    assert crew.settled == [(1, 3), (2, 2)]
    assert all(crew.hands[i].entered[-1].source == Source.COPY for i in survivors)
    assert_told_of_memory(crew)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature", "more", "rounding"),
    [
        ("mixed", {}, 1e-4),
        ("recomputed", {}, 1e-9),
        ("offloaded", {}, 1e-9),
        ("compiled", {}, 1e-9),
        ("wrapped", {}, 1e-9),
        ("compiled before", {}, 1e-9),
        ("bare", {}, 1e-9),
        ("layers only", {}, 1e-9),
        ("left out", {"unit": 2}, 1e-9),
        ("left out", {"virtual_ranks": 3, "accumulate": 2}, 1e-9),
        ("", {"virtual_ranks": 3, "accumulate": 2}, 1e-9),
        ("", {"virtual_ranks": 2, "unit": 2}, 1e-9),
    ],
    ids=[
        "mixed precision",
        "recomputed activations",
        "offload",
        "compiled",
        "checkpoint_wrapper",
        "torch.compile",
        "meta device",
        "only one layer is sharded",
        "ignored_params and hybrid",
        "ignored_params and accumulation",
        "accumulation",
        "hybrid",
    ],
)
def test_torch_features_of_a_sharded_model_survive_a_new_layout(
    crew, tmp_path, undisturbed, feature, more, rounding
):
    one_dies_and_a_newcomer_joins(crew, tmp_path, feature=feature, **more)
    ended = [0, *range(2, len(crew.hands))]
    assert_like(crew, tmp_path, ended, undisturbed, rounding)
    compiles = feature.startswith("compiled")
    assert all((reads(tmp_path, str(n), "graphs")[-1] > 0) == compiles for n in ended)


@pytest.mark.slow
@pytest.mark.parametrize("sums_once", [False, True], ids=["sums each time", "sums once"])
def test_a_script_that_accumulates_gradients_itself_survives_a_new_layout(
    crew, tmp_path, undisturbed, sums_once
):
    one_dies_and_a_newcomer_joins(crew, tmp_path, job=shardjob.train_in_halves, sums_once=sums_once)
    assert_like(crew, tmp_path, (0, 2, 3), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature", "more"),
    [
        ("bfloat16", {}),
        ("recomputed", {}),
        ("offloaded", {}),
        ("compiled", {}),
        ("bare", {}),
        ("layers only", {}),
        ("left out", {"unit": 2}),
        ("", {"accumulate": 2}),
        ("bfloat16", {"accumulate": 2, "unit": 2}),
    ],
    ids=[
        "mixed precision",
        "recomputed activations",
        "offload",
        "compiled",
        "meta device",
        "only one layer is sharded",
        "ignored_params and hybrid",
        "accumulation",
        "hybrid",
    ],
)
def test_in_consistent_mode_what_torch_does_with_a_sharded_model_keeps_its_bits(
    crew, tmp_path, feature, more
):
    """The losses and the outcome have the bits of an undisturbed training in one process."""
    consistent = {"feature": feature, "virtual_ranks": 5, "consistent": True, **more}
    alone = tmp_path / "undisturbed"
    alone.mkdir()
    outcome = outcome_alone(functools.partial(shardjob.train, **consistent), alone)
    losses = reads(alone, "alone", "losses")
    one_dies_and_a_newcomer_joins(crew, tmp_path, **consistent)
    for number in (0, *range(2, len(crew.hands))):
        name = str(number)
        assert crew.hands[number].status == 0, (tmp_path / f"{name}.err").read_text()
        assert all(loss == losses[loss[0]] for loss in reads(tmp_path, name, "losses"))
        assert reads(tmp_path, name, "outcome") == [outcome]
        assert (reads(tmp_path, name, "graphs")[-1] > 0) == (feature == "compiled")


def one_dies_and_a_newcomer_joins(
    crew: Crew, folder: Path, *, unit: int = 1, job: Callable[..., None] = shardjob.train, **options: Any
) -> None:
    """Train with two workers for each worker of a unit, but at least three. Let worker 1 die. Later a
    newcomer joins the others."""
    size = max(3, 2 * unit)
    gate = Gate(folder / "gate")
    accidents = Accident("start", 5, gate.wait_and_leave), Accident("summed", 2), *[NOTHING] * (size - 2)
    crew.begin(folder, *accidents, job=job, unit=unit, **options)
    crew.until(lambda: crew.round == 2)
    gate.until_somebody_waits()
    crew.grow(crew.start(job, str(folder), str(size), unit=unit, **options))
    gate.open()
    crew.all_ended()
    assert crew.settled == [(1, size), (2, size - 1), (3, size)]


def assert_told_of_memory(crew: Crew) -> None:
    """Check what the workers of two worlds report before the first step. The size of the whole state is the
    same, though the optimizer had no state in the first world. Each worker keeps two commits of its own
    shard, and of the shard of one other worker."""
    worlds = [[m for hand in crew.hands for m in hand.entered if m.round == round] for round in (1, 2)]
    elements = sum(p.numel() for p in shardjob.Net().parameters())
    frozen = sum(p.numel() for p in shardjob.Net().frozen.parameters())
    whole = 8 * (elements + 2 * (elements - frozen))  # in float64, with the optimizer's two moments
    for told in worlds:
        assert sum(m.shard_bytes for m in told) == pytest.approx(whole, abs=16 * 3 * 6 * len(told))
        assert sum(m.copies_bytes for m in told) == 4 * sum(m.shard_bytes for m in told)


@pytest.mark.parametrize(
    ("make", "slots"),
    [
        (torch.optim.AdamW, {"exp_avg", "exp_avg_sq"}),
        (functools.partial(torch.optim.Adam, amsgrad=True), {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        (functools.partial(torch.optim.SGD, lr=0.1), set()),
        (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), {"momentum_buffer"}),
        (functools.partial(torch.optim.LBFGS, lr=0.1), set()),
        (shardjob.Odd, set()),
    ],
)
def test_what_an_optimizer_will_keep_is_known_before_its_first_step(make: Any, slots: set[str]) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
    optimizer = make([parameter])
    steps: list[object] = []
    hook = register_optimizer_step_post_hook(lambda *step: steps.append(step))
    found = expected_slots(optimizer, optimizer.param_groups[0], parameter)
    hook.remove()
    assert found == dict.fromkeys(slots, torch.bfloat16)
    assert not optimizer.state and not steps and parameter.grad is None


def test_a_newcomer_is_given_its_shard_at_a_commit(crew, tmp_path, undisturbed):
    gate = Gate(tmp_path / "gate")
    more = {"redundancy": 0, "virtual_ranks": 5}
    crew.start(shardjob.train, str(tmp_path), "0", Accident("start", 3, gate.wait), **more)
    for name in "12":
        crew.start(shardjob.train, str(tmp_path), name, **more)
    crew.all_waiting(*crew.hands)
    crew.form(*crew.hands[:2])
    gate.until_somebody_waits()
    crew.close(planned=True)
    gate.open()
    crew.all_ended()
    assert_like(crew, tmp_path, range(3), undisturbed)
    assert crew.settled == [(1, 2), (2, 3)]
    assert_each_sample_is_used_once(tmp_path, STEPS * shardjob.BATCH)
    assert reads(tmp_path, "0", "entered")[0] == 0 and reads(tmp_path, "2", "entered")[0] >= 4


def test_a_leaving_worker_hands_its_shard_over_and_needs_no_copies(crew, tmp_path, undisturbed):
    gate = Gate(tmp_path / "gate")
    accidents = Accident("start", 3, gate.wait), NOTHING, NOTHING
    leaver, *_ = crew.begin(tmp_path, *accidents, job=shardjob.train, redundancy=0)
    gate.until_somebody_waits()
    leaver.shunned = True
    crew.close(planned=True, going=(leaver,))
    gate.open()
    crew.until(lambda: leaver.waiting)
    leaver.process.kill()
    crew.all_ended()
    crew.until(lambda: leaver.status is not None)
    assert_like(crew, tmp_path, (1, 2), undisturbed)
    assert crew.settled == [(1, 3), (2, 2)]


@pytest.mark.parametrize(
    ("stay", "redundancy"),
    [(1, 0), (2, 1), (1, 1)],
)
def test_a_world_that_shrinks_by_more_workers_than_there_are_copies_loses_nothing(
    crew, tmp_path, undisturbed, stay, redundancy
):
    gate = Gate(tmp_path / "gate")
    accidents = Accident("start", 3, gate.wait), NOTHING, NOTHING, NOTHING
    crew.begin(tmp_path, *accidents, job=shardjob.train, redundancy=redundancy)
    gate.until_somebody_waits()
    going = (*crew.hands[stay:],)
    crew.least = 5  # the test forms the next round
    crew.close(planned=True, going=going)
    gate.open()
    crew.until(lambda: all(hand.waiting for hand in crew.hands))
    for hand in going:
        hand.shunned = True
        hand.process.kill()
    crew.least = 1
    crew.form(*crew.hands[:stay])
    crew.all_ended()
    crew.until(lambda: all(hand.status is not None for hand in going))
    assert_like(crew, tmp_path, range(stay), undisturbed)
    assert crew.settled == [(1, 4), (2, stay)]


def test_a_death_while_shards_are_on_their_way_to_a_newcomer_costs_the_others_nothing(
    crew, tmp_path, undisturbed
):
    """One worker dies in its second step. A survivor dies in the second round, while shards are moved for the
    third round, in which a newcomer takes part. So three, two, three and two workers train."""
    gate = Gate(tmp_path / "gate")
    accidents = Accident("start", 4, gate.wait), Accident("summed", 2), Accident("moving", 3)
    crew.begin(tmp_path, *accidents, job=shardjob.train)
    crew.until(lambda: crew.round == 2)
    gate.until_somebody_waits()
    newcomer = crew.start(shardjob.train, str(tmp_path), "3")
    crew.grow(newcomer)
    gate.open()
    crew.all_ended()
    assert_like(crew, tmp_path, (0, 3), undisturbed)
    assert crew.settled == [(1, 3), (2, 2), (3, 3), (4, 2)]


@pytest.mark.slow
def test_the_same_sizes_of_worlds_come_again(crew, tmp_path, undisturbed):
    gate = Gate(tmp_path / "gate")
    accidents = Accident("start", 2, gate.wait), Accident("summed", 1), NOTHING
    crew.begin(tmp_path, *accidents, job=shardjob.train)
    crew.until(lambda: crew.round == 2)
    gate.until_somebody_waits()
    crew.grow(crew.start(shardjob.train, str(tmp_path), "3", Accident("stepped", 5)))
    gate.open()
    crew.all_ended()
    assert_like(crew, tmp_path, (0, 2), undisturbed)
    assert crew.settled == [(1, 3), (2, 2), (3, 3), (4, 2)]


def test_replicas_of_a_shard_stand_in_for_it_and_the_mesh_of_a_world_has_replicas_again(
    crew, tmp_path, undisturbed
):
    """Two replicas of a model train on two workers each. In a world of three all workers hold one model."""
    gate = Gate(tmp_path / "gate")
    accidents = Accident("start", 5, gate.wait), Accident("stepped", 2), NOTHING, NOTHING
    more = {"unit": 2, "virtual_ranks": 3}
    crew.begin(tmp_path, *accidents, job=shardjob.train, **more)
    crew.until(lambda: crew.round == 2)
    gate.until_somebody_waits()
    crew.grow(crew.start(shardjob.train, str(tmp_path), "4", **more))
    gate.open()
    crew.all_ended()
    assert_like(crew, tmp_path, (0, 2, 3, 4), undisturbed)
    assert_each_sample_is_used_once(tmp_path, STEPS * shardjob.BATCH)
    assert crew.settled == [(1, 4), (2, 3), (3, 4)]
    assert all(reads(tmp_path, str(i), "mesh") == [[2, 2], [3], [2, 2]] for i in (0, 2, 3))
    assert all(crew.hands[i].entered[1].source == Source.REPLICA for i in (0, 2, 3))


@pytest.mark.slow
def test_a_shard_whose_replicas_are_all_lost_comes_from_the_newest_checkpoint(
    crew, tmp_path, saver, undisturbed
):
    gate = Gate(tmp_path / "gate")
    more = {"saver": saver, "checkpoints": str(tmp_path / "run"), "redundancy": 0, "unit": 2}
    accidents = NOTHING, Accident("saved", 4, gate.wait), NOTHING, NOTHING
    crew.begin(tmp_path, *accidents, job=shardjob.train, **more)
    gate.until_somebody_waits()
    for name in (1, 3):
        crew.hands[name].process.kill()
    crew.all_ended()
    assert_trained(crew, tmp_path, (0, 2), undisturbed)
    assert crew.hands[0].entered[-1].source == Source.MEMORY


def test_with_overlap_a_loss_undoes_at_most_the_commit_of_which_copies_are_on_their_way(
    crew, tmp_path, undisturbed
):
    """Four commits are made when the worker dies. The others continue from the third if the copy of the dead
    worker's shard has not arrived, and else from the fourth."""
    accidents = NOTHING, Accident("summed", 4), NOTHING
    crew.begin(tmp_path, *accidents, job=shardjob.train, overlap=True, virtual_ranks=3)
    crew.all_ended()
    assert crew.settled == [(1, 3), (2, 2)]
    last = [crew.hands[survivor].entered[-1] for survivor in (0, 2)]
    assert {(its.source, its.step) for its in last} in ({(Source.COPY, 3)}, {(Source.COPY, 4)})
    assert_like(crew, tmp_path, (0, 2), undisturbed, again=range(last[0].step + 1, 5))
    assert_each_sample_is_used_once(tmp_path, STEPS * shardjob.BATCH)


@pytest.mark.parametrize("overlap", [True, False])
def test_after_more_losses_than_copies_survivors_and_newcomers_load_the_checkpoint_together(
    crew, tmp_path, saver, undisturbed, overlap
):
    gate = Gate(tmp_path / "gate")
    more = {"saver": saver, "checkpoints": str(tmp_path / "run"), "overlap": overlap}
    accidents = NOTHING, Accident("saved", 4, gate.wait), NOTHING
    crew.begin(tmp_path, *accidents, job=shardjob.train, **more)
    gate.until_somebody_waits()
    crew.start(shardjob.train, str(tmp_path), "3", **more)
    for lost in (1, 2):
        crew.hands[lost].process.kill()
    crew.least = 2
    crew.all_ended()
    assert_trained(crew, tmp_path, (0, 3), undisturbed)
    assert all(crew.hands[name].entered[-1].source == Source.MEMORY for name in (0, 3))


def test_after_losses_in_a_world_s_first_step_survivors_and_newcomers_load_the_checkpoint_together(
    crew, tmp_path, saver, undisturbed
):
    """The copies with which the second of three worlds begins are on their way when two workers die."""
    more = {"saver": saver, "checkpoints": str(tmp_path / "run")}
    gate = Gate(tmp_path / "gate")
    again = Accident("start", 4, int, then=Accident("start", 4, gate.wait))
    crew.begin(tmp_path, NOTHING, Accident("start", 4), again, NOTHING, job=shardjob.train, **more)
    crew.until(lambda: crew.round == 2)
    gate.until_somebody_waits()
    crew.start(shardjob.train, str(tmp_path), "4", **more)
    for lost in (2, 3):
        crew.hands[lost].process.kill()
    crew.least = 2
    crew.all_ended()
    assert_trained(crew, tmp_path, (0, 4), undisturbed)


def test_a_commit_during_which_a_worker_is_lost_leaves_the_two_before_it_as_they_are(tmp_path):
    assert in_world(1, tmp_path, shardjob.kept_while_a_world_ends) == [(1.0, 2.0)]


def test_a_world_that_cannot_change_keeps_no_copies(tmp_path):
    for kept in in_world(2, tmp_path, shardjob.kept_alone):
        assert kept == (0, True)


def test_with_overlap_a_planned_change_undoes_nothing(crew, tmp_path, undisturbed):
    gate = Gate(tmp_path / "gate")
    crew.begin(tmp_path, Accident("start", 5, gate.wait_and_leave), NOTHING, job=shardjob.train, overlap=True)
    gate.until_somebody_waits()
    crew.grow(crew.start(shardjob.train, str(tmp_path), "2", overlap=True))
    gate.open()
    crew.all_ended()
    assert_like(crew, tmp_path, (0, 1, 2), undisturbed)
    assert crew.settled == [(1, 2), (2, 3)]


def test_two_workers_at_once_are_lost_without_loss_if_there_are_two_copies(crew, tmp_path, undisturbed):
    accidents = NOTHING, Accident("stepped", 4), Accident("stepped", 4), NOTHING
    crew.begin(tmp_path, *accidents, job=shardjob.train, redundancy=2)
    crew.all_ended()
    assert_like(crew, tmp_path, (0, 3), undisturbed)


@pytest.mark.parametrize("feature", ["", "bare"], ids=["whole at the start", "meta device"])
def test_losses_before_the_first_commit_have_the_rest_begin_again(crew, tmp_path, undisturbed, feature):
    """One of four workers dies in the first step. More than there are copies die when they begin it again."""
    again = Accident("start", 0, int, then=Accident("start", 0))
    second = Accident("start", 0, int, then=Accident("start", 0))
    crew.begin(tmp_path, NOTHING, again, second, Accident("summed", 0), job=shardjob.train, feature=feature)
    crew.all_ended()
    assert_like(crew, tmp_path, (0,), undisturbed)


@pytest.mark.parametrize("feature", ["", "left out"], ids=["all are sharded", "ignored_params"])
def test_a_loss_before_the_first_commit_is_made_good_from_copies_of_the_initial_values(
    crew, tmp_path, undisturbed, feature
):
    accidents = NOTHING, Accident("summed", 0), NOTHING
    crew.begin(tmp_path, *accidents, job=shardjob.train, feature=feature, copies_first=True)
    crew.all_ended()
    assert_like(crew, tmp_path, (0, 2), undisturbed)
    assert all(crew.hands[i].entered[-1].source == Source.COPY for i in (0, 2))


def test_a_loss_in_the_first_step_of_a_world_is_made_good_from_the_copies_of_the_commit_it_began_with(
    crew, tmp_path, undisturbed
):
    """Of three workers one dies in the fourth step, and one of the other two when they make that step again.
    Copies of the layout of three would not suffice."""
    again = Accident("start", 3, int, then=Accident("start", 3, int, then=Accident("forward", 3)))
    crew.begin(tmp_path, NOTHING, Accident("summed", 3), again, job=shardjob.train, copies_first=True)
    crew.all_ended()
    assert_like(crew, tmp_path, (0,), undisturbed)
    assert crew.settled == [(1, 3), (2, 2), (3, 1)]
    assert (crew.hands[0].entered[-1].source, crew.hands[0].entered[-1].step) == (Source.COPY, 3)


def test_a_worker_that_should_have_stayed_and_leaves_hands_over_before_the_next_world(
    crew, tmp_path, undisturbed
):
    """The job shrinks from three workers to two, and to one before these two train."""
    gate = Gate(tmp_path / "gate")
    accidents = Accident("start", 3, gate.wait), NOTHING, NOTHING
    stays, second, third = crew.begin(tmp_path, *accidents, job=shardjob.train, redundancy=0)
    gate.until_somebody_waits()
    crew.least = 4  # the test forms the next rounds
    crew.close(planned=True, going=(third,))
    gate.open()
    crew.until(lambda: all(hand.waiting for hand in crew.hands))
    third.process.kill()
    second.shunned = True
    crew.form(stays, second, handover=True)
    crew.until(lambda: all(hand.waiting and hand.waiting.round == 2 for hand in (stays, second)))
    second.process.kill()
    crew.until(lambda: second.status is not None)
    crew.form(stays)
    crew.all_ended()
    assert_like(crew, tmp_path, (0,), undisturbed)
    assert crew.settled == [(1, 3), (2, 2), (3, 1)]
    assert stays.entered[-1].source == Source.SURVIVOR


def test_the_only_worker_hands_all_of_it_over(crew, tmp_path, undisturbed):
    gate = Gate(tmp_path / "gate")
    for name, accident in zip("012", (Accident("start", 3, gate.wait), NOTHING, NOTHING), strict=True):
        crew.start(shardjob.train, str(tmp_path), name, accident, redundancy=0)
    leaver, *others = crew.hands
    crew.all_waiting(*crew.hands)
    crew.least = 4  # the test forms the next round
    crew.form(leaver)
    gate.until_somebody_waits()
    crew.close(planned=True)
    gate.open()
    crew.until(lambda: leaver.waiting)
    leaver.shunned = True
    crew.form(*others, leaver, handover=True)
    crew.until(lambda: all(hand.waiting and hand.waiting.round == 2 for hand in crew.hands))
    leaver.process.kill()
    crew.until(lambda: leaver.status is not None)
    crew.form(*others)
    crew.all_ended()
    assert_like(crew, tmp_path, (1, 2), undisturbed)


def test_a_lost_shard_without_a_checkpoint_ends_the_job_with_a_sentence(crew, tmp_path):
    crew.begin(tmp_path, NOTHING, Accident("summed", 4), job=shardjob.train, redundancy=0)
    crew.all_ended()
    assert crew.hands[0].status == 1
    said = (tmp_path / "0.err").read_text().splitlines()[-1]
    assert "StateLost: no worker has " in said and "parameters of step 4 any more" in said
    assert "give State redundancy=1 or more, or checkpoints" in said


@pytest.mark.parametrize(
    ("nodes", "copies", "source", "feature"),
    [
        ("aaa", False, Source.MEMORY, ""),
        ("abc", True, Source.PEER, ""),
        ("aba", False, Source.DISK, ""),
        ("aba", False, Source.DISK, "left out"),
        ("aba", False, Source.DISK, "bare"),
    ],
)
def test_a_lost_shard_comes_from_the_newest_checkpoint(
    crew, tmp_path, savers, undisturbed, nodes, copies, source, feature
):
    """Worker 1 is lost, and what its node's saver has if no other worker is there. ``nodes``: of each worker.
    ``copies``: each saver has copies of another's shards. ``feature``: of the model."""
    gate, run, peers = Gate(tmp_path / "gate"), str(tmp_path / "run"), tmp_path / "peers"
    peers.mkdir()
    more = [{"node": node, "peers": str(peers)} if copies else {} for node in sorted({*nodes})]
    of = dict(zip(sorted({*nodes}), (savers.saver(linger_s=None, **each) for each in more), strict=True))
    for number, node in enumerate(nodes):
        accident = Accident("saved", 4, gate.wait) if number == 1 else NOTHING
        options = {"saver": of[node][0], "node": node if copies else "", "checkpoints": run, "redundancy": 0}
        options["feature"] = feature
        crew.start(shardjob.train, str(tmp_path), str(number), accident, **options)
    crew.form()
    gate.until_somebody_waits()
    if nodes.count(nodes[1]) == 1:
        os.kill(of[nodes[1]][1], signal.SIGKILL)
    crew.hands[1].process.kill()
    crew.all_ended()
    assert_trained(crew, tmp_path, (0, 2), undisturbed)
    assert all(crew.hands[name].entered[-1].source == source for name in (0, 2))


@pytest.mark.parametrize(
    ("feature", "sentence"),
    [
        ("bare", "some workers have built the model on the meta device, and others have not"),
        ("left out", "shard= shards other parameters in some workers than in others"),
    ],
)
def test_workers_that_build_or_shard_the_model_in_different_ways_are_refused_in_a_sentence(
    crew, tmp_path, feature, sentence
):
    for name, its in (("0", ""), ("1", feature)):
        crew.start(shardjob.train, str(tmp_path), name, feature=its)
    crew.form()
    crew.all_ended()
    for name in "01":
        assert sentence in (tmp_path / f"{name}.err").read_text().splitlines()[-1]


def test_an_init_that_draws_other_values_in_each_worker_is_refused_in_a_sentence(crew, tmp_path):
    crew.begin(tmp_path, NOTHING, NOTHING, job=shardjob.train, feature="bare, own seed")
    crew.all_ended()
    for name in "01":
        said = (tmp_path / f"{name}.err").read_text().splitlines()[-1]
        assert "init= gives body.weight different values in different workers: draw them from" in said


def test_what_cannot_be_sharded_anew_is_refused_in_a_sentence(tmp_path):
    said = in_world(1, tmp_path, shardjob.refusals)[0]
    assert [name for name, sentence in said.items() if shardjob.REFUSED[name] not in sentence] == []


def test_a_layout_keeps_what_the_script_has_set_and_lets_go_of_the_process_group(tmp_path):
    before, after, references = in_world(1, tmp_path, shardjob.laid_out_twice)[0]
    assert before == after
    assert references == 0, "a world's group stays in memory, with its threads and connections"


def test_numbers_and_tensors_in_another_order_of_memory_stay_as_they_are(tmp_path):
    before, after = in_world(1, tmp_path, shardjob.laid_out_with_odd_parameters)[0]
    assert before == after
