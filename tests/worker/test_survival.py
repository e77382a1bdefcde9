"""Workers die at the worst instants; those that are left go on, and arrive where nobody would have died."""

from pathlib import Path

import pytest

from tests.worker.crew import Crew
from tests.worker.jobs import NOTHING, STEPS, Accident, reads, work


def begin(crew: Crew, folder: Path, count: int, accidents: dict[int, Accident], **options: object) -> None:
    """Workers "0" to "count - 1" in a first round."""
    for i in range(count):
        crew.start(work, str(folder), str(i), accidents.get(i, NOTHING), **options)
    crew.all_waiting(*crew.hands)
    crew.form(*crew.hands)


def assert_exact(crew: Crew, folder: Path, dead: set[int], undisturbed: dict) -> None:
    """Every survivor has committed each step once, in order, and has come to the same end."""
    for i, hand in enumerate(crew.hands):
        if i in dead:
            assert hand.status == -9
            continue
        errors = (folder / f"{i}.err").read_text()
        assert hand.status == 0, errors
        [outcome] = reads(folder, str(i), "outcome")
        assert [key for key in undisturbed if outcome[key] != undisturbed[key]] == [], f"worker {i} {errors}"
        committed = reads(folder, str(i), "committed")
        first = reads(folder, str(i), "entered")[0]
        assert sorted(set(committed)) == committed, "a step was made twice"
        assert committed[-1] == STEPS or first == STEPS
    for hand in crew.hands:
        if hand.status == 0:
            assert hand.done


@pytest.mark.parametrize(
    "point", ["forward", "backward", "summed", "in the optimizer", "stepped", "committed"]
)
def test_survivors_of_a_death_go_on_with_no_step_lost_or_repeated(crew, tmp_path, undisturbed, point):
    begin(crew, tmp_path, 3, {1: Accident(point, 4)})
    crew.all_ended()
    assert_exact(crew, tmp_path, {1}, undisturbed)
    assert crew.settled == [(1, 3), (2, 2)]
