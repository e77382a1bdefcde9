"""Steps out of the ordinary: a death in their midst is survived without a step lost or made twice, or the
script is refused in a sentence."""

from pathlib import Path

import pytest

from tests.worker.crew import Crew
from tests.worker.guarding import STEPS, guarded
from tests.worker.jobs import NOTHING, Accident, reads

POINTS = {"Adversaries": "between"}


def train(crew: Crew, folder: Path, kind: str, accidents: list[Accident]) -> list[int | None]:
    folder.mkdir()
    before = len(crew.hands)
    hands = [crew.start(guarded, str(folder), str(i), kind, a) for i, a in enumerate(accidents)]
    crew.all_waiting(*hands)
    crew.form(*hands)
    crew.until(lambda: all(h.status is not None for h in crew.hands[before:]))
    return [h.status for h in hands]


@pytest.mark.parametrize(
    "kind",
    ["TwoModules", "Adversaries", "Closure", "Lbfgs", "Momentum", "Swapped", "Unfrozen", "Extra", "Codebook"],
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


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("Apart", "head.weight (and 1 more) of worker 1 is not what the other workers have"),
        ("Stale", "0.weight was unfrozen after State had wrapped model"),
        ("Accumulated", "gradients were added up over several commits"),
    ],
)
def test_what_would_be_silently_wrong_is_refused_in_a_sentence(crew, tmp_path, kind, sentence):
    assert 1 in train(crew, tmp_path / "refused", kind, [NOTHING, NOTHING])
    assert any(sentence in (tmp_path / "refused" / f"{i}.err").read_text() for i in range(2))
