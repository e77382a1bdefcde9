"""A state that outlives all its workers: killed at once, or sent away, with nobody left who has it."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd.checkpoint.pointer import FilePointer
from elasticd.core.cadence import EverySteps
from elasticd.worker.world import World
from tests.checkpoint.faults import Helper
from tests.worker.crew import Crew
from tests.worker.jobs import NOTHING, STEPS, Accident, Journal, reads, train, work

COMMITTED = 7


@pytest.fixture
def savers() -> Iterator[Helper]:
    with Helper("forker.py") as helper:
        yield helper


@pytest.fixture
def saver(savers: Helper) -> str:
    """One that stays, as an agent's does."""
    return savers.saver(linger_s=None)[0]


@pytest.fixture
def other_saver(savers: Helper) -> str:
    """Of another node, or after a restart of this one: it has nothing in memory."""
    return savers.saver(linger_s=None)[0]


def begin(crew: Crew, folder: Path, saver: str, count: int, *, of: int = 0, **options: object) -> None:
    names = range(of, of + count)
    hands = [crew.start(work, str(folder), str(i), saver=saver, **options) for i in names]
    crew.all_waiting(*hands)
    crew.form(*hands)


def saved_steps(folder: Path) -> list[int]:
    return [s.step for s in FilePointer(folder).read().saved]


def assert_undisturbed(crew: Crew, folder: Path, names: range, undisturbed: dict[str, object]) -> None:
    for i in names:
        errors = (folder / f"{i}.err").read_text()
        assert crew.hands[i].status == 0, errors
        [outcome] = reads(folder, str(i), "outcome")
        assert [key for key in undisturbed if outcome[key] != undisturbed[key]] == [], errors


def end_of(state: object, journal: Journal, accident: Accident, steps: int) -> None:
    """Everybody dies at once, after so many steps, when what was handed over is on disk."""
    train(state, journal, accident, COMMITTED)
    state._lasting._checkpoints.wait()
    os.kill(os.getpid(), 9)


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_world_killed_at_once_goes_on_from_what_outlived_it(
    crew, tmp_path, saver, other_saver, undisturbed, tier
):
    run = tmp_path / "run"
    begin(crew, tmp_path, saver, 2, checkpoints=str(run), body=end_of)
    crew.until(lambda: all(hand.status is not None for hand in crew.hands))
    steps = saved_steps(run)
    assert steps
    if tier == "memory":
        for saved in FilePointer(run).read().saved:
            shutil.rmtree(run / saved.name)
    begin(crew, tmp_path, saver if tier == "memory" else other_saver, 2, of=2, checkpoints=str(run))
    crew.all_ended()
    assert_undisturbed(crew, tmp_path, range(2, 4), undisturbed)
    for i in (2, 3):
        assert reads(tmp_path, str(i), "entered") == [steps[-1]]


def train_until_told_to_leave(state: object, journal: Journal, accident: Accident, steps: int) -> None:
    told, ask = threading.Event(), World.ask_to_leave

    def tell(world: World, going: bool) -> None:
        ask(world, going)
        told.set()

    World.ask_to_leave = tell
    train(state, journal, Accident("start", 4, told.wait), steps)


@pytest.mark.parametrize("count", [1, 2])
def test_a_world_sent_away_hands_every_step_to_a_newcomer(
    crew, tmp_path, saver, other_saver, undisturbed, count
):
    run = tmp_path / "run"
    begin(crew, tmp_path, saver, count, checkpoints=str(run), body=train_until_told_to_leave)
    newcomer = crew.start(work, str(tmp_path), str(count), saver=other_saver, checkpoints=str(run))
    crew.hand_over(newcomer)
    left = max(reads(tmp_path, "0", "committed"))
    assert saved_steps(run)[-1] == left
    crew.all_ended()
    assert_undisturbed(crew, tmp_path, range(count, count + 1), undisturbed)
    assert reads(tmp_path, str(count), "entered") == [left]


def train_and_wait_for_the_disk(state: object, journal: Journal, accident: Accident, steps: int) -> None:
    train(state, journal, accident, steps)
    state._lasting._checkpoints.wait()


def train_until_others_come(state: object, journal: Journal, accident: Accident, steps: int) -> None:
    train_until_told_to_leave(state, journal, accident, steps)
    state._lasting._checkpoints.wait()


def test_what_survivors_and_a_newcomer_hand_over_together_is_committed(crew, tmp_path, saver):
    run = tmp_path / "run"
    begin(crew, tmp_path, saver, 1, checkpoints=str(run), body=train_until_others_come)
    more = {"saver": saver, "checkpoints": str(run), "body": train_and_wait_for_the_disk}
    newcomer = crew.start(work, str(tmp_path), "1", **more)
    crew.grow(newcomer)
    crew.all_ended()
    [joined] = reads(tmp_path, "1", "entered")
    assert 0 < joined < saved_steps(run)[-1]


def train_seldom_saved(state: object, journal: Journal, accident: Accident, steps: int) -> None:
    state._lasting._checkpoints._schedule.cadence = EverySteps(1000)
    train_and_wait_for_the_disk(state, journal, accident, steps)


def test_survivors_save_at_once_what_perhaps_nobody_else_has(crew, tmp_path, saver):
    run = tmp_path / "run"
    more = {"saver": saver, "checkpoints": str(run), "body": train_seldom_saved}
    accidents = [NOTHING, Accident("forward", 4), NOTHING]
    hands = [crew.start(work, str(tmp_path), str(i), its, **more) for i, its in enumerate(accidents)]
    crew.all_waiting(*hands)
    crew.form(*hands)
    crew.all_ended()
    assert reads(tmp_path, "0", "entered") == [0, 4]
    assert saved_steps(run)[0] == 5


def test_the_end_of_training_is_saved_and_a_job_that_is_run_again_has_nothing_left_to_do(
    crew, tmp_path, saver, undisturbed
):
    run = tmp_path / "run"
    begin(crew, tmp_path, saver, 2, checkpoints=str(run))
    crew.all_ended()
    assert_undisturbed(crew, tmp_path, range(2), undisturbed)
    begin(crew, tmp_path, saver, 1, of=2, checkpoints=str(run))
    crew.all_ended()
    assert reads(tmp_path, "2", "entered") == [STEPS] and not reads(tmp_path, "2", "committed")


def end_on_disk(state: object, journal: Journal, accident: Accident, steps: int) -> None:
    train(state, journal, accident, steps)
    state.finish()
    state._lasting._checkpoints.wait()


def restored(state: object) -> int:
    state.seen.extend(range(3))
    return 3


def test_restore_is_asked_only_where_nothing_was_kept(crew, tmp_path, saver):
    run = tmp_path / "run"
    begin(crew, tmp_path, saver, 1, checkpoints=str(run), restore=restored, steps=6)
    crew.all_ended()
    assert reads(tmp_path, "0", "entered") == [3]
    begin(crew, tmp_path, saver, 1, of=1, checkpoints=str(run), restore=restored, steps=8)
    crew.all_ended()
    assert reads(tmp_path, "1", "entered") == [6]


def test_restore_is_asked_where_no_checkpoint_is_whole_and_without_it_that_is_an_error(
    crew, tmp_path, saver, other_saver
):
    run = tmp_path / "run"
    begin(crew, tmp_path, saver, 1, checkpoints=str(run), steps=4, body=end_on_disk)
    crew.all_ended()
    assert saved_steps(run)[-1] == 4
    for saved in FilePointer(run).read().saved:
        shutil.rmtree(run / saved.name)
    begin(crew, tmp_path, other_saver, 1, of=1, checkpoints=str(run), steps=4)
    crew.all_ended()
    assert crew.hands[1].status == 1
    assert "no checkpoint is whole" in (tmp_path / "1.err").read_text()
    begin(crew, tmp_path, other_saver, 1, of=2, checkpoints=str(run), restore=restored, steps=4)
    crew.all_ended()
    assert reads(tmp_path, "2", "entered") == [3]
