"""Each worker has a part of the model. When a worker dies, the units that are whole continue in their
processes, and the lost unit comes back. No step is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elasticd import worker
from elasticd.channel.worker_messages import Source
from elasticd.worker.sharding.held import CommitPoint
from elasticd.worker.splitting.split_state import HeldPart, newest_whole_point
from tests.worker import splitjob
from tests.worker.audited import assert_each_sample_is_used_once
from tests.worker.crew import Crew
from tests.worker.jobs import NOTHING, Accident, Gate, reads
from tests.worker.splitjob import STEPS


def assert_like(crew: Crew, folder: Path, survivors: list[int]) -> None:
    """Check that the survivors have made each step once, and that their parts together are the weights of the
    undisturbed training."""
    expected = splitjob.undisturbed()
    found: dict[str, Any] = {}
    for number in survivors:
        assert crew.hands[number].status == 0, (folder / f"{number}.err").read_text()
        committed = reads(folder, str(number), "committed")
        assert committed == sorted(set(committed)) and committed[-1] == STEPS
        for name, values in reads(folder, str(number), "weights")[-1].items():
            found[name] = values
            flat = torch.tensor(values).flatten().tolist()
            assert flat == pytest.approx(torch.tensor(expected[name]).flatten().tolist(), rel=1e-6)
    assert found.keys() == expected.keys()


@pytest.mark.parametrize(
    ("by", "point"),
    [
        ("pipeline", "backward"),
        ("tensor", "summed"),
        *(pytest.param(by, "stepped", marks=pytest.mark.slow) for by in ("pipeline", "tensor")),
    ],
)
def test_the_other_unit_goes_on_when_a_worker_dies_and_the_lost_unit_is_back(crew, tmp_path, by, point):
    gate = Gate(tmp_path / "gate")
    for number, accident in enumerate(
        [NOTHING, Accident(point, 3), Accident("start", 5, gate.wait), NOTHING]
    ):
        crew.start(splitjob.train, str(tmp_path), str(number), accident, by=by)
    crew.least = 5  # the test chooses the workers of the next world
    crew.form(*crew.hands)
    crew.all_waiting(crew.hands[0], *crew.hands[2:])
    crew.form(*crew.hands[2:])
    replacement = crew.start(splitjob.train, str(tmp_path), "4", by=by)
    gate.until_somebody_waits()
    crew.least = 4
    crew.grow(replacement)
    gate.open()
    crew.all_ended()
    assert crew.settled == [(1, 4), (2, 2), (3, 4)]
    assert all(hand.entered[-1].source == Source.SURVIVOR for hand in crew.hands if hand.status == 0)
    assert_like(crew, tmp_path, [0, 2, 3, 4])
    assert_each_sample_is_used_once(tmp_path, splitjob.STEPS * splitjob.BATCH)


def test_a_lost_part_ends_the_job_with_a_sentence(crew, tmp_path):
    """Two units have lost the worker of the same place, so their rest makes no unit."""
    accidents = [NOTHING, Accident("backward", 3), NOTHING, Accident("backward", 3)]
    for number, accident in enumerate(accidents):
        crew.start(splitjob.train, str(tmp_path), str(number), accident)
    crew.least = 5
    crew.form(*crew.hands)
    crew.all_waiting(crew.hands[0], crew.hands[2])
    crew.form(crew.hands[0], crew.hands[2])
    crew.all_ended()
    said = (tmp_path / "0.err").read_text()
    assert "no worker has the part of place 1 in a unit of 2 as of step 3" in said


def test_a_newcomer_and_the_others_have_the_parameters_frozen_that_were_at_the_last_commit(crew, tmp_path):
    gates = [Gate(tmp_path / f"gate{number}") for number in range(2)]
    for number, gate in enumerate(gates):
        crew.start(splitjob.freeze, str(tmp_path), str(number), Accident("start", 4, gate.wait_and_leave))
    crew.form(*crew.hands)
    for gate in gates:
        gate.until_somebody_waits()
    newcomers = [crew.start(splitjob.freeze, str(tmp_path), str(number)) for number in (2, 3)]
    crew.grow(*newcomers)
    for gate in gates:
        gate.open()
    crew.all_ended()
    assert [hand.status for hand in crew.hands] == [0] * 4
    assert [reads(tmp_path, str(number), "trained") for number in range(4)] == [
        [["0.weight", "0.bias"], []],
        [[], ["2.bias"]],
        [[]],
        [["2.bias"]],
    ]


POINTS = [CommitPoint(1, step, 0) for step in range(4)]


@pytest.mark.parametrize(
    ("held", "newest"),
    [
        ([], None),
        ([(0, [2, 3]), (1, [2, 3])], 3),
        ([(0, [2, 3]), (1, [1, 2])], 2),  # a worker died while the others committed
        ([(0, [2, 3]), (1, [1, 2]), (1, [2, 3])], 3),
        ([(0, [2, 3]), (0, [2, 3])], None),
        ([(0, [0, 1]), (1, [2, 3])], None),
    ],
)
def test_training_goes_on_from_the_newest_commit_of_which_each_part_is_held(
    held: list[tuple[int, list[int]]], newest: int | None
) -> None:
    brought = [HeldPart(place, tuple(POINTS[n] for n in steps)) for place, steps in held]
    found = newest_whole_point(2, brought)
    assert (found.step if found is not None else None) == newest


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"split": 3}, "split= is a function"),
        ({"shard": lambda *_: None}, "either shard= or split="),
        ({"undo": True}, "takes no undo= with split="),
        ({"other": nn.Linear(1, 1)}, "keeps one module"),
    ],
)
def test_a_state_that_cannot_be_split_is_refused(given: dict[str, Any], sentence: str) -> None:
    model = nn.Linear(2, 2)
    given = {"split": lambda whole, unit: whole, **given}
    with pytest.raises(TypeError, match=sentence):
        worker.State(model, torch.optim.SGD(model.parameters()), **given)
