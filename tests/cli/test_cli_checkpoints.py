"""elasticd ckpt, on checkpoints that were saved as workers save them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from msgspec.structs import replace
from safetensors.torch import load_file

from elasticd.checkpoint.client import saver_connection
from elasticd.checkpoint.format.manifest import MANIFEST, decode, digest, encode, encode_index
from elasticd.checkpoint.newest.pointer import FilePointer
from elasticd.cli.command_error import CommandError
from elasticd.cli.main import cli
from elasticd.telemetry import describe
from elasticd.worker.checkpoints import Checkpoints


def state(step: int) -> dict[str, object]:
    torch.manual_seed(step)
    return {"model": {"w": torch.randn(300, 7), "b": torch.randn(5)}, "step": step, "note": ["a", step]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Save steps 1 to 3."""
    run = tmp_path_factory.mktemp("saved") / "run"
    checkpoints = Checkpoints(run)
    for step in (1, 2, 3):
        assert checkpoints.save(state(step), step)
        assert checkpoints.wait() and not checkpoints.failed
    checkpoints.close()
    yield run
    while saver_connection.started:
        saver_connection.started.pop().wait(60.0)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of the checkpoints for each test."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def ckpt(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["ckpt", *map(str, arguments)], standalone_mode=False)


def damage(folder: Path, step: int) -> None:
    [name] = [s.name for s in FilePointer(folder).read().saved if s.step == step]
    with (folder / name / "__0_0.distcp").open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff\0\xff\0")


def complaint(result: Result) -> CommandError:
    assert isinstance(result.exception, CommandError), result.exception
    return result.exception


def test_ls_tells_of_each_one(folder):
    lines = ckpt("ls", folder).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["STEP", "1", "2", "3"]
    told = [json.loads(line) for line in ckpt("ls", folder, "--json").stdout.splitlines()]
    assert [t["step"] for t in told] == [1, 2, 3] and all(t["whole"] and t["world"] == 1 for t in told)


def test_ls_says_what_is_missing(folder):
    [name] = [s.name for s in FilePointer(folder).read().saved if s.step == 2]
    (folder / name / "__0_0.distcp").unlink()
    result = ckpt("ls", folder)
    assert f"{name}/__0_0.distcp is missing" in result.stderr
    assert [line.split()[-2] for line in result.stdout.splitlines()[1:]] == ["yes", "no", "yes"]


def test_a_damaged_record_is_reported_once_and_whole_checkpoints_are_listed(folder):
    (folder / "committed.json").write_bytes(b"{")
    result = ckpt("ls", folder)
    assert result.stderr.count("committed.json is damaged") == 1
    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == ["1", "2", "3"]
    assert ckpt("rm", folder, 1).stderr.count("committed.json is damaged") == 1
    assert [s.step for s in FilePointer(folder).read().saved] == [2, 3], "which writes it anew"


def test_which_world_saved_it_is_not_called_a_round_of_the_job(folder):
    later = Checkpoints(folder)
    assert later.save(state(4), 4) and later.wait()
    later.close()
    told = [json.loads(line) for line in ckpt("ls", folder, "--json").stdout.splitlines()]
    assert [t["generation"] for t in told] == [1, 1, 2] and not any("round" in t for t in told)
    assert "GENERATION" in ckpt("ls", folder).stdout
    assert "saved by 1 worker (generation 2)" in ckpt("show", folder, 4).stdout


def test_show_names_what_is_in_it(folder):
    shown = ckpt("show", folder, 2)
    assert "model.w  float32 [300, 7]" in shown.stdout and "note" in shown.stdout
    assert json.loads(ckpt("show", folder, "--json").stdout)["step"] == 3


def test_ls_and_show_count_the_bytes_of_all_files(folder):
    listed = json.loads(ckpt("ls", folder, "--json").stdout.splitlines()[-1])
    shown = json.loads(ckpt("show", folder, "--json").stdout)
    on_disk = {path.name: path.stat().st_size for path in (folder / listed["name"]).iterdir()}
    assert shown["files"] == on_disk and shown["size"] == listed["size"] == sum(on_disk.values())
    told = ckpt("show", folder).stdout
    assert describe.size(shown["size"]) in told.splitlines()[0] and MANIFEST in told


def test_verify_finds_what_a_look_cannot(folder):
    assert ckpt("verify", folder, "--all").return_value == 0
    damage(folder, 2)
    result = ckpt("verify", folder, "--all")
    assert result.return_value == 5
    assert [line.split()[-1] for line in result.stdout.splitlines()] == ["whole", "damaged", "whole"]
    assert "is damaged between bytes" in result.stderr


def test_export_writes_what_was_saved(folder, tmp_path):
    assert ckpt("export", folder, tmp_path / "a.pt", 2).exception is None
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    expected = state(2)
    assert loaded["step"] == 2 and loaded["note"] == ["a", 2]
    assert torch.equal(loaded["model"]["w"], expected["model"]["w"])  # type: ignore[index]
    assert ckpt("export", folder, tmp_path / "a.safetensors", "--only", "model").exception is None
    assert load_file(tmp_path / "a.safetensors").keys() == {"model.w", "model.b"}


def test_a_damaged_checkpoint_is_not_exported(folder, tmp_path):
    damage(folder, 3)
    result = ckpt("export", folder, tmp_path / "a.pt")
    assert complaint(result).code == 5
    assert not list(tmp_path.glob("*a.pt*"))


def test_rm_removes_one_and_never_what_a_job_would_go_on_from(folder):
    assert ckpt("rm", folder, 1).exception is None
    damage(folder, 2)
    [name] = [s.name for s in FilePointer(folder).read().saved if s.step == 2]
    (folder / name / "elasticd.json").unlink()
    refused = complaint(ckpt("rm", folder, 3))
    assert "step 3 is the newest whole checkpoint" in refused.sentence and refused.code == 2
    assert [s.step for s in FilePointer(folder).read().saved] == [2, 3]
    assert ckpt("rm", folder, 3, "--force").exception is None
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == [name]
    assert ckpt("rm", folder, 2).exception is None, "nothing goes on from what is damaged"


def test_a_job_trains_and_saves_after_any_of_its_checkpoints_is_removed(folder):
    job = Checkpoints(folder)
    for step in (4, 5):
        assert job.save(state(step), step) and job.wait() and not job.failed
        assert complaint(ckpt("rm", folder, step)).code == 2
    assert ckpt("rm", folder, 4).exception is None
    assert ckpt("rm", folder, 5, "--force").exception is None
    assert job.load(loaded := state(0)) == 3 and loaded["step"] == 3
    assert job.save(state(6), 6) and job.wait() and not job.failed
    assert job.load(loaded) == 6 and loaded["step"] == 6
    job.close()


@pytest.mark.parametrize("command", ["show", "verify"])
def test_another_step_is_refused_with_those_that_there_are(folder, command):
    assert "1, 2 and 3" in complaint(ckpt(command, folder, 9)).sentence


def test_an_empty_folder_has_none(tmp_path):
    assert "no committed checkpoint" in ckpt("ls", tmp_path).stderr
    assert complaint(ckpt("verify", tmp_path)).code == 5


def test_a_file_of_unknown_kind_is_not_written(folder, tmp_path):
    assert "must end in .safetensors or .pt" in complaint(ckpt("export", folder, tmp_path / "a.bin")).sentence


def test_verify_finds_one_that_no_load_could_make_sense_of(folder):
    """Such a checkpoint has a tensor whose shape differed from rank to rank."""
    known = FilePointer(folder).read()
    newest = known.saved[-1]
    its = decode((folder / newest.name / MANIFEST).read_bytes(), newest.name)
    tensors = its.index.tensors | {"model.w": replace(its.index.tensors["model.w"], shape=(301, 7))}
    index = encode_index(replace(its.index, tensors=tensors))
    raw = encode(its.name, its.step, its.round, its.world, its.at, its.files, index)
    (folder / newest.name / MANIFEST).write_bytes(raw)
    FilePointer(folder).write(
        dataclasses.replace(known, saved=(*known.saved[:-1], dataclasses.replace(newest, digest=digest(raw))))
    )
    result = ckpt("verify", folder)
    assert result.return_value == 5 and result.stdout.endswith(": damaged\n")
    assert "the parts of model.w hold 2100 elements in all, and its shape [301, 7] has 2107" in result.stderr
    found = {"step": 0}
    assert Checkpoints(folder).load(found) == 2 == found["step"]
