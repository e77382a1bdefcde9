"""Unusual steps. A death in the middle of such a step loses no step and repeats none, or the script is
refused in a sentence."""

from pathlib import Path
from typing import Any

import pytest

from tests.worker import guarding
from tests.worker.crew import Crew
from tests.worker.guarding import STEPS, Script, guarded
from tests.worker.jobs import NOTHING, Accident, Gate, reads

SURVIVED: list[type[Script]] = [
    guarding.TwoModules, guarding.Adversaries, guarding.Skipping, guarding.Closure, guarding.Lbfgs,
    guarding.Momentum, guarding.MomentumUnfrozen, guarding.Swapped, guarding.Averages, guarding.Sharp,
    guarding.Scaled, guarding.Unfrozen, guarding.UnfrozenParts, guarding.Embedded, guarding.Extra,
    guarding.Codebook,
]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[type[Script], Any]:
    """Return the final weights of a script of each kind in one worker."""
    folder = tmp_path_factory.mktemp("undisturbed")
    kinds = [*SURVIVED, guarding.SeveralModels]
    with Crew() as crew:
        hand = crew.start(guarding.undisturbed, str(folder), kinds)
        crew.all_ended()
        assert hand.status == 0, [path.read_text() for path in folder.glob("*.err")]
    return {kind: reads(folder, kind.__name__, "weights")[0] for kind in kinds}


def train(
    crew: Crew, folder: Path, kind: type[Script], *accidents: Accident, **environment: str
) -> list[Any]:
    """Train to the end. Return the workers' exit codes."""
    hands = crew.begin(folder, *accidents, job=guarded, kind=kind, **environment)
    crew.all_ended()
    return [hand.status for hand in hands]


def errors(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("*.err"))]


@pytest.mark.parametrize("kind", SURVIVED)
def test_a_death_within_a_step_leaves_the_survivors_with_what_was_committed(
    crew, tmp_path, undisturbed, kind
):
    dies = Accident("between" if issubclass(kind, guarding.Adversaries) else "forward", 5)
    assert train(crew, tmp_path, kind, NOTHING, NOTHING, dies) == [0, 0, -9], errors(tmp_path)
    for name in "01":
        assert reads(tmp_path, name, "committed") == list(range(1, STEPS + 1))
        assert reads(tmp_path, name, "entered") == [0, 5]
    [found], [other] = (reads(tmp_path, name, "weights") for name in "01")
    assert found == other
    if kind is not guarding.TwoModules:  # the workers of this script have different data
        assert found == [pytest.approx(weights, rel=1e-3, abs=1e-4) for weights in undisturbed[kind]]


def test_a_worker_without_a_batch_wraps_anew_what_the_others_have_unfrozen(crew, tmp_path):
    assert train(crew, tmp_path, guarding.UnfrozenIdle, *[NOTHING] * 3) == [0, 0, 0]
    weights = [reads(tmp_path, name, "weights") for name in "012"]
    assert weights[0] == weights[1] == weights[2]


def test_a_worker_without_a_batch_adds_up_with_the_models_that_the_others_call_in_their_order(
    crew, tmp_path, undisturbed
):
    """One of the three workers dies; the other two then have a batch each."""
    accidents = NOTHING, NOTHING, Accident("forward", 5)
    assert train(crew, tmp_path, guarding.SeveralModels, *accidents) == [0, 0, -9], errors(tmp_path)
    for name in "01":
        [found] = reads(tmp_path, name, "weights")
        expected = undisturbed[guarding.SeveralModels]
        assert found == [pytest.approx(weights, rel=1e-4, abs=1e-6) for weights in expected]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (guarding.Apart, "head.weight (and 1 more) of worker 1 differs from the other workers'"),
        (guarding.Stale, "0.weight was unfrozen after State had wrapped model"),
        (guarding.Accumulated, "gradients were added up over several commits"),
    ],
)
def test_what_would_be_silently_wrong_is_refused_in_a_sentence(crew, tmp_path, kind, sentence):
    assert 1 in train(crew, tmp_path, kind, NOTHING, NOTHING)
    assert any(sentence in text for text in errors(tmp_path))


def test_what_a_world_of_survivors_cannot_go_on_with_is_refused_in_a_sentence(crew, tmp_path):
    """One of four workers dies, and no other worker ends by a signal."""
    accidents = NOTHING, NOTHING, NOTHING, Accident("forward", 4)
    *left, dead = train(crew, tmp_path, guarding.LoneSample, *accidents)
    assert dead == -9 and 1 in left and {*left} <= {0, 1}, errors(tmp_path)
    assert any("BatchNorm was given a single sample" in text for text in errors(tmp_path))
    assert reads(tmp_path, "0", "entered")[:2] == [0, 4]


def test_a_newcomer_trains_a_layer_that_was_unfrozen_before(crew, tmp_path):
    """In the newcomer the layer was frozen when State wrapped the model."""
    gate = Gate(tmp_path / "gate")
    accidents = Accident("forward", 5, gate.wait_and_leave), Accident("forward", 4)
    crew.begin(tmp_path, *accidents, job=guarded, kind=guarding.Unfrozen)
    crew.until(lambda: crew.round == 2)
    gate.until_somebody_waits()
    crew.grow(crew.start(guarded, str(tmp_path), "2", kind=guarding.Unfrozen))
    gate.open()
    crew.all_ended()
    assert [hand.status for hand in crew.hands] == [0, -9, 0], errors(tmp_path)
    assert reads(tmp_path, "2", "entered") == [6]
    assert reads(tmp_path, "0", "weights") == reads(tmp_path, "2", "weights")


def test_a_newcomer_can_undo_its_first_step_if_the_others_copy_at_commits(crew, tmp_path):
    comes, dies = Gate(tmp_path / "comes"), Gate(tmp_path / "dies")
    waits = Accident("forward", 5, comes.wait_and_leave)
    [first] = crew.begin(tmp_path, waits, job=guarded, kind=guarding.Sharp)
    comes.until_somebody_waits()
    heir = crew.start(guarded, str(tmp_path), "1", Accident("forward", 6, dies.wait), kind=guarding.Sharp)
    crew.grow(heir)
    comes.open()
    crew.until(lambda: crew.round == 2)
    dies.until_somebody_waits()
    first.process.kill()
    dies.open()
    crew.all_ended()
    assert heir.status == 0, errors(tmp_path)
    assert reads(tmp_path, "1", "entered") == [6, 6]
    assert reads(tmp_path, "1", "committed") == [7, 8]


def test_survivors_go_back_to_a_checkpoint_from_before_an_optimizer_began(tmp_path, new_saver):
    disturbed, alone = tmp_path / "disturbed", tmp_path / "alone"
    dies = Accident("forward", 3)
    for folder, accidents, ends in (
        (disturbed, [NOTHING, NOTHING, dies], [0, 0, -9]),
        (alone, [NOTHING], [0]),
    ):
        folder.mkdir()
        wants = {"ELASTICD_SAVER": new_saver(), "ELASTICD_CHECKPOINTS": str(folder / "run")}
        with Crew() as crew:
            assert train(crew, folder, guarding.Beginning, *accidents, **wants) == ends, errors(folder)
    [_, entered] = reads(disturbed, "0", "entered")
    assert 0 < entered <= 3
    [expected] = reads(alone, "0", "weights")
    for name in "01":
        [weights] = reads(disturbed, name, "weights")
        assert weights == [pytest.approx(e, rel=1e-3, abs=1e-4) for e in expected]
