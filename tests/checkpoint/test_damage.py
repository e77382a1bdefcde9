"""Damage is noticed that plain DCP loads silently: nearly every flipped bit and every zeroed page."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from elasticd.checkpoint.format.manifest import MANIFEST, BadCheckpoint, digest
from elasticd.checkpoint.newest.pointer import POINTER, FilePointer
from elasticd.checkpoint.newest.retention import Keep
from elasticd.checkpoint.storage import reading
from elasticd.checkpoint.storage.disk import Disk
from elasticd.checkpoint.storage.reading import open_manifest, verify
from elasticd.core.age import Age
from elasticd.core.checkpoint_names import folder_name
from elasticd.core.facts import Checkpoint, Saved
from elasticd.core.page_layout import Fatal
from elasticd.worker.agent_link import agentpage
from elasticd.worker.checkpoints import Checkpoints, NoCheckpoint
from tests.checkpoint.conftest import assert_same, tensors_of, training
from tests.checkpoint.faults import check, commit, filled

TRIES = 120  # Plain DCP loaded 296 of 300 flipped bits, and 59 of 60 zeroed pages.
PAGES = 60
CUTS = 60
PAGE = 4096
SAVED = Saved(folder_name(9, 9, "0000000a", 1), 9, 9, 1, 1.0, 10, "d")


def folder_of(path: Path, step: int) -> Path:
    [saved] = [s for s in FilePointer(path).read().saved if s.step == step]
    return path / saved.name


def shard(path: Path, step: int) -> Path:
    return folder_of(path, step) / "__0_0.distcp"


def test_everything_comes_back_as_it_was_saved(saved):
    checkpoints = saved(1, 2)
    state = training(7)
    assert checkpoints.load(state) == 2
    assert_same(state, tensors_of(training(2)))
    assert state["progress"] == {"position": 2, "name": "seed 2"}
    assert state["schedule"].state_dict() == training(2)["schedule"].state_dict()
    assert state["optimizer"].param_groups[0]["lr"] == training(2)["optimizer"].param_groups[0]["lr"]


def test_what_dcp_would_cut_apart_comes_back_as_it_was(opened):
    class Sampler:
        def __init__(self, seen: dict[int, int]) -> None:
            self.seen = seen

        def state_dict(self) -> dict[str, object]:
            return {"seen": self.seen, "left": [{}, {1: 2}], "of": 3}

        def load_state_dict(self, state: dict[str, object]) -> None:
            assert state["left"] == [{}, {1: 2}] and state["of"] == 3
            self.seen = state["seen"]

    optimizer = torch.optim.SGD([torch.zeros(2)])
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    checkpoints = opened()
    plain = {"counts": {3: 4}, "empty": {}, "both": {"a": {}, "b": torch.ones(2)}}
    assert checkpoints.save({"schedule": schedule, "sampler": Sampler({7: 8}), "plain": plain}, 1)
    assert checkpoints.wait() and not checkpoints.failed, checkpoints.last_error
    state = {"schedule": torch.optim.lr_scheduler.MultiStepLR(optimizer, [1]), "sampler": Sampler({})}
    state["plain"] = {"both": {"b": torch.zeros(2)}}
    assert checkpoints.load(state) == 1
    assert state["schedule"].milestones == Counter({2: 2, 5: 1})
    assert state["sampler"].seen == {7: 8}
    assert state["plain"]["counts"] == {3: 4} and state["plain"]["empty"] == {}
    assert state["plain"]["both"]["a"] == {} and torch.equal(state["plain"]["both"]["b"], torch.ones(2))


def test_an_optimizer_that_never_stepped_gets_its_state(saved):
    checkpoints = saved(1)
    fresh = training(7)
    fresh["optimizer"] = torch.optim.AdamW(fresh["model"].parameters())
    fresh["schedule"] = torch.optim.lr_scheduler.StepLR(fresh["optimizer"], 2)
    assert checkpoints.load(fresh) == 1
    assert_same(fresh, tensors_of(training(1)))


def test_plain_dcp_loads_it(saved, tmp_path):
    saved(3)
    expected = tensors_of(training(3))
    state = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    state |= {"progress.position": 0, "progress.name": ""}
    dcp.load(state, checkpoint_id=folder_of(tmp_path / "run", 3), no_dist=True)
    for key, tensor in expected.items():
        assert torch.equal(state[key], tensor), key
    assert state["progress.position"] == 3


class Damaged:
    """Checkpoints of steps 1 and 2. After damage to step 2, a load must return step 1, or step 2 exactly as
    it was saved."""

    def __init__(self, path: Path, checkpoints: Checkpoints) -> None:
        self.path, self.checkpoints = path, checkpoints
        self.one, self.two = tensors_of(training(1)), tensors_of(training(2))
        self.state = training(7)

    def found(self) -> int:
        step = self.checkpoints.load(self.state)
        assert step in (1, 2)
        assert_same(self.state, self.one if step == 1 else self.two)
        return step


@pytest.fixture
def damaged(saved: Callable[..., Checkpoints], tmp_path: Path) -> Damaged:
    return Damaged(tmp_path / "run", saved(1, 2))


def test_no_flipped_bit_is_loaded(damaged):
    file = shard(damaged.path, 2)
    chance = random.Random(seed := random.randrange(1 << 32))
    print("seed", seed)
    noticed = 0
    with file.open("r+b", buffering=0) as stream:
        for _ in range(TRIES):
            at, bit = chance.randrange(file.stat().st_size), 1 << chance.randrange(8)
            stream.seek(at)
            [byte] = stream.read(1)
            stream.seek(at)
            stream.write(bytes([byte ^ bit]))
            noticed += damaged.found() == 1
            stream.seek(at)
            stream.write(bytes([byte]))
    assert noticed == TRIES  # all blocks of the shard are read, with frames and gaps
    assert damaged.found() == 2


def test_no_flipped_bit_of_a_manifest_or_of_the_metadata_is_loaded(opened, tmp_path):
    path, checkpoints = tmp_path / "run", opened()
    commit(checkpoints, 1, 2, elements=64)
    store, newest = Disk(path), FilePointer(path).read().saved[-1]
    chance = random.Random(seed := random.randrange(1 << 32))
    print("seed", seed)
    for file in (path / newest.name / MANIFEST, path / newest.name / ".metadata"):
        whole = file.read_bytes()
        for _ in range(TRIES // 3):
            at, bit = chance.randrange(len(whole)), 1 << chance.randrange(8)
            file.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            state = filled(0, elements=64)
            found = checkpoints.load(state)
            check(state, found)
            if file.name == MANIFEST:
                assert found == 1
            else:  # only plain DCP reads this file
                assert any(wrong for _, wrong in verify(store, open_manifest(store, newest)))
        file.write_bytes(whole)


def test_a_checkpoint_replaces_a_state_in_memory_only_if_it_is_newer(damaged, caplog):
    checkpoints, state = damaged.checkpoints, damaged.state
    assert checkpoints.load(state, beyond=Age(1, 1)) is None and not checkpoints.overwrote, (
        "of the same round"
    )
    assert checkpoints.load(state, beyond=Age(0, 1)) == 2 and checkpoints.overwrote
    with shard(damaged.path, 2).open("r+b") as file:
        file.write(bytes(PAGE))
    assert checkpoints.load(state, beyond=Age(0, 1)) is None and checkpoints.overwrote
    assert "continuing from step 1, because no later checkpoint is whole" in caplog.text
    assert "damaged" in caplog.text


def test_a_name_in_the_record_counts_only_if_the_checkpoint_s_own_manifest_agrees(damaged, caplog):
    known = FilePointer(damaged.path).read()
    one, two = known.saved
    FilePointer(damaged.path).write(replace(known, saved=(one, replace(two, world=2))))
    assert damaged.found() == 1
    assert "of step 2, round 1 and 1 workers, and was committed as of" in caplog.text


def test_no_zeroed_page_is_loaded(damaged):
    file = shard(damaged.path, 2)
    chance = random.Random(seed := random.randrange(1 << 32))
    print("seed", seed)
    with file.open("r+b", buffering=0) as stream:
        for _ in range(PAGES):
            at = chance.randrange(file.stat().st_size // PAGE) * PAGE
            stream.seek(at)
            page = stream.read(PAGE)
            stream.seek(at)
            stream.write(bytes(len(page)))
            assert damaged.found() == (2 if page == bytes(len(page)) else 1)
            stream.seek(at)
            stream.write(page)


def test_no_file_that_was_cut_off_anywhere_is_loaded(damaged):
    chance = random.Random(seed := random.randrange(1 << 32))
    print("seed", seed)
    for _ in range(CUTS):
        file = folder_of(damaged.path, 2) / chance.choice(["__0_0.distcp", ".metadata", MANIFEST])
        whole = file.read_bytes()
        os.truncate(file, chance.randrange(len(whole)))
        assert damaged.found() == 1
        file.write_bytes(whole)
    assert damaged.found() == 2


@pytest.mark.parametrize("damage", ["short", "missing"])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", MANIFEST])
def test_a_file_that_is_short_or_missing_is_named_and_the_one_before_it_is_taken(
    damaged, caplog, name, damage
):
    file = folder_of(damaged.path, 2) / name
    if damage == "short":
        os.truncate(file, file.stat().st_size - 1)
    else:
        file.unlink()
    assert damaged.found() == 1
    assert f"/{name} " in caplog.text and "resuming from step 1, because step-0000000002" in caplog.text


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_an_error_that_passes_is_waited_for(damaged, monkeypatch, call):
    real, errors = getattr(os, call), [errno.EIO, errno.ESTALE]

    def fails(first, *rest):
        if errors and (call == "preadv" or "__0_0" in str(first)):
            raise OSError(code := errors.pop(), os.strerror(code))
        return real(first, *rest)

    monkeypatch.setattr(os, call, fails)
    monkeypatch.setattr(reading, "_AGAIN_S", 0.0)
    assert damaged.found() == 2 and not errors


@pytest.mark.parametrize("call", ["scandir", "preadv", "open"])
def test_an_error_that_stays_is_named_and_the_one_before_it_is_taken(damaged, monkeypatch, caplog, call):
    newest, real = folder_of(damaged.path, 2).name, getattr(os, call)

    def fails(what, *rest):
        where = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fspath(what)
        if newest in where:
            raise OSError(errno.EIO, os.strerror(errno.EIO), where)
        return real(what, *rest)

    monkeypatch.setattr(os, call, fails)
    monkeypatch.setattr(reading, "_PATIENCE_S", 0.0)
    assert damaged.found() == 1
    assert f"resuming from step 1, because {newest}" in caplog.text and "Input/output error" in caplog.text


def test_a_shard_of_another_save_is_noticed(damaged, caplog):
    shutil.copy(shard(damaged.path, 1), shard(damaged.path, 2))
    assert damaged.found() == 1
    assert "is damaged between bytes" in caplog.text


def test_a_whole_folder_of_another_save_is_noticed(damaged):
    newest, before = folder_of(damaged.path, 2), folder_of(damaged.path, 1)
    shutil.rmtree(newest)
    shutil.copytree(before, newest)
    assert damaged.found() == 1


def test_the_damaged_tensor_is_named(damaged, caplog):
    file = shard(damaged.path, 2)
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size - 100_000)  # in the last and largest tensor
        stream.write(b"\xff" * 8)
    assert damaged.found() == 1
    assert "(of table" in caplog.text


def test_none_whole_is_an_error_and_not_a_fresh_start(damaged):
    for step in (1, 2):
        shard(damaged.path, step).unlink()
    with pytest.raises(
        NoCheckpoint, match=r"no checkpoint is whole: step-0000000002.*; step-0000000001"
    ) as what:
        damaged.checkpoints.load(damaged.state)
    assert str(what.value).endswith("; to train from the start, give --resume=never")


@pytest.fixture
def fatal(monkeypatch: pytest.MonkeyPatch) -> list[Fatal]:
    """The reasons for which the agent is told to end the job."""
    said: list[Fatal] = []
    monkeypatch.setattr(agentpage, "fatal", said.append)
    return said


def uncaught(load: Callable[[], object]) -> str:
    """Return the message that the agent finds in the error file, if an error of ``load`` ends the process."""
    file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    try:
        load()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
    return json.loads(file.read_bytes())["message"]["message"] if file.exists() else ""


def test_what_no_other_try_would_find_otherwise_ends_the_job_unless_the_script_knows_better(
    damaged, fatal, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    misfit = training(7, width=32)
    assert "has the shape" in uncaught(lambda: damaged.checkpoints.load(misfit))
    assert fatal == [Fatal.BAD_DATA]
    for step in (1, 2):
        shard(damaged.path, step).unlink()
    with pytest.raises(NoCheckpoint):
        damaged.checkpoints.load(damaged.state)
    assert fatal == [Fatal.BAD_DATA], "the script has caught it"
    assert uncaught(lambda: damaged.checkpoints.load(damaged.state)).startswith("no checkpoint is whole: ")
    (damaged.path / POINTER).write_bytes(b"{")
    assert "no checkpoint beside it is whole" in uncaught(lambda: damaged.checkpoints.load(damaged.state))
    assert fatal == [Fatal.BAD_DATA, Fatal.NO_CHECKPOINT, Fatal.NO_CHECKPOINT]


def test_a_step_that_is_saved_again_is_loaded_as_it_was_saved_last(opened, saved):
    checkpoints = saved(*range(1, 9))
    for content in range(9, 12):  # the names of saves 9 and 10 are not in the order of their texts
        assert checkpoints.save(training(content), 9)
        assert checkpoints.wait() and not checkpoints.failed, checkpoints.last_error
    checkpoints.close()
    fresh = training(1)
    assert opened().load(fresh) == 9
    assert_same(fresh, tensors_of(training(11)))


def test_a_file_in_place_of_the_folder_ends_the_job_in_a_sentence(fatal, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    (file := tmp_path / "run1").touch()
    assert uncaught(lambda: Checkpoints(file)) == f"{file} is a file: give a folder for the checkpoints"
    assert fatal == [Fatal.BAD_DATA]


def test_what_may_pass_ends_a_worker_and_not_the_job(damaged, fatal, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(reading, "_PATIENCE_S", 0.0)

    def away(self: Disk, name: str) -> dict[str, int]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    monkeypatch.setattr(Disk, "sizes", away)
    assert not uncaught(lambda: damaged.checkpoints.load(damaged.state))
    monkeypatch.setattr(Disk, "look", away)
    assert not uncaught(lambda: damaged.checkpoints.load(damaged.state))
    assert not fatal


def test_a_damaged_record_is_named_and_what_is_whole_beside_it_counts_as_committed(damaged, caplog):
    for record in (b"", b"{", b'{"v":1,"saved":[{"name":1}]}', b"\xff\0", b"{}", b"[1]"):
        (damaged.path / POINTER).write_bytes(record)
        assert damaged.found() == 2
        assert caplog.text.count(f"{damaged.path / POINTER} is damaged: ") == 1
        assert caplog.text.rstrip().endswith("; the checkpoints beside it that are whole count as committed")
        caplog.clear()


def test_beside_a_damaged_record_nothing_counts_that_misses_a_file_or_whose_manifest_has_a_flipped_bit(
    damaged,
):
    def beside() -> list[int]:
        return [s.step for s in FilePointer(damaged.path).read().saved]

    folder = folder_of(damaged.path, 2)
    (damaged.path / POINTER).write_bytes(b"")
    (folder / "__0_0.distcp").rename(folder / "away")
    assert beside() == [1]
    (folder / "away").rename(folder / "__0_0.distcp")
    folder.rename(renamed := damaged.path / f"{folder.name[:-1]}7")
    assert beside() == [1]
    file, whole = folder / MANIFEST, (renamed / MANIFEST).read_bytes()
    renamed.rename(folder)
    chance = random.Random(seed := random.randrange(1 << 32))
    print("seed", seed)
    for _ in range(TRIES):
        bad = bytearray(whole)
        bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        file.write_bytes(bad)
        assert beside() == [1]
    file.write_bytes(whole)
    assert beside() == [1, 2]


def test_a_commit_writes_a_damaged_record_anew_and_loses_nothing(damaged):
    before = FilePointer(damaged.path).read()
    (damaged.path / POINTER).write_bytes(b"")
    assert damaged.checkpoints.save(training(3), 3) and damaged.checkpoints.wait()
    written = json.loads((damaged.path / POINTER).read_bytes())["saved"]
    assert [s["step"] for s in written] == [1, 2, 3]
    assert FilePointer(damaged.path).read().saved[:2] == before.saved


def test_a_commit_beside_a_damaged_record_loses_nothing_to_an_error_that_passes(damaged, monkeypatch):
    real, errors = Disk.read, [errno.EIO, errno.ESTALE]

    def fails(disk: Disk, name: str) -> bytes:
        if name.endswith(MANIFEST) and errors:
            raise OSError(code := errors.pop(), os.strerror(code))
        return real(disk, name)

    monkeypatch.setattr(Disk, "read", fails)
    monkeypatch.setattr(reading, "_AGAIN_S", 0.0)
    before = FilePointer(damaged.path).read().saved
    (damaged.path / POINTER).write_bytes(b"")
    assert FilePointer(damaged.path).update(lambda known: known).saved == before and not errors


def test_a_damaged_record_beside_which_nothing_is_whole_is_no_fresh_start(damaged):
    (damaged.path / POINTER).write_bytes(b"{")
    for step in damaged.path.glob("step-*"):
        (step / MANIFEST).unlink()
    with pytest.raises(NoCheckpoint, match=f"{POINTER} is damaged: .*, and no checkpoint beside it is whole"):
        damaged.checkpoints.load(damaged.state)
    assert damaged.checkpoints.save(training(3), 3) and damaged.checkpoints.wait()
    assert damaged.checkpoints.load(damaged.state) == 3, "later checkpoints are committed"


def test_a_record_of_a_newer_version_is_neither_guessed_at_nor_written_over(tmp_path):
    said = b'{"v":2,"saved":{"elsewhere":true}'
    (tmp_path / POINTER).write_bytes(record := b'%b,"seal":"%b"}' % (said, digest(said).encode()))
    for use in (FilePointer(tmp_path).read, lambda: FilePointer(tmp_path).commit(SAVED, Keep(1))):
        with pytest.raises(BadCheckpoint, match=r"was written by a newer elasticd \(version 2\)"):
            use()
    assert (tmp_path / POINTER).read_bytes() == record


def test_a_record_that_names_folders_of_others_is_damaged(tmp_path):
    pointer = FilePointer(tmp_path)
    pointer.write(Checkpoint(str(tmp_path), (SAVED,)))
    said = (tmp_path / POINTER).read_bytes().replace(SAVED.name.encode(), b"../others").split(b',"seal"')[0]
    (tmp_path / POINTER).write_bytes(b'%b,"seal":"%b"}' % (said, digest(said).encode()))
    with pytest.raises(BadCheckpoint, match="'../others' is no checkpoint's name"):
        pointer.read()
    assert pointer.commit(SAVED, Keep(1)).checkpoint.saved == (SAVED,)


def test_nothing_committed_is_a_fresh_start_unless_one_is_required(opened):
    assert opened().load(training(7)) is None
    with pytest.raises(NoCheckpoint, match="none was ever committed"):
        opened().load(training(7), required=True)


def test_another_shape_is_refused_by_name_and_with_what_to_do(saved, tmp_path):
    checkpoints = saved(1)
    other = training(7, width=32)
    with pytest.raises(
        ValueError, match=r"model\.0\.weight has the shape \[288, 96\] in the checkpoint"
    ) as what:
        checkpoints.load(other)
    way_out = f"start anew with checkpoints in another folder than {folder_of(tmp_path / 'run', 1).parent}"
    assert str(what.value).endswith(way_out)


def test_an_object_that_could_not_be_loaded_is_refused_when_it_is_saved(opened):
    with pytest.raises(TypeError, match="odd could not be loaded again"):
        opened().save({"odd": Path("/x")}, 1)
    checkpoints = opened()
    assert checkpoints.save({"odd": 0.0}, 1)
    with pytest.raises(
        TypeError, match="odd could not be loaded again"
    ):  # also when the value becomes such an object later
        checkpoints.save({"odd": np.float64(1)}, 2)
    assert checkpoints.save({"odd": 1.0}, 2) and checkpoints.wait() and not checkpoints.failed


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (5, "the state is of the type int: give a dict"),
        (torch.nn.Linear(1, 1), "the state is of the type Linear: give a dict"),
        ({0: torch.zeros(1)}, "the state is a mapping with the key 0: give a dict"),
    ],
)
def test_a_state_without_names_is_refused_in_a_sentence(opened, state, said):
    for use in (lambda: opened().save(state, 1), lambda: opened().load(state)):
        with pytest.raises(TypeError, match=said):
            use()


@pytest.mark.parametrize(
    ("step", "error"),
    [(3.0, TypeError), ("3", TypeError), ({}, TypeError), (-1, ValueError), (1 << 70, ValueError)],
)
def test_what_is_no_number_of_steps_is_refused_in_a_sentence(opened, step, error):
    with pytest.raises(error, match=f"step is {step!r}: give"):
        opened().save({"x": torch.zeros(1)}, step)


def test_a_step_may_be_a_number_of_numpy_or_of_torch(opened):
    checkpoints = opened()
    assert checkpoints.save({"x": torch.zeros(1)}, np.int64(1)) and checkpoints.wait()
    assert checkpoints.save({"x": torch.zeros(1)}, torch.tensor(2)) and checkpoints.wait()
    assert opened().load({"x": torch.zeros(1)}) == 2


def test_checkpoints_beyond_the_retention_policy_are_removed(saved, tmp_path):
    saved(*range(1, 6), last=2, every=3)
    names = {int(p.name[5:15]) for p in (tmp_path / "run").iterdir() if p.is_dir()}
    assert names == {1, 3, 4, 5}
