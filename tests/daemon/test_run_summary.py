"""What a run reports at its end: a sentence, an exit code, an error file."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from elasticd.checkpoint.server.save_report import Fate, SaveReport
from elasticd.core.agent_messages import LeaveJob
from elasticd.core.facts import Cause, Limits, Phase, Round
from elasticd.core.ledger import Kind
from elasticd.daemon.config import Command, CommandKind, RunConfig
from elasticd.daemon.run_summary import began_at, closing_text, kept, left_behind, why_silent
from elasticd.etcd.access import parse_endpoints
from elasticd.telemetry.liveview import _write_all
from tests import forkserver


def elasticd_run(
    folder: Path, script: str, *options: str, fork: bool = True, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run the command. ``fork``: not if an import of torch is to fail."""
    (folder / "job.py").write_text(script)
    elasticd = str(Path(sys.executable).with_name("elasticd"))
    argv = [elasticd, "run", "--plain", *options, str(folder / "job.py")]
    env = {**os.environ, "XDG_STATE_HOME": str(folder), "TMPDIR": str(folder), **environ}
    if fork:
        return forkserver.run(argv, env=env, cwd=folder, timeout_s=120)
    return subprocess.run(
        argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )


def test_a_port_that_does_not_answer_is_told_apart_from_one_that_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        access = parse_endpoints(f"http://127.0.0.1:{mute.getsockname()[1]}", timeout_s=0.2)
        assert why_silent("it is silent", access).startswith("it is silent: what listens at")


@pytest.mark.parametrize("code", [129, 130, 131, 143])
def test_a_node_that_leaves_by_any_signal_is_named(code: int) -> None:
    config = RunConfig(
        "j", "n", "127.0.0.1", Limits(1, 1), 1, Command(CommandKind.SCRIPT, "job.py"), fingerprint="f"
    )
    assert closing_text(config, None, LeaveJob(code, "drained"), 65.0, {}) == "j: n drained, after 1 min 5 s."
    seen = Round(2, Phase.LIVE, (), "x:1", Cause.WORKER_FAILED, 0.0, restarts=1)
    said = closing_text(config, None, LeaveJob(code, "drained"), 65.0, {Kind.PRODUCTIVE: 60.0}, "", seen)
    assert said.splitlines() == [
        "j: n drained, after 1 min 5 s in 2 rounds, 1 restart on the way.",
        "Time: 100.0 % productive of 1 min of worker time.",
    ]


def test_a_good_end_names_what_was_kept(tmp_path: Path) -> None:
    script = "from elasticd import worker\nworker.checkpointed('/snapshots/newest.pt')\n"
    ended = elasticd_run(tmp_path, script, "--job", "j")
    assert ended.returncode == 0, ended.stderr
    *_, report, logs, snapshot = ended.stderr.splitlines()
    assert (report, snapshot) == ("Report: elasticd report j", "Snapshot: /snapshots/newest.pt")
    assert logs.startswith(f"Logs: {tmp_path}") and Path(logs.removeprefix("Logs: ")).is_dir()


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("s3://bucket/run", "Checkpoint of step 40: s3://bucket/run/step-40"),
        (None, "Checkpoint of step 40: step-40"),
    ],
)
def test_the_newest_checkpoint_is_named_with_its_place(place: str | None, line: str) -> None:
    env = {"ELASTICD_CHECKPOINTS": place} if place else {}
    command = Command(CommandKind.SCRIPT, "job.py")
    config = RunConfig("j", "n", "127.0.0.1", Limits(1, 1), 1, command, fingerprint="f", env=env)
    newest = SaveReport(Fate.COMMITTED, 40, "step-40")
    assert kept(config, None, newest, "") == ["Report: elasticd report j", line]


def test_a_job_is_said_to_have_taken_its_own_time_by_a_node_that_came_late_too() -> None:
    last = Round(2, Phase.ENDED, (), "x:1", Cause.GREW, 0.0, began=100.0)
    assert began_at(last, 400.0) == 100.0, "the job's, as it is over"
    assert began_at(last, 93.0) == 93.0 and began_at(None, 400.0) == 400.0
    assert began_at(replace(last, began=0.0), 400.0) == 400.0, "written by an older elasticd"


@pytest.mark.parametrize(
    ("said", "heard"), [("debug", "DEBUG"), pytest.param("", "None", marks=pytest.mark.slow)]
)
def test_a_log_level_torch_would_die_of_is_spelled_as_torch_wants_it(
    tmp_path: Path, said: str, heard: str
) -> None:
    script = "import os; print(os.environ.get('LOGLEVEL'))"
    ended = elasticd_run(tmp_path, script, "--min", "1", "--max", "1", fork=False, LOGLEVEL=said)
    assert (ended.returncode, ended.stdout.strip()) == (0, heard), ended.stderr


def test_a_failure_is_in_the_error_file_of_a_nested_launcher_and_in_the_termination_log(
    tmp_path: Path,
) -> None:
    script = (
        "import sys\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main(): raise ValueError('spoiled')\n"
        "main()\n"
    )
    file, log = tmp_path / "error.json", tmp_path / "log"
    options = ("--min", "1", "--max", "1", "--max-restarts", "0", "--termination-log", str(log))
    ended = elasticd_run(tmp_path, script, *options, TORCHELASTIC_ERROR_FILE=str(file))
    assert ended.returncode == 1, ended.stderr
    message = json.loads(file.read_text())["message"]
    assert "spoiled" in message["message"] and message["errorCode"] == 1
    assert "First to fail: rank" in log.read_text() and "ValueError: spoiled" in log.read_text()


def test_a_script_that_cannot_be_imported_is_tried_once(tmp_path: Path) -> None:
    ended = elasticd_run(tmp_path, "import no_such_module", "--min", "2", "--max", "2", "--slots", "2")
    assert ended.returncode == 1, ended.stderr
    error = "ModuleNotFoundError: No module named 'no_such_module'"
    assert f"the script cannot be run: {error}" in ended.stderr
    assert f"    {error}" in ended.stderr.splitlines(), "the traceback"
    assert ended.stderr.count("workers.started") == 1


def test_a_non_blocking_console_loses_no_output() -> None:
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    data = os.urandom(1 << 18)
    received = bytearray()
    with open(ours, "rb") as reader:
        writer = threading.Thread(target=lambda: (_write_all(theirs, data), os.close(theirs)))
        writer.start()
        received += reader.read()
        writer.join()
    assert received == data


SPAM = "import sys\nfor number in range(40_000): print(number)\nprint('and so it ended', file=sys.stderr)"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_run_whose_reader_has_left_goes_on_to_its_end(tmp_path: Path, stream: str) -> None:
    (tmp_path / "job.py").write_text(SPAM)
    ours, theirs = os.pipe()
    os.close(ours)  # a pipe that no process will read
    other = tmp_path / "other"
    try:
        with other.open("w") as file:
            run = forkserver.Forked(
                ["elasticd", "run", "--plain", str(tmp_path / "job.py")],
                env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
                cwd=tmp_path,
                stdout=theirs if stream == "stdout" else file.fileno(),
                stderr=theirs if stream == "stderr" else file.fileno(),
            )
            code = run.wait(120)
    finally:
        os.close(theirs)
    assert code == 0, other.read_text()
    assert ("39999" if stream == "stderr" else "and so it ended") in other.read_text()


@pytest.mark.parametrize(
    "closed",
    [*(pytest.param(one, marks=pytest.mark.slow) for one in ("<&-", ">&-", "2>&-")), "<&- >&- 2>&-"],
)
def test_a_run_without_standard_streams_is_no_other(tmp_path: Path, closed: str) -> None:
    (tmp_path / "job.py").write_text(f"open({str(tmp_path / 'done')!r}, 'w'); print('hello')")
    command = '"$0" -m elasticd.cli.main run --plain --min 1 --max 1 "$1" ' + closed
    ended = subprocess.run(
        ["sh", "-c", command, sys.executable, str(tmp_path / "job.py")],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0 and (tmp_path / "done").exists(), ended.stderr


def test_processes_that_a_run_leaves_are_named_with_what_to_do() -> None:
    one, two = left_behind((4711,)), left_behind((4711, 4712))
    assert one.startswith("elasticd: the kernel has not taken down process 4711 of this run after SIGKILL, ")
    assert one.endswith(" If this lasts, restart the machine.")
    assert "processes 4711 and 4712 of this run" in two
