"""Steps out of the ordinary: a death in their midst is survived without a step lost or made twice, or the
script is refused in a sentence."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.faults import Helper
from tests.worker.crew import Crew
from tests.worker.guarding import STEPS, guarded
from tests.worker.jobs import NOTHING, Accident, Gate, reads

POINTS = {"Adversaries": "between"}
SURVIVED = (
    "TwoModules", "Adversaries", "Closure", "Lbfgs", "Momentum", "MomentumUnfrozen", "Swapped", "Averages",
    "Sharp", "Scaled", "Unfrozen", "UnfrozenParts", "Embedded", "Extra", "Codebook",
)  # fmt: skip


@pytest.fixture
def savers() -> Iterator[Helper]:
    with Helper("forker.py") as helper:
        yield helper


def train(
    crew: Crew, folder: Path, kind: str, accidents: list[Accident], **environment: str
) -> list[int | None]:
    folder.mkdir()
    before = len(crew.hands)
    hands = [
        crew.start(guarded, str(folder), str(i), kind, a, **environment) for i, a in enumerate(accidents)
    ]
    crew.all_waiting(*hands)
    crew.form(*hands)
    crew.until(lambda: all(h.status is not None for h in crew.hands[before:]))
    return [h.status for h in hands]


@pytest.mark.parametrize(
    "kind",
    SURVIVED,
)
def test_a_death_within_a_step_leaves_the_survivors_with_what_was_committed(crew, tmp_path, kind):
    point = POINTS.get(kind, "forward")
    assert train(crew, tmp_path / "disturbed", kind, [NOTHING, NOTHING, Accident(point, 5)]) == [0, 0, -9], [
        (tmp_path / "disturbed" / f"{i}.err").read_text() for i in range(2)
    ]
    for name in "01":
        assert reads(tmp_path / "disturbed", name, "committed") == list(range(1, STEPS + 1))
        assert reads(tmp_path / "disturbed", name, "entered") == [0, 5]
    [expected] = reads(tmp_path / "disturbed", "0", "weights")
    assert reads(tmp_path / "disturbed", "1", "weights") == [expected]
    if kind == "TwoModules":
        return  # what a mean comes to is another in a smaller world
    with Crew() as other:
        assert train(other, tmp_path / "undisturbed", kind, [NOTHING, NOTHING]) == [0, 0]
    [undisturbed] = reads(tmp_path / "undisturbed", "0", "weights")
    assert expected == [pytest.approx(e, rel=1e-3, abs=1e-4) for e in undisturbed]


def test_a_worker_without_a_batch_wraps_anew_what_the_others_have_unfrozen(crew, tmp_path):
    assert train(crew, tmp_path / "idle", "UnfrozenIdle", [NOTHING] * 3) == [0, 0, 0]
    weights = [reads(tmp_path / "idle", name, "weights") for name in "012"]
    assert weights[0] == weights[1] == weights[2]


def test_a_worker_without_a_batch_adds_up_with_the_models_that_the_others_call_in_their_order(crew, tmp_path):
    """One of the three workers that have a batch or none dies; the other two then have one each."""
    accidents = [NOTHING, NOTHING, Accident("forward", 5)]
    assert train(crew, tmp_path / "three", "SeveralModels", accidents) == [0, 0, -9]
    with Crew() as other:
        assert train(other, tmp_path / "two", "SeveralModels", [NOTHING, NOTHING]) == [0, 0]
    [expected] = reads(tmp_path / "two", "0", "weights")
    for name in "01":
        [found] = reads(tmp_path / "three", name, "weights")
        assert found == [pytest.approx(e, rel=1e-4, abs=1e-6) for e in expected]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("Apart", "head.weight (and 1 more) of worker 1 differs from the other workers'"),
        ("Stale", "0.weight was unfrozen after State had wrapped model"),
        ("Accumulated", "gradients were added up over several commits"),
    ],
)
def test_what_would_be_silently_wrong_is_refused_in_a_sentence(crew, tmp_path, kind, sentence):
    assert 1 in train(crew, tmp_path / "refused", kind, [NOTHING, NOTHING])
    assert any(sentence in (tmp_path / "refused" / f"{i}.err").read_text() for i in range(2))


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("Lengths", "queue cannot be saved, as it is float32 [3] on rank 0 and float32 [4] on rank 1"),
        ("Contrastive", "the model or its loss calls collectives for each batch"),
        ("LoneSample", "BatchNorm was given a single sample"),
    ],
)
def test_what_a_world_of_survivors_cannot_go_on_with_is_refused_in_a_sentence(
    crew, tmp_path, savers, kind, sentence
):
    """Of four, one dies; nobody is taken down by a signal."""
    statuses = train(
        crew,
        tmp_path / "refused",
        kind,
        [NOTHING, NOTHING, NOTHING, Accident("forward", 4)],
        ELASTICD_SAVER=savers.saver(linger_s=None)[0],
        ELASTICD_CHECKPOINTS=str(tmp_path / "run"),
    )
    errors = [(tmp_path / "refused" / f"{i}.err").read_text() for i in range(3)]
    assert statuses[3] == -9 and 1 in statuses and {*statuses[:3]} <= {0, 1}, errors
    assert any(sentence in text for text in errors), errors
    assert reads(tmp_path / "refused", "0", "entered")[:2] == [0, 4]


def test_who_comes_after_a_layer_was_unfrozen_trains_it_with_the_others(crew, tmp_path):
    """To that worker the layer was frozen when State wrapped the model."""
    gate = Gate(tmp_path / "gate")
    for name, accident in (("0", Accident("forward", 5, gate.wait_and_leave)), ("1", Accident("forward", 4))):
        crew.start(guarded, str(tmp_path), name, "Unfrozen", accident)
    crew.all_waiting(*crew.hands)
    crew.form(*crew.hands)
    crew.until(lambda: crew.round == 2)
    gate.until_somebody_waits()
    crew.grow(crew.start(guarded, str(tmp_path), "2", "Unfrozen", NOTHING))
    gate.open()
    crew.all_ended()
    assert [hand.status for hand in crew.hands] == [0, -9, 0], (tmp_path / "2.err").read_text()
    assert reads(tmp_path, "2", "entered") == [6]
    assert reads(tmp_path, "0", "weights") == reads(tmp_path, "2", "weights")


def test_who_comes_can_undo_its_first_step_where_the_others_have_seen_that_it_must(crew, tmp_path):
    comes, dies = Gate(tmp_path / "comes"), Gate(tmp_path / "dies")
    first = crew.start(guarded, str(tmp_path), "0", "Sharp", Accident("forward", 5, comes.wait_and_leave))
    crew.all_waiting(first)
    crew.form(first)
    comes.until_somebody_waits()
    heir = crew.start(guarded, str(tmp_path), "1", "Sharp", Accident("forward", 6, dies.wait))
    crew.grow(heir)
    comes.open()
    crew.until(lambda: crew.round == 2)
    dies.until_somebody_waits()
    first.process.kill()
    dies.open()
    crew.all_ended()
    assert heir.status == 0, (tmp_path / "1.err").read_text()
    assert reads(tmp_path, "1", "entered") == [6, 6]
    assert reads(tmp_path, "1", "committed") == [7, 8]


def test_what_a_script_changes_after_the_commit_is_said_before_a_kill_loses_it(crew, tmp_path):
    assert train(crew, tmp_path / "late", "Late", [NOTHING, Accident("forward", 5)]) == [0, -9]
    assert (
        "lr of optimizer was changed between state.commit() and the next step"
        in (tmp_path / "late" / "0.err").read_text()
    )


def test_survivors_go_back_to_a_checkpoint_from_before_an_optimizer_began(crew, tmp_path, savers):
    wants = {"ELASTICD_SAVER": savers.saver(linger_s=None)[0], "ELASTICD_CHECKPOINTS": str(tmp_path / "run")}
    folder = tmp_path / "disturbed"
    statuses = train(crew, folder, "Beginning", [NOTHING, NOTHING, Accident("forward", 3)], **wants)
    assert statuses == [0, 0, -9], (folder / "0.err").read_text()
    [_, entered] = reads(folder, "0", "entered")
    assert 0 < entered <= 3
    with Crew() as other:
        wants["ELASTICD_CHECKPOINTS"] += " of others"
        assert train(other, tmp_path / "undisturbed", "Beginning", [NOTHING], **wants) == [0]
    [undisturbed] = reads(tmp_path / "undisturbed", "0", "weights")
    for name in "01":
        [weights] = reads(folder, name, "weights")
        assert weights == [pytest.approx(e, rel=1e-3, abs=1e-4) for e in undisturbed]
