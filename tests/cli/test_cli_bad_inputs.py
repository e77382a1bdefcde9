"""Each bad input gets one sentence that names what is wrong, before anything starts."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from elasticd.cli.command_error import CommandError
from elasticd.cli.main import _exit_code
from elasticd.cli.run_command import _try_store, run
from tests.cli.commandline import PretendMachine, planned, refused

FILES = {
    "ok.py": b"print('ok')\n",
    "bin.py": b"\x00\x01\x02",
    "coding.py": b"# -*- coding: nonsense -*-\n",
    "latin.py": b"print('\xff')\n",
    "prog.sh": b"#!/bin/sh\necho hi\n",
    "file": b"x",
}
ETCD = "--etcd=http://127.0.0.1:1"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "dir").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "says"),
    [
        # numbers
        ("--min a", "--min a is not a whole number."),
        ("--min 0", "--min 0 is less than 1."),
        ("--min 1e3", "--min 1e3 is not a whole number"),
        ("--min -1", "--min -1 is less than 1"),
        ("--min \uff12", "is not a whole number"),
        ("--min 1_0", "--min 1_0 is not a whole number"),
        ("--max 0x10", "--max 0x10 is not a whole number"),
        ("--max 1.5", "--max 1.5 is not a whole number."),
        ("--max ''", "--max '' is not a whole number."),
        ("--max -1", "--max -1 is less than 1"),
        ("--max_restarts few", "--max-restarts few is not a whole number."),
        ("--max-restarts -1", "--max-restarts -1 is less than 0"),
        (f"--max-restarts {'9' * 23}", "is more than 1,000,000,000"),
        (f"--min {'9' * 5000}", f"--min {'9' * 40}... is more than 1,000,000,000"),
        (f"--min -{'9' * 5000}", "is less than 1"),
        ("--local-ranks-filter a", "--local-ranks-filter 'a' is not a list of numbers"),
        ("--local-ranks-filter -1", "not a list of numbers"),
        (f"--local-ranks-filter {'9' * 5000}", "not a list of numbers"),
        ("--start-method teleport", "'teleport' is not one of 'spawn', 'fork', 'forkserver'"),
        ("--log-format xml", "'xml' is not one of 'auto', 'console', 'json'"),
        # sizes
        ("--min 4 --max 2", "--min 4 is above --max 2"),
        ("--min 2 --nnodes 2", "--nnodes counts nodes"),
        ("--slots 2 --nproc-per-node 2", "mean the same"),
        ("--nnodes 3:2", "1 <= MIN <= MAX"),
        ("--nnodes 0", "1 <= MIN <= MAX"),
        ("--nnodes many", "neither a number nor MIN:MAX"),
        ("--nnodes :", "neither a number nor MIN:MAX"),
        ("--nnodes 1:2:3", "neither a number nor MIN:MAX"),
        (f"--nnodes 1:{'9' * 20} {ETCD}", "is more than 1,000,000,000 nodes"),
        ("--nnodes 2", "--etcd"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:1", "--etcd"),
        ("--nnodes 2 --standalone", "--standalone"),
        ("--nproc-per-node 0", "at least 1 worker"),
        ("--nproc-per-node gpu", "does not have"),
        ("--nproc-per-node xpu", "does not have"),
        ("--nproc-per-node some", "none of a number"),
        ("--nproc-per-node 1025", "--nproc-per-node 1025 is more than the 1024"),
        ("--slots x", "neither a number nor auto"),
        ("--slots 1.5", "neither a number nor auto"),
        ("--slots ''", "neither a number nor auto"),
        ("--slots -1", "at least 1"),
        ("--slots 1025", "--slots 1025 is more than the 1024"),
        ("--slots 1024 --spares 1", "1025 is more than the 1024"),
        ("--slots 1 --min 2", "can never run --min 2"),
        ("--spares 10000", "1024"),
        ("--min 99999", "more than the 1024 workers that one node runs"),
        ("--min 1025 --max 9999", "--min 1025 is more than the 1024"),
        (f"--min=1 {ETCD}", "--max"),
        (f"--min=9 --max=9 {ETCD}", "--job NAME"),
        ("--unit=2 --min=3", "--min 3 is no multiple of --unit 2"),
        ("--unit=2 --max=5", "--max 5 is no multiple of --unit 2"),
        ("--unit=2 --nproc-per-node=3", "the number of workers, 3, is no multiple of --unit 2"),
        ("--unit=4 --sizes=4,6", "--sizes 6 is no multiple of --unit 4"),
        ("--unit=4 --slots=2 --max=4", "a unit of 4 workers does not fit on this node"),
        (f"--unit=4 --slots=2 --max=4 --unit-within=node {ETCD} --job=j", "or give --unit-within any"),
        ("--unit-within=node", "no effect without --unit N"),
        ("--sizes=2,x", "'2,x' is no list of numbers of workers"),
        ("--sizes=", "is no list of numbers of workers"),
        ("--sizes=0,2", "is no list of numbers of workers"),
        ("--sizes=2,4 --max=3", "--sizes has 4, which is above --max 3"),
        ("--sizes=2,4 --min=3", "--sizes has 2, which is below --min 3"),
        ("--sizes=2,4 --nnodes=2", "--nnodes counts nodes"),
        # times
        ("--join-timeout nan", "--join-timeout nan is not a finite number of seconds"),
        ("--join-timeout inf", "not a finite number"),
        ("--join-timeout 1e300", "is more than 1,000,000,000"),
        ("--grow-cooldown -1", "--grow-cooldown -1 is less than 0"),
        ("--grow-cooldown inf", "--grow-cooldown inf is not a finite number"),
        ("--grow-cooldown soon", "--grow-cooldown soon is not a number of seconds."),
        ("--node-ttl 1", "--node-ttl 1 is less than 2, and etcd keeps no lease shorter than that."),
        ("--node-ttl 1e12", "is more than 1,000,000,000"),
        *((f"--hang-after {after}", "--hang-after") for after in ("soon", "0", "-1", "nan", "inf")),
        ("--hang-after 1e999", "neither auto nor off"),
        ("--hang-after 1e300", "neither auto nor off"),
        ("--rdzv-conf join_timeout=1e300", "is not a length of time"),
        ("--rdzv-conf join_timeout=soon", "not a number"),
        ('--rdzv-conf "timeout=5\'"', "--rdzv-conf timeout=5' is not a number"),
        ("--rdzv-conf timeout=-1", "--rdzv-conf timeout=-1 is not a length"),
        ("--rdzv-conf a", "key=value"),
        ("--checkpoint-every 0", "--checkpoint-every"),
        ("--checkpoint-every -5m", "--checkpoint-every"),
        ("--checkpoint-rate 0", "--checkpoint-rate"),
        ("--memory 0", "--memory: '0' is no number of bytes, such as 200M"),
        ("--checkpoint-rate slow", "--checkpoint-rate: 'slow' is no number of bytes a second, such as"),
        (f"--checkpoint-rate {'9' * 400}", "--checkpoint-rate"),
        # places
        ("--checkpoints bogus://x", "bogus"),
        ("--checkpoints s3://", "s3:// names no folder"),
        ("--checkpoints s3:///", "names no folder"),
        ("--log-dir file", "cannot be written to: Not a directory"),
        ("--log-dir /proc/x", "cannot be written to"),
        ("--log-dir /dev/null/logs", "cannot be written to"),
        ("--address 192.0.2.7", "not an address of this machine"),
        ("--address 'a b'", "not an address"),
        ("--master-port 70000", "--master-port 70000 is more than 65,535"),
        ("--master-port -1", "--master-port -1 is less than 0"),
        *(
            (f"--http {place}", "is neither HOST:PORT (127.0.0.1:9408) nor off")
            for place in ("9408", ":9408", "127.0.0.1", "127.0.0.1:port", f"127.0.0.1:{'9' * 5000}")
        ),
        ("--http 127.0.0.1:70000", "neither HOST:PORT"),
        ("--http 203.0.113.9:80", "203.0.113.9 is not an address of this machine"),
        ("--http-cert file", "--http-cert is given without --http-key"),
        ("--http-key file", "--http-key is given without --http-cert"),
        ("--http-cert file --http-key file", "no PEM certificate"),
        ("--http-cert gone --http-key file", "No such file"),
        ("--http-token-file gone", "--http-token-file gone: No such file"),
        ("--http-token-file dir", "--http-token-file dir: Is a directory"),
        ("--http-token-file /dev/null", "holds no token"),
        ("--http-token-file latin.py", "holds no token"),
        ("--http-token-file prog.sh", "holds no token"),
        # etcd
        ("--etcd ''", "no etcd endpoint"),
        ("--etcd ,,", "no etcd endpoint"),
        ("--etcd 'nonsense nonsense'", "malformed"),
        ("--etcd http://", "names no host"),
        ("--etcd http://a:99999", "malformed"),
        ("--etcd http://a:0", "port 0"),
        ("--etcd http://[::1", "malformed"),
        ("--etcd http://user:pw@a:2379", "user name or password"),
        ("--etcd ftp://a:1", "ftp"),
        ("--etcd http://a:1,https://b:1", "mix"),
        ("--etcd http://a:1 --standalone", "--standalone"),
        ("--etcd https://a:1 --etcd-cacert dir", "Is a directory"),
        ("--etcd https://a:1 --etcd-cert /nowhere", "/nowhere"),
        ("--etcd-cacert /nowhere", "no --etcd"),
        ("--rdzv-backend etcd", "--rdzv-endpoint"),
        # names
        ("--job a/b", "slash"),
        ("--job ''", "empty"),
        ("--job ..", "file paths"),
        (f"--job {'x' * 500}", "500"),
        ("--job --min", "begins with a dash"),
        ("--job \x1b[31m", "cannot be seen"),
        ("--node a/b", "slash"),
        ("--node \u202e", "cannot be seen"),
        ("--tee 4", "--tee '4'"),
        ("--redirects 0:9", "--redirects"),
        ("--redirects 10:3", "--redirects"),
        ("--signals-to-handle SIGFOO", "SIGFOO"),
        ("--signals-to-handle SIGKILL", "SIGKILL"),
        ("--logs-specs nope", "nope"),
        ("--debug --logs-specs default", "--debug needs torch's own layout"),
        ("-m --no-python", "exclude each other"),
    ],
    ids=lambda value: value[:40],
)
def test_an_option_that_makes_no_sense_is_one_sentence(options: str, says: str, here: Path) -> None:
    sentence = refused(*shlex.split(options), "ok.py")
    assert says in sentence
    assert "\n" not in sentence and "Traceback" not in sentence


def test_slots_beyond_the_gpus_are_refused_and_the_way_out_is_named(here: Path) -> None:
    two = PretendMachine(gpu_count=2)
    assert "CUDA_VISIBLE_DEVICES=" in refused("--slots", "3", "ok.py", machine=two)


def test_no_two_workers_get_the_same_gpu_as_their_only_one(here: Path) -> None:
    option, visible = ("--virtual-local-rank", "ok.py"), {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert "has 2 for 3 slots" in refused("--nproc-per-node", "3", *option, environ=visible)
    for none in ("-1", "NoDevFiles", ""):
        assert planned("--nproc-per-node", "3", *option, environ={"CUDA_VISIBLE_DEVICES": none})
    assert planned("--nproc-per-node", "2", *option, environ=visible).config.slots == 2


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("dir", "is a directory"),
        ("nope.py", "does not exist"),
        ("bin.py", "null bytes"),
        ("coding.py", "nonsense"),
        ("latin.py", "latin.py:1"),
        ("prog.sh", "prog.sh:2"),
        ("loop", "symbolic links"),
        ("''", "empty"),
        ("x" * 5000, "File name too long"),
        ("-m ''", "empty"),
        ("-m .", "no module named"),
        ("-m nope.mod", "no module named nope.mod"),
        ("-m sys", "sys is built into Python"),
        ("-m job.py", "not a file"),
        ("--no-python nope", "no program named nope"),
        ("--no-python ./file", "not executable"),
        ("--no-python ./dir", "is a directory"),
    ],
    ids=lambda value: value[:40],
)
def test_a_script_that_cannot_be_run_is_one_sentence(script: str, says: str, here: Path) -> None:
    assert says in refused(*shlex.split(script))


@pytest.mark.parametrize(
    "variable", ["ELASTICD_MIN", "PET_MAX_RESTARTS", "ELASTICD_PLAIN", "ELASTICD_JOIN_TIMEOUT"]
)
def test_nonsense_in_the_environment_is_traced_to_it(
    variable: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "nonsense")
    assert f"from the environment variable {variable}" in refused("ok.py")


@pytest.mark.parametrize("value", ["--5", "\u00b2"])
def test_a_switch_that_is_neither_yes_nor_no_is_traced_to_its_variable(
    value: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICD_PLAIN", value)
    assert "from the environment variable ELASTICD_PLAIN" in refused("ok.py")


def test_a_switch_may_be_a_number_of_any_length(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICD_AUDIT", "9" * 5000)
    assert planned("ok.py").config.audit is not None


def test_the_environment_of_torch_s_agent_is_checked(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "9" * 400)
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in refused("ok.py")


def test_an_empty_variable_counts_as_unset_for_every_option(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = planned("--job", "job", "ok.py").config
    for option in run.params:
        if isinstance(option.envvar, str):
            monkeypatch.setenv(option.envvar, "")
    assert planned("--job", "job", "ok.py").config == before


def test_a_rank_that_cannot_be_shown_is_noted(here: Path) -> None:
    notes = planned("--slots", "2", "--max", "2", "--local-ranks-filter", "0,7", "ok.py").notes
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


def test_checkpoints_that_can_never_be_written_are_refused_before_the_start(here: Path) -> None:
    assert _try_store(planned("ok.py").config) == ""
    assert _try_store(planned("--checkpoints", str(here / "run"), "ok.py").config) == ""
    with pytest.raises(CommandError, match="checkpoints cannot be written to /proc/elasticd: "):
        _try_store(planned("--checkpoints", "/proc/elasticd", "ok.py").config)
