"""A State with one value of each kind: all values reach a newcomer after a kill, from a survivor and from
a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worker import many
from tests.worker.crew import outcome_alone
from tests.worker.jobs import NOTHING, Accident, Gate, reads


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the digests of all values of a training that nothing disturbs."""
    return outcome_alone(many.train, tmp_path_factory.mktemp("alone"), "digests")


def differing(folder: Path, name: str, expected: dict[str, str]) -> list[str]:
    [digests] = reads(folder, name, "digests")
    return [thing for thing in expected if digests[thing] != expected[thing]]


def test_a_newcomer_gets_every_kind_of_value_after_a_worker_was_killed(crew, tmp_path, expected):
    """A newcomer whose script has the groups in another order is refused, and costs the others nothing. Then
    the last of the first workers is killed, so all that is left was handed over."""
    comes, dies = Gate(tmp_path / "comes"), Gate(tmp_path / "dies")
    accidents = Accident("forward", 5, comes.wait_and_leave), Accident("forward", 3)
    first, _ = crew.begin(tmp_path, *accidents, job=many.train)
    crew.until(lambda: crew.round == 2)
    comes.until_somebody_waits()
    turned = crew.start(many.train, str(tmp_path), "2", turned=True)
    heir = crew.start(many.train, str(tmp_path), "3", Accident("forward", 8, dies.wait))
    crew.grow(turned, heir)
    comes.open()
    crew.until(lambda: turned.status is not None and crew.round == 4)
    dies.until_somebody_waits()
    first.process.kill()
    dies.open()
    crew.all_ended()
    assert turned.status == 1
    assert "of_grouped has its parameters in another order here" in (tmp_path / "2.err").read_text()
    assert heir.status == 0, (tmp_path / "3.err").read_text()
    assert reads(tmp_path, "0", "entered")[:3] == [0, 3, 6] and reads(tmp_path, "3", "entered")[-1] == 8
    assert differing(tmp_path, "3", expected) == []


def test_every_kind_of_value_comes_back_from_a_checkpoint_after_all_workers_were_killed(
    crew, tmp_path, new_saver, expected
):
    """The new workers run a script that has the groups in another order."""
    gates = [Gate(tmp_path / name) for name in "01"]
    more = {"saver": new_saver(), "checkpoints": str(tmp_path / "run")}
    accidents = [Accident("saved", many.SAVED, gate.wait) for gate in gates]
    hands = crew.begin(tmp_path, *accidents, job=many.train, **more)
    for gate in gates:  # both have saved before one is killed: the other one would train on alone
        gate.until_somebody_waits()
    for hand in hands:
        hand.process.kill()
    crew.until(lambda: all(hand.status is not None for hand in hands))
    more["saver"] = new_saver()
    crew.begin(tmp_path, NOTHING, NOTHING, job=many.train, first=2, turned=True, **more)
    crew.all_ended()
    assert [hand.status for hand in crew.hands] == [-9, -9, 0, 0], (tmp_path / "2.err").read_text()
    [entered] = reads(tmp_path, "2", "entered")
    assert 0 < entered <= many.SAVED
    for name in "23":
        assert differing(tmp_path, name, expected) == []
