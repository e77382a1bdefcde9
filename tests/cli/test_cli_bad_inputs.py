"""Whatever people type or leave about: one sentence that names what is wrong, before anything starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from elasticd.cli.command_error import CommandError
from elasticd.cli.machine import ThisMachine
from elasticd.cli.main import _exit_code, _sentence
from elasticd.cli.options import REMOVED_OPTIONS, collect
from elasticd.cli.run_command import _check_variables, run
from elasticd.cli.run_configuration import Planned, plan

FILES = {
    "ok.py": b"print('ok')\n",
    "bin.py": b"\x00\x01\x02",
    "coding.py": b"# -*- coding: nonsense -*-\n",
    "latin.py": b"print('\xff')\n",
    "prog.sh": b"#!/bin/sh\necho hi\n",
    "file": b"x",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "dir").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(argv: Sequence[str]) -> Planned:
    with run.make_context("run", list(argv)) as ctx:
        return plan(collect(ctx, None), os.environ, ThisMachine())


def refused(argv: Sequence[str]) -> str:
    with pytest.raises((CommandError, click.ClickException)) as caught:
        planned(argv)
    if isinstance(caught.value, click.ClickException):
        return _sentence(caught.value)
    assert caught.value.code == 2
    return caught.value.sentence


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        # numbers
        (["--min", "1e3", "ok.py"], "--min 1e3 is not a whole number"),
        (["--min", "-1", "ok.py"], "--min -1 is less than 1"),
        (["--min", "\uff12", "ok.py"], "is not a whole number"),
        (["--min", "1_0", "ok.py"], "--min 1_0 is not a whole number"),
        (["--max", "0x10", "ok.py"], "--max 0x10 is not a whole number"),
        (["--max-restarts", "9" * 23, "ok.py"], "is more than 1,000,000,000"),
        (["--min", "9" * 5000, "ok.py"], f"--min {'9' * 40}... is more than 1,000,000,000"),
        (["--min", "-" + "9" * 5000, "ok.py"], "is less than 1"),
        (["--slots", "1.5", "ok.py"], "neither a number nor auto"),
        (["--slots", "", "ok.py"], "neither a number nor auto"),
        (["--nnodes", ":", "ok.py"], "neither a number nor MIN:MAX"),
        (["--nnodes", "1:2:3", "ok.py"], "neither a number nor MIN:MAX"),
        (["--nnodes", "1:" + "9" * 20, "--etcd", "http://a:1", "ok.py"], "is more than 1,000,000,000 nodes"),
        (["--spares", "10000", "ok.py"], "1024"),
        (["--local-ranks-filter", "-1", "ok.py"], "not a list of numbers"),
        (["--local-ranks-filter", "9" * 5000, "ok.py"], "not a list of numbers"),
        (["--http", "127.0.0.1:" + "9" * 5000, "ok.py"], "neither HOST:PORT"),
        # times
        (["--join-timeout", "inf", "ok.py"], "not a finite number"),
        (["--join-timeout", "1e300", "ok.py"], "is more than 1,000,000,000"),
        (["--node-ttl", "1e12", "ok.py"], "is more than 1,000,000,000"),
        (["--hang-after", "1e999", "ok.py"], "neither auto nor off"),
        (["--hang-after", "1e300", "ok.py"], "neither auto nor off"),
        (["--rdzv-conf", "join_timeout=1e300", "ok.py"], "is not a length of time"),
        (["--checkpoint-every", "0", "ok.py"], "--checkpoint-every"),
        (["--checkpoint-every", "-5m", "ok.py"], "--checkpoint-every"),
        (["--checkpoint-rate", "0", "ok.py"], "--checkpoint-rate"),
        (["--checkpoint-rate", "9" * 400, "ok.py"], "--checkpoint-rate"),
        # places
        (["--checkpoints", "bogus://x", "ok.py"], "bogus"),
        (["--checkpoints", "s3://", "ok.py"], "s3:// names no folder"),
        (["--checkpoints", "s3:///", "ok.py"], "names no folder"),
        (["--log-dir", "file", "ok.py"], "cannot be written to: Not a directory"),
        (["--log-dir", "/proc/x", "ok.py"], "cannot be written to"),
        (["--http", "127.0.0.1:99999", "ok.py"], "neither HOST:PORT"),
        (["--http-cert", "file", "ok.py"], "--http-cert is given without --http-key"),
        (["--http-key", "file", "ok.py"], "--http-key is given without --http-cert"),
        (["--http-cert", "file", "--http-key", "file", "ok.py"], "no PEM certificate"),
        (["--http-cert", "gone", "--http-key", "file", "ok.py"], "No such file"),
        (["--http-token-file", "gone", "ok.py"], "--http-token-file gone: No such file"),
        (["--http-token-file", "dir", "ok.py"], "--http-token-file dir: Is a directory"),
        (["--http-token-file", "/dev/null", "ok.py"], "holds no token"),
        (["--http-token-file", "latin.py", "ok.py"], "holds no token"),
        (["--http-token-file", "prog.sh", "ok.py"], "holds no token"),
        (["--etcd", "", "ok.py"], "no etcd endpoint"),
        (["--etcd", ",,", "ok.py"], "no etcd endpoint"),
        (["--etcd", "nonsense nonsense", "ok.py"], "malformed"),
        (["--etcd", "http://", "ok.py"], "names no host"),
        (["--etcd", "http://a:99999", "ok.py"], "malformed"),
        (["--etcd", "http://a:0", "ok.py"], "port 0"),
        (["--etcd", "http://[::1", "ok.py"], "malformed"),
        (["--etcd", "http://user:pw@a:2379", "ok.py"], "user name or password"),
        (["--etcd", "https://a:1", "--etcd-cacert", "dir", "ok.py"], "Is a directory"),
        # names
        (["--job", "\x1b[31m", "ok.py"], "cannot be seen"),
        (["--node", "\u202e", "ok.py"], "cannot be seen"),
        (["--tee", "4", "ok.py"], "--tee '4'"),
        (["--signals-to-handle", "SIGFOO", "ok.py"], "SIGFOO"),
        # scripts
        (["dir"], "is a directory"),
        (["nope.py"], "does not exist"),
        (["bin.py"], "null bytes"),
        (["coding.py"], "nonsense"),
        (["latin.py"], "latin.py:1"),
        (["prog.sh"], "prog.sh:2"),
        (["loop"], "symbolic links"),
        ([""], "empty"),
        (["x" * 5000], "File name too long"),
        (["-m", ""], "empty"),
        (["-m", "."], "no module named"),
        (["-m", "nope.mod"], "no module named nope.mod"),
        (["-m", "sys"], "sys is built into Python"),
        (["--no-python", "nope"], "no program named nope"),
        (["--no-python", "./file"], "not executable"),
        (["--no-python", "./dir"], "is a directory"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_what_makes_no_sense_is_one_sentence(argv: list[str], says: str, here: Path) -> None:
    sentence = refused(argv)
    assert says in sentence
    assert "Traceback" not in sentence


@pytest.mark.parametrize(
    "variable", ["ELASTICD_MIN", "PET_MAX_RESTARTS", "ELASTICD_PLAIN", "ELASTICD_JOIN_TIMEOUT"]
)
def test_nonsense_in_the_environment_is_traced_to_it(
    variable: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "nonsense")
    assert f"from the environment variable {variable}" in refused(["ok.py"])


@pytest.mark.parametrize("value", ["--5", "\u00b2"])
def test_a_switch_that_is_neither_yes_nor_no_is_traced_to_its_variable(
    value: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICD_PLAIN", value)
    assert "from the environment variable ELASTICD_PLAIN" in refused(["ok.py"])


def test_a_switch_may_be_a_number_of_any_length(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICD_AUDIT", "9" * 5000)
    assert planned(["ok.py"]).config.audit is not None


def test_the_environment_of_torch_s_agent_is_checked_as_well(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "9" * 400)
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in refused(["ok.py"])


def test_an_empty_variable_counts_as_unset_for_every_option(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--job", "job", "ok.py"]
    before = planned(argv).config
    for option in run.params:
        if isinstance(option.envvar, str):
            monkeypatch.setenv(option.envvar, "")
    for option in REMOVED_OPTIONS:
        monkeypatch.setenv(f"ELASTICD_{option.replace('-', '_').upper()}", "")
    _check_variables(os.environ)
    assert planned(argv).config == before


def test_a_rank_that_cannot_be_shown_is_noted(here: Path) -> None:
    notes = planned(["--slots", "2", "--max", "2", "--local-ranks-filter", "0,7", "ok.py"]).notes
    assert any("--local-ranks-filter names 7" in note for note in notes)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["drain", ""], "the name of a node cannot be empty"),
        (["drain", "a", "--job", ""], "the name of a job cannot be empty"),
        (["drain", "a/b"], "has a slash in it"),
        (["scale", "", "--max", "2"], "the name of a job cannot be empty"),
        (["stop", ""], "the name of a job cannot be empty"),
        (["forget", ""], "the name of a job cannot be empty"),
        (["status", ""], "the name of a job cannot be empty"),
        (["top", ""], "the name of a job cannot be empty"),
        (["events", ""], "the name of a job cannot be empty"),
        (["logs", ""], "the name of a job cannot be empty"),
        (["report", ""], "the name of a run cannot be empty"),
        (["ckpt", "ls", ""], "the name is empty"),
        (["ckpt", "ls", "/nowhere/at/all"], "does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_nothing_can_be_called_is_refused_by_each_command(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(argv) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert says in sentence


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["dance"], "No such command 'dance'. See `elasticd --help`."),
        (["ckpt", "dance"], "No such command 'dance'. See `elasticd ckpt --help`."),
        (["run"], "Missing argument 'SCRIPT'. See `elasticd run --help`."),
        (["status", "--nope"], "No such option '--nope'. See `elasticd status --help`."),
    ],
)
def test_what_is_unknown_or_missing_points_to_the_help(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(argv) == 2
    assert capsys.readouterr().err == f"elasticd: {says}\n"
