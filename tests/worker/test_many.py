"""One of each kind of thing in a State: all of it reaches who comes after a kill, live and by checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.faults import Helper
from tests.worker import many
from tests.worker.crew import Crew
from tests.worker.jobs import NOTHING, Accident, Gate, reads


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What things are where nothing happens."""
    folder = tmp_path_factory.mktemp("alone")
    with Crew() as crew:
        crew.start(alone, str(folder))
        crew.all_ended()
        assert crew.hands[0].status == 0, (folder / "alone.err").read_text()
    [digests] = reads(folder, "alone", "digests")
    return digests


def alone(_address: str, folder: str) -> None:
    many.train("", folder, "alone")


def differing(folder: Path, name: str, expected: dict[str, str]) -> list[str]:
    [digests] = reads(folder, name, "digests")
    return [thing for thing in expected if digests[thing] != expected[thing]]


def test_all_things_reach_who_comes_when_a_worker_was_killed(crew, tmp_path, expected):
    """One whose script has its groups in another order is refused, and costs the others nothing. Then the
    last of those who were there from the start is killed: what is left was handed over."""
    comes, dies = Gate(tmp_path / "comes"), Gate(tmp_path / "dies")
    first = crew.start(many.train, str(tmp_path), "0", Accident("forward", 5, comes.wait_and_leave))
    crew.start(many.train, str(tmp_path), "1", Accident("forward", 3))
    crew.all_waiting(*crew.hands)
    crew.form(*crew.hands)
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


def test_all_things_come_back_from_a_checkpoint_when_all_workers_were_killed(crew, tmp_path, expected):
    """To a script that has its groups in another order."""
    gates = [Gate(tmp_path / name) for name in "01"]
    with Helper("forker.py") as savers:
        for names, turned in (("01", False), ("23", True)):
            hands = [
                crew.start(
                    many.train,
                    str(tmp_path),
                    name,
                    NOTHING if turned else Accident("saved", many.SAVED, gate.wait),
                    turned=turned,
                    saver=savers.saver(linger_s=None)[0],
                    checkpoints=str(tmp_path / "run"),
                )
                for name, gate in zip(names, gates, strict=True)
            ]
            crew.all_waiting(*hands)
            crew.form(*hands)
            if not turned:  # both have saved before one dies: the other would train on alone
                for gate in gates:
                    gate.until_somebody_waits()
                for hand in hands:
                    hand.process.kill()
            crew.until(lambda hands=hands: all(hand.status is not None for hand in hands))
    assert [hand.status for hand in crew.hands] == [-9, -9, 0, 0], (tmp_path / "2.err").read_text()
    [entered] = reads(tmp_path, "2", "entered")
    assert 0 < entered <= many.SAVED
    for name in "23":
        assert differing(tmp_path, name, expected) == []
