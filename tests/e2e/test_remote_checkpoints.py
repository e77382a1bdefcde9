"""Checkpoints of a job on S3, and what the job does if there is no checkpoint to resume from."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch

from elasticd.checkpoint.client import saver_connection
from elasticd.checkpoint.format.manifest import MANIFEST
from elasticd.checkpoint.newest.pointer import POINTER, FilePointer
from elasticd.worker.checkpoints import Checkpoints
from tests.checkpoint.s3server import SECRET, S3Server, everything, serving

PROGRAM = Path(__file__).parent / "programs" / "remote.py"
PATIENCE_S = 240


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with serving() as server:
        yield server


def run(*options: str, script: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ELASTICD_", "TORCHELASTIC_"))}
    command = [
        sys.executable,
        "-m",
        "elasticd.cli.main",
        "run",
        "--standalone",
        *options,
        str(PROGRAM),
        *script,
    ]
    return subprocess.run(command, env=env | environment, capture_output=True, text=True, timeout=PATIENCE_S)


def steps(where: str) -> list[int]:
    return [s.step for s in FilePointer(where).read().saved]


@pytest.mark.slow
def test_a_job_saves_to_s3_and_resumes_from_there(s3):
    where = "s3://bucket/job"
    job = run("--checkpoints", where, "--checkpoint-every", "3")
    assert job.returncode == 0, job.stderr[-3000:]
    assert [line for line in job.stdout.splitlines() if "saved" in line] == ["saved 3", "saved 6", "saved 9"]
    assert steps(where) == [6, 9]
    names = {s.name for s in FilePointer(where).read().saved}
    keys = {
        o["Key"].split("/")[1]
        for o in boto3.client("s3").list_objects_v2(Bucket="bucket", Prefix="job/")["Contents"]
    }
    assert keys == names | {"committed.json"}, "what is not kept is gone"
    again = run("--checkpoints", where, "--resume", "required")
    assert again.returncode == 0 and "began at 9" in again.stdout, again.stderr[-3000:]
    for one in (job, again):
        assert SECRET not in one.stderr + one.stdout


@pytest.mark.slow
def test_a_job_that_never_resumes_still_recovers_from_what_it_saved_itself(tmp_path):
    where = str(tmp_path / "run")
    assert run("--checkpoints", where, "--checkpoint-every", "5").returncode == 0
    anew = run("--checkpoints", where, "--checkpoint-every", "4", "--resume", "never", script=("fail",))
    assert anew.returncode == 0, anew.stderr[-3000:]
    assert [line for line in anew.stdout.splitlines() if "began" in line] == ["began at 0", "began at 4"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["damaged", "missing"])
@pytest.mark.parametrize(("resume", "begins"), [("auto", "began at 10"), ("never", "began at 0")])
def test_a_damaged_or_lost_record_is_reported_and_stops_no_job(tmp_path, resume, begins, what):
    where = str(tmp_path / "run")
    assert run("--checkpoints", where, "--checkpoint-every", "5").returncode == 0
    if what == "missing":
        (tmp_path / "run" / POINTER).unlink()
    else:
        (tmp_path / "run" / POINTER).write_bytes(b"{")
    job = run("--checkpoints", where, "--checkpoint-every", "5", "--resume", resume)
    assert job.returncode == 0 and "failure.charged" not in job.stderr, job.stderr[-3000:]
    assert [line for line in job.stdout.splitlines() if "began" in line] == [begins]
    assert f"{POINTER} is {what}" in job.stderr
    assert steps(where) == [5, 10]


@pytest.mark.slow
def test_a_store_that_hangs_up_costs_checkpoints_and_not_the_training(s3):
    s3.fails("drop", lambda method, url: method in ("PUT", "POST") and "step-" in url)
    try:
        job = run("--checkpoints", "s3://bucket/away", "--checkpoint-every", "5", AWS_MAX_ATTEMPTS="1")
    finally:
        s3.mends()
    assert job.returncode == 0, job.stderr[-3000:]
    assert job.stderr.count('"event": "checkpoint.failed"') == 2
    assert steps("s3://bucket/away") == []


@pytest.mark.slow
def test_a_store_that_does_not_answer_at_the_start_is_noted_and_no_training_begun_from_nothing(s3):
    s3.fails("drop", everything)
    try:
        job = run("--checkpoints", "s3://bucket/dark", "--max-restarts", "0", AWS_MAX_ATTEMPTS="1")
    finally:
        s3.mends()
    assert job.returncode == 1
    assert "s3://bucket/dark cannot be written to now" in job.stderr
    assert "the committed checkpoints cannot be read: " in job.stderr


@pytest.mark.parametrize(
    ("where", "environment", "why"),
    [
        ("s3://no-such-bucket/x", {}, "bucket does not exist"),
        ("s3://bucket/x", {"AWS_ACCESS_KEY_ID": "SOMEBODY"}, "does not exist in our records"),
        ("nonsense://bucket/x", {}, "not an address for checkpoints"),
        ("/proc/x", {}, "No such file or directory"),
    ],
)
def test_a_store_that_nothing_can_be_written_to_is_refused_at_the_start(s3, where, environment, why):
    job = run("--checkpoints", where, **environment)
    assert job.returncode == 2
    [sentence] = job.stderr.strip().splitlines()
    assert sentence.startswith("elasticd: ") and why in sentence
    assert SECRET not in sentence


def trained() -> dict[str, Any]:
    """Return the state that the program trains."""
    model = torch.nn.Linear(64, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.slow
@pytest.mark.parametrize("resume", ["auto", "required"])
@pytest.mark.parametrize("what", ["the shards", "the record"])
def test_a_job_whose_checkpoints_are_all_damaged_ends_with_5_at_once_and_says_what_is_wrong_with_each(
    tmp_path, resume, what
):
    where = tmp_path / "run"
    checkpoints = Checkpoints(where)
    for step in (5, 10):
        assert checkpoints.save(trained(), step) and checkpoints.wait() and not checkpoints.failed
    checkpoints.close()
    for saver in saver_connection.started:
        saver.wait(60.0)
    saver_connection.started.clear()
    five, ten = FilePointer(where).read().saved
    (where / five.name / "__0_0.distcp").unlink()
    if what == "the shards":
        raw = bytearray((where / ten.name / "__0_0.distcp").read_bytes())
        raw[len(raw) // 2] ^= 1
        (where / ten.name / "__0_0.distcp").write_bytes(raw)
        wrong = (f"{ten.name}/__0_0.distcp is damaged", f"{five.name}/__0_0.distcp is missing")
    else:
        (where / POINTER).write_bytes(b"{")
        (where / ten.name / MANIFEST).unlink()
        wrong = (f"{where / POINTER} is damaged", "no checkpoint beside it is whole")
    job = run("--checkpoints", str(where), "--resume", resume)
    assert job.returncode == 5, job.stderr[-3000:]
    assert job.stderr.count('"event": "workers.started"') == 1, "another try would find the same"
    assert "failure.charged" not in job.stderr
    [last] = [line for line in job.stderr.splitlines() if " stopped itself after " in line]
    assert ": no checkpoint is whole: " in last and all(part in last for part in wrong)


def test_a_word_that_is_no_interval_is_refused(tmp_path):
    job = run("--checkpoints", str(tmp_path), "--checkpoint-every", "often")
    assert job.returncode == 2 and "neither a number of steps" in job.stderr
