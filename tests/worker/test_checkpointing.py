"""A state outlives all its workers: they are killed at once or told to leave, and no worker is left that has
the state."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from elasticd import worker
from elasticd.channel.worker_messages import Enter, Holds, Source
from elasticd.checkpoint.client.resuming import Kept
from elasticd.checkpoint.client.schedule import EverySteps
from elasticd.checkpoint.newest.pointer import FilePointer
from elasticd.core.age import Age
from elasticd.worker.checkpoints import Checkpoints
from elasticd.worker.commit import checkpointing
from elasticd.worker.commit.checkpointing import CommitCheckpoints
from elasticd.worker.world.group import World
from tests.worker.crew import Crew, Hand
from tests.worker.jobs import (
    LEAVING,
    NOTHING,
    STEPS,
    Accident,
    Gate,
    Journal,
    hear_of_leaving,
    reads,
    run_out_of_memory,
    train,
    train_astray,
    work,
)

COMMITTED = 7


def saved_steps(folder: Path) -> list[int]:
    return [s.step for s in FilePointer(folder).read().saved]


def assert_undisturbed(crew: Crew, folder: Path, names: range, undisturbed: dict[str, object]) -> None:
    for i in names:
        errors = (folder / f"{i}.err").read_text()
        assert crew.hands[i].status == 0, errors
        [outcome] = reads(folder, str(i), "outcome")
        assert [key for key in undisturbed if outcome[key] != undisturbed[key]] == [], errors


def end_of(state: object, journal: Journal, accident: Accident, steps: int) -> None:
    """Have all workers die at once after so many steps, when the saved steps are on disk."""
    train(state, journal, accident, COMMITTED)
    state._committed.saves.checkpoints.wait()
    os.kill(os.getpid(), 9)


def test_the_last_step_is_saved_however_long_those_before_it_take(savers, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointing, "GOING_S_MAX", 0.01)
    monkeypatch.setattr(checkpointing.dist, "get_rank", lambda: 0)
    monkeypatch.setenv("ELASTICD_SAVER", savers.saver(bytes_s=1e7)[0])  # each save takes a fifth of a second
    checkpoints = Checkpoints(tmp_path / "run")
    last = CommitCheckpoints(checkpoints)
    parts = checkpointing.Parts({"w": torch.zeros(1 << 19)}, {}, {})
    for parts.step in (1, 2):
        last.after_commit(parts, None, ends=False)
    assert not checkpoints.skipped
    parts.step = 3
    last.finished(parts, None)
    assert checkpoints.wait() and not checkpoints.failed
    assert saved_steps(tmp_path / "run") == [1, 2, 3]
    checkpoints.close()


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_world_killed_at_once_goes_on_from_what_outlived_it(
    crew, tmp_path, saver, new_saver, undisturbed, tier
):
    run = tmp_path / "run"
    crew.begin(tmp_path, NOTHING, NOTHING, saver=saver, checkpoints=str(run), body=end_of)
    crew.until(lambda: all(hand.status is not None for hand in crew.hands))
    steps = saved_steps(run)
    assert steps
    if tier == "memory":
        for saved in FilePointer(run).read().saved:
            shutil.rmtree(run / saved.name)
    crew.begin(
        tmp_path,
        NOTHING,
        NOTHING,
        saver=saver if tier == "memory" else new_saver(),
        first=2,
        checkpoints=str(run),
    )
    crew.all_ended()
    assert_undisturbed(crew, tmp_path, range(2, 4), undisturbed)
    for i in (2, 3):
        assert reads(tmp_path, str(i), "entered") == [steps[-1]]


def train_on_without(spare: Hand, last: Hand, crew: Crew, gate: Gate) -> None:
    """Shrink the job by the spare. Then lose the worker that has trained on."""
    crew.form(last, spare)
    gate.until_somebody_waits()
    spare.shunned = True
    crew.close(planned=True)
    gate.open()
    crew.until(lambda: last.status is not None)


@pytest.mark.parametrize("tier", [Source.MEMORY, Source.DISK])
def test_a_worker_outside_the_last_world_continues_from_the_state_that_this_world_kept(
    crew, tmp_path, saver, new_saver, undisturbed, tier
):
    """The spare has a whole state of the time when the job shrank. The worker that trained on has ended."""
    run, gate = tmp_path / "run", Gate(tmp_path / "gate")
    more = {"checkpoints": str(run)}
    leaves = Accident("start", 2, gate.wait)
    last = crew.start(work, str(tmp_path), "0", leaves, saver=saver, body=end_of, **more)
    spare = crew.start(
        work, str(tmp_path), "1", saver=saver if tier is Source.MEMORY else new_saver(), **more
    )
    train_on_without(spare, last, crew, gate)
    assert crew.settled == [(1, 2), (2, 1)]
    kept = saved_steps(run)[-1]  # perhaps not the very last step, if the disk was busy
    assert spare.waiting.state is Holds.WHOLE and spare.waiting.step < kept
    spare.shunned = False
    crew.form(spare)
    crew.all_ended()
    assert_undisturbed(crew, tmp_path, range(1, 2), undisturbed)
    assert reads(tmp_path, "1", "entered") == [0, kept]
    assert spare.entered[-1].source == tier


def train_in_company(state: object, journal: Journal, accident: Accident, steps: int) -> None:
    if worker.world_size() == 1:
        os.kill(os.getpid(), 9)
    train(state, journal, accident, steps)


def test_a_worker_outside_the_last_world_keeps_its_own_state_if_that_world_came_no_further(
    crew, tmp_path, saver, undisturbed
):
    run, gate = tmp_path / "run", Gate(tmp_path / "gate")
    more = {"saver": saver, "checkpoints": str(run)}
    last = crew.start(
        work, str(tmp_path), "0", Accident("start", 2, gate.wait), body=train_in_company, **more
    )
    spare = crew.start(work, str(tmp_path), "1", **more)
    train_on_without(spare, last, crew, gate)
    spare.shunned = False
    crew.form(spare)
    crew.all_ended()
    assert_undisturbed(crew, tmp_path, range(1, 2), undisturbed)
    assert reads(tmp_path, "1", "committed") == list(range(1, STEPS + 1))
    assert spare.entered[-1].source is Source.SURVIVOR


@pytest.mark.parametrize(
    ("kept", "beyond"),
    [
        (None, False),
        (Kept(2, 30), False),  # the same round, whose world was given up
        (Kept(3, 30), True),
        (Kept(3, 25), False),
        (Kept(9, 20), False),  # the folder has outlived another job, so rounds have large numbers
    ],
)
def test_what_was_kept_is_newer_only_if_it_came_further_in_a_later_world(monkeypatch, kept, beyond):
    monkeypatch.setattr("elasticd.worker.agent_link.agentpage.has_checkpoints", lambda: None)
    checkpoints = SimpleNamespace(keep_in_step=lambda: None, newest_kept=lambda: kept)
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "", "MASTER_PORT": "0"}
    assert CommitCheckpoints(checkpoints).has_newer(Age(2, 25), World(Enter(4, env))) is beyond


def train_with_trouble_in_saving(state: object, journal: Journal, accident: Accident, steps: int) -> None:
    checkpoints = state._committed.saves.checkpoints
    save = checkpoints.save

    def save_if_nothing_happens(parts: object, step: int) -> bool:
        accident("saving", step)
        return save(parts, step)

    checkpoints.save = save_if_nothing_happens
    train(state, journal, NOTHING, steps)


def test_a_worker_without_memory_to_save_the_state_dies_of_it_alone(crew, tmp_path, saver, undisturbed):
    more = {"saver": saver, "checkpoints": str(tmp_path / "run"), "body": train_with_trouble_in_saving}
    accidents = [NOTHING, Accident("saving", 5, run_out_of_memory)]
    hands = crew.begin(tmp_path, *accidents, **more)
    crew.all_ended()
    assert hands[1].status == 1
    assert "can't allocate memory" in (tmp_path / "1.err").read_text()
    assert_undisturbed(crew, tmp_path, range(1), undisturbed)
    assert crew.settled == [(1, 2), (2, 1)]
    assert reads(tmp_path, "0", "committed") == list(range(1, STEPS + 1))


def train_in_two_parts(state: object, journal: Journal, accident: Accident, steps: int) -> None:
    """Train in two parts. Between the two, every save is on disk."""
    train(state, journal, NOTHING, accident.step)
    state._committed.saves.checkpoints.wait()
    train(state, journal, accident, steps)


def train_astray_to_the_end(state: object, journal: Journal, accident: Accident, steps: int) -> None:
    train_astray(state, journal, accident, steps)
    state._committed.saves.checkpoints.wait()
    journal.write(complaint=state._committed.saves.checkpoints.last_error)


def test_a_worker_that_wakes_after_it_was_replaced_can_commit_no_checkpoint(
    crew, tmp_path, saver, undisturbed
):
    """No message can reach this worker to tell it that it was replaced, and it trains on alone."""
    run = tmp_path / "run"
    asleep, held = Gate(tmp_path / "asleep"), Gate(tmp_path / "held")
    more = {"saver": saver, "checkpoints": str(run)}
    late = Accident("summed", 4, asleep.wait)
    sleeper = crew.start(work, str(tmp_path), "0", late, body=train_astray_to_the_end, **more)
    crew.form(sleeper)
    asleep.until_somebody_waits()
    sleeper.shunned = True
    heir = crew.start(
        work, str(tmp_path), "1", Accident("start", 8, held.wait), body=train_in_two_parts, **more
    )
    crew.form(heir)
    held.until_somebody_waits()
    assert 0 < reads(tmp_path, "1", "entered")[0] <= 4
    asleep.open()
    crew.until(lambda: sleeper.status is not None)
    assert reads(tmp_path, "0", "committed") == list(range(1, STEPS + 1)), "as far as it could see"
    [complaint] = reads(tmp_path, "0", "complaint")
    assert "round 2 has committed since" in complaint
    newest = FilePointer(run).read().newest
    assert newest.round == 2 and newest.step <= 8
    third = crew.start(work, str(tmp_path), "2", **more)
    heir.process.kill()
    crew.until(lambda: heir.status is not None)
    crew.form(third)
    crew.all_ended()
    assert reads(tmp_path, "2", "entered") == [newest.step]
    assert_undisturbed(crew, tmp_path, range(2, 3), undisturbed)


def work_until_told_to_leave(
    address: str, folder: str, name: str, _: Accident = NOTHING, **options: object
) -> None:
    """Wait before a step until this worker is told to leave, which may follow at once after it is told to
    enter."""
    hear_of_leaving()
    work(address, folder, name, Accident("start", 4, LEAVING.wait), **options)


@pytest.mark.parametrize("count", [1, 2])
def test_a_world_sent_away_hands_every_step_to_a_newcomer(
    crew, tmp_path, saver, new_saver, undisturbed, count
):
    run = tmp_path / "run"
    crew.begin(tmp_path, *[NOTHING] * count, saver=saver, checkpoints=str(run), job=work_until_told_to_leave)
    newcomer = crew.start(work, str(tmp_path), str(count), saver=new_saver(), checkpoints=str(run))
    crew.hand_over(newcomer)
    left = max(reads(tmp_path, "0", "committed"))
    assert saved_steps(run)[-1] == left
    crew.all_ended()
    assert_undisturbed(crew, tmp_path, range(count, count + 1), undisturbed)
    assert reads(tmp_path, str(count), "entered") == [left]


def train_and_wait_for_the_disk(state: object, journal: Journal, accident: Accident, steps: int) -> None:
    train(state, journal, accident, steps)
    state._committed.saves.checkpoints.wait()


def test_what_survivors_and_a_newcomer_hand_over_together_is_committed(crew, tmp_path, saver):
    run = tmp_path / "run"
    more = {"checkpoints": str(run), "body": train_and_wait_for_the_disk}
    crew.begin(tmp_path, NOTHING, saver=saver, job=work_until_told_to_leave, **more)
    newcomer = crew.start(work, str(tmp_path), "1", saver=saver, **more)
    crew.grow(newcomer)
    crew.all_ended()
    [joined] = reads(tmp_path, "1", "entered")
    assert 0 < joined < saved_steps(run)[-1]


def train_seldom_saved(state: object, journal: Journal, accident: Accident, steps: int) -> None:
    state._committed.saves.checkpoints._schedule.cadence = EverySteps(1000)
    train_and_wait_for_the_disk(state, journal, accident, steps)


def test_survivors_save_at_once_since_they_may_have_the_only_copy(crew, tmp_path, saver):
    run = tmp_path / "run"
    more = {"saver": saver, "checkpoints": str(run), "body": train_seldom_saved}
    accidents = [NOTHING, Accident("forward", 4), NOTHING]
    crew.begin(tmp_path, *accidents, **more)
    crew.all_ended()
    assert reads(tmp_path, "0", "entered") == [0, 4]
    assert saved_steps(run)[0] == 5


def test_the_end_of_training_is_saved_and_a_job_that_is_run_again_has_nothing_left_to_do(
    crew, tmp_path, saver, undisturbed
):
    run = tmp_path / "run"
    crew.begin(tmp_path, NOTHING, NOTHING, saver=saver, checkpoints=str(run))
    crew.all_ended()
    assert_undisturbed(crew, tmp_path, range(2), undisturbed)
    crew.begin(tmp_path, NOTHING, saver=saver, first=2, checkpoints=str(run))
    crew.all_ended()
    assert reads(tmp_path, "2", "entered") == [STEPS] and not reads(tmp_path, "2", "committed")


def end_on_disk(state: object, journal: Journal, accident: Accident, steps: int) -> None:
    train(state, journal, accident, steps)
    state._loop.finish()
    state._committed.saves.checkpoints.wait()


def restored(state: object) -> int:
    state.seen.extend(range(3))
    return 3


def test_restore_is_asked_only_where_nothing_was_kept(crew, tmp_path, saver):
    run = tmp_path / "run"
    crew.begin(tmp_path, NOTHING, saver=saver, checkpoints=str(run), restore=restored, steps=6)
    crew.all_ended()
    assert reads(tmp_path, "0", "entered") == [3]
    crew.begin(tmp_path, NOTHING, saver=saver, first=1, checkpoints=str(run), restore=restored, steps=8)
    crew.all_ended()
    assert reads(tmp_path, "1", "entered") == [6]


def test_restore_is_asked_where_no_checkpoint_is_whole_and_without_it_that_is_an_error(
    crew, tmp_path, saver, new_saver
):
    run = tmp_path / "run"
    crew.begin(tmp_path, NOTHING, saver=saver, checkpoints=str(run), steps=4, body=end_on_disk)
    crew.all_ended()
    assert saved_steps(run)[-1] == 4
    for saved in FilePointer(run).read().saved:
        shutil.rmtree(run / saved.name)
    crew.begin(tmp_path, NOTHING, saver=new_saver(), first=1, checkpoints=str(run), steps=4)
    crew.all_ended()
    assert crew.hands[1].status == 1
    assert "no checkpoint is whole" in (tmp_path / "1.err").read_text()
    crew.begin(tmp_path, NOTHING, saver=new_saver(), first=2, checkpoints=str(run), restore=restored, steps=4)
    crew.all_ended()
    assert reads(tmp_path, "2", "entered") == [3]


def end_with_each_step_on_disk(state: object, journal: Journal, accident: Accident, steps: int) -> None:
    """Train in a round with a large number, and save each step."""
    os.environ["ELASTICD_ROUND"] = "50"
    state._committed.saves.checkpoints.close()  # the worker was asked for what there is in round 1
    for step in range(1, COMMITTED + 1):
        train(state, journal, NOTHING, step)
        state._committed.saves.checkpoints.wait()
    os.kill(os.getpid(), 9)


def damage(folder: Path) -> None:
    with (folder / "__0_0.distcp").open("r+b") as file:
        file.seek(3000)
        file.write(b"\xff\0\xff\0" * 8)


def test_survivors_keep_their_steps_where_what_was_kept_beyond_them_proves_damaged(
    crew, tmp_path, new_saver, undisturbed
):
    """The damaged checkpoint is of an earlier job, so its round has a larger number. This job saves nothing
    by itself. One of its worlds ends before all workers have the state, so survivors look for a checkpoint.
    """
    run, more = tmp_path / "run", {"checkpoints": str(tmp_path / "run")}
    with Crew() as former:
        former.begin(tmp_path, NOTHING, first=9, saver=new_saver(), body=end_with_each_step_on_disk, **more)
        former.until(lambda: former.hands[0].status is not None)
    whole, *damaged = FilePointer(run).read().saved
    assert [s.step for s in damaged] == [COMMITTED - 1, COMMITTED] and damaged[-1].round == 50
    for saved in damaged:
        damage(run / saved.name)
    more |= {"saver": new_saver(), "body": train_seldom_saved}
    accidents = [NOTHING, Accident("forming", 1), Accident("forward", whole.step + 1), NOTHING]
    crew.begin(tmp_path, *accidents, **more)
    crew.all_ended()
    assert crew.settled == [(1, 4), (2, 3), (3, 2)]
    for i in (0, 3):
        assert reads(tmp_path, str(i), "committed") == list(range(whole.step + 1, STEPS + 1)), "each once"
        assert_undisturbed(crew, tmp_path, range(i, i + 1), undisturbed)
    assert f"continuing from step {whole.step + 1}, " in (tmp_path / "0.err").read_text(), "it did look"
