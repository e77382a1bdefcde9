from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from elasticd.cli.command_error import CommandError
from elasticd.cli.history_commands import events, logs
from elasticd.core.facts import Cause, Exit, Failure, Outcome
from elasticd.core.reasons import (
    FailureCharged,
    JobEnded,
    Reason,
    RoundFormed,
    StandbysStarted,
    WorkerEnded,
    WorkersStarted,
)
from elasticd.procs.linux import started_at
from elasticd.telemetry import runs
from elasticd.telemetry.events import FILE, STARTED, event, of_agent

Run = Callable[..., Result]


Told = tuple[Reason, dict[str, object]]


def wrote(folder: Path, *told: Told, at: float = 0.0, node: str = "a") -> None:
    """Write the events of one agent in the job "train", a second apart."""
    folder.mkdir(parents=True, exist_ok=True)
    began = of_agent(STARTED, at, "train", node, "here", etcd="http://e:2379")
    lines = [began, *(event(r, at + n, "train", node, **more) for n, (r, more) in enumerate(told))]
    (folder / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs.note(runs.state_dir(), "train", node, at, folder)


def printed(place: Path, text: str) -> str:
    place.mkdir(parents=True)
    (place / "stdout.log").write_text(f"printed {text}\n")
    (place / "stderr.log").write_text("")
    return str(place)


def failed(rank: int, round: int, log: str) -> WorkerEnded:
    return WorkerEnded(round, rank, rank, 1, f"boom {rank}", log=log)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """Write a run of two rounds of the job "train" on node a. Its slot 0 was left out of the second round."""
    folder = tmp_path / "elsewhere" / "train_x1"
    for attempt, ranks in ((0, 2), (1, 1)):
        for rank in range(ranks):
            printed(folder / f"attempt_{attempt}" / str(rank), f"in {attempt} by {rank}")
    log = str(folder / "attempt_0" / "0")
    wrote(
        folder,
        (RoundFormed(1, 2, 1, Cause.START), {}),
        (WorkersStarted(1, (0, 1), 2), {"slots": (0, 1)}),
        (FailureCharged(Failure("a", Exit(0, 0, 1, 3.0, "boom", log=log)), 1, 10), {}),
        (WorkersStarted(2, (0,), 1), {"slots": (1,)}),
    )
    return folder


def say(command: object, *argv: str) -> str:
    result = CliRunner().invoke(command, argv, standalone_mode=False)  # type: ignore[arg-type]
    if result.exception is not None:
        raise result.exception
    return result.output


def test_events_of_a_job_are_told_in_words_and_as_json(ran: Path) -> None:
    lines = say(events, "train").splitlines()
    assert len(lines) == 5
    assert "round 1 formed with 2 workers" in lines[1] and "boom" in lines[3]
    assert [json.loads(line)["event"] for line in say(events, "--json").splitlines()][3] == "failure.charged"


def test_logs_are_those_of_each_slots_last_worker_whatever_its_local_rank_was(ran: Path) -> None:
    said = say(logs, "train")
    assert "printed in 0 by 0" in said and "printed in 1 by 0" in said and "by 1" not in said
    assert "printed in 1 by 0" in say(logs, "train", "--slot", "1")
    assert "printed in 0 by 0" in say(logs, "train", "--slot", "0"), "which was left out since"
    with pytest.raises(CommandError, match="slot 2"):
        say(logs, "train", "--slot", "2")


def test_logs_of_a_slot_are_those_of_the_worker_that_took_a_dead_ones_place(tmp_path: Path) -> None:
    """The other workers keep their process, so their later rounds have no folders. A spare waits from the
    beginning."""
    folder = tmp_path / "elsewhere" / "train_x1"
    for place, text in (
        ("attempt_standby_1/2", "by the spare"),
        ("attempt_0/0", "by the survivor"),
        ("attempt_0/1", "by the dead"),
        ("attempt_standby_2/1", "by the first replacement"),
        ("attempt_standby_3/1", "by the second"),
    ):
        printed(folder / place, text)
    wrote(
        folder,
        (StandbysStarted((2,)), {}),
        (WorkersStarted(1, (0, 1), 2), {"slots": (0, 1)}),
        (WorkersStarted(2, (0,), 1), {"slots": (0,)}),
        (StandbysStarted((1,)), {}),
        (WorkersStarted(3, (0, 1), 2), {"slots": (0, 1)}),
        (StandbysStarted((1,)), {}),
    )
    said = say(logs, "train")
    for who in ("survivor", "second", "spare"):
        assert f"by the {who}" in said
    assert "by the dead" not in said and "by the first replacement" not in said
    assert "by the second" in say(logs, "--slot", "1")


def test_the_output_of_the_worker_that_failed_is_found_after_its_round(ran: Path) -> None:
    said = say(logs, "--failed")
    assert "printed in 0 by 0" in said and "rank 0 (slot 0 on a) ended with exit code 1: boom" in said


def test_the_output_of_a_failed_worker_is_found_where_it_is_though_another_node_leads(tmp_path: Path) -> None:
    """Only the leader reports the charge. A worker that ends a moment later has lost a peer."""
    folder = tmp_path / "elsewhere" / "train_x1"
    first, second, echo = (
        printed(folder / place, place) for place in ("old/1", "attempt_1/1", "attempt_1/0")
    )
    wrote(
        folder,
        (failed(1, 1, first), {}),
        (failed(1, 2, second), {}),
        (failed(0, 2, echo), {}),
    )
    said = say(logs, "--failed")
    assert "printed attempt_1/1" in said and "rank 1 (slot 1) ended with exit code 1: boom 1" in said


def test_the_leader_s_events_name_the_failure_and_the_place_of_its_output(tmp_path: Path) -> None:
    echo = printed(tmp_path / "attempt_0" / "0", "by an echo")
    on_b = Failure("b", Exit(1, 1, 1, 0.5, "boom", log="/only/there"))
    wrote(tmp_path / "x", (failed(0, 1, echo), {}), (FailureCharged(on_b, 1, 10), {}))
    with pytest.raises(CommandError, match="boom.*; its output is on the machine of node b"):
        say(logs, "--failed")


def test_only_the_last_run_of_a_job_is_shown_without_all_runs(tmp_path: Path) -> None:
    ended = (JobEnded(Outcome.SUCCEEDED, "done"), {})
    formed = (RoundFormed(1, 2, 2, Cause.START), {})
    log = printed(tmp_path / "1" / "attempt_0" / "0", "in the first run")
    start = (WorkersStarted(1, (0,), 2), {"slots": (0,)})
    wrote(tmp_path / "1", formed, start, (failed(0, 1, log), {}), ended, at=100)
    wrote(tmp_path / "2", formed, ended, at=200)
    wrote(tmp_path / "3", formed, at=200.5, node="b")
    told = [json.loads(line) for line in say(events, "--json").splitlines()]
    assert {(e["node"], e["at"] >= 200) for e in told} == {("a", True), ("b", True)}, "both nodes of the last"
    assert len(say(events, "--json", "--all-runs").splitlines()) == len(told) + 5
    with pytest.raises(CommandError, match="no failure of train is known"):
        say(logs, "--failed")
    with pytest.raises(CommandError, match="no output of a worker of train is kept"):
        say(logs)


def test_logs_of_a_worker_that_printed_nothing_say_so(ran: Path) -> None:
    for kept in ran.glob("attempt_*/*/*.log"):
        kept.write_text("")
    assert say(logs, "train", "--slot", "1") == "nothing was printed\n"


def test_files_that_this_machine_lacks_are_an_error_of_one_sentence(
    ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CommandError, match="named other are kept on this machine; known: train"):
        say(events, "other")
    with pytest.raises(CommandError, match="named b ran on this machine; known: a"):
        say(logs, "train", "--node", "b")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "empty"))
    with pytest.raises(CommandError, match="no files of a run are kept"):
        say(events)


FOLLOW_INTERRUPTED = """
import signal, sys
from elasticd.cli import history_commands
from elasticd.cli.main import main

class InterruptedAtItsEnd:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def lines(event):
    InterruptedAtItsEnd()
    return told(event)

signal.signal(signal.SIGINT, signal.default_int_handler)
told, history_commands._lines = history_commands._lines, lines
sys.argv = ["elasticd", "events", "j", "--follow"]
main()
"""


def test_an_interrupt_ends_following_though_python_drops_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    runs.note(runs.state_dir(), "j", "a", 1.0, folder)
    here = {"pid": os.getpid(), "pid_started": started_at(os.getpid())}
    started = of_agent(STARTED, 1.0, "j", "a", "the agent started", **here)
    (folder / FILE).write_text(f"{json.dumps(started)}\n")
    followed = subprocess.run([sys.executable, "-c", FOLLOW_INTERRUPTED], capture_output=True, timeout=60)
    assert followed.returncode == 130, followed.stderr
