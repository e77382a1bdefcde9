from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from elasticd.cli.complaint import Complaint
from elasticd.cli.history import events, logs
from elasticd.core.facts import Cause, Exit, Failure
from elasticd.core.reasons import FailureCharged, Reason, RoundFormed, WorkersStarted
from elasticd.telemetry import runs
from elasticd.telemetry.events import FILE, event

Run = Callable[..., Result]


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two rounds of the job "train" on node a, whose slot 0 was left out of the second."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "elsewhere" / "train_x1"
    for attempt, ranks in ((0, 2), (1, 1)):
        for rank in range(ranks):
            place = folder / f"attempt_{attempt}" / str(rank)
            place.mkdir(parents=True)
            (place / "stdout.log").write_text(f"printed in {attempt} by {rank}\n")
            (place / "stderr.log").write_text("")
    failed = FailureCharged(
        Failure("a", Exit(0, 0, 1, 3.0, "boom", log=str(folder / "attempt_0" / "0"))), 1, 10
    )
    told: list[tuple[Reason, dict[str, object]]] = [
        (RoundFormed(1, 2, 1, Cause.START), {}),
        (WorkersStarted(1, (0, 1), 2), {"slots": (0, 1)}),
        (failed, {}),
        (WorkersStarted(2, (0,), 1), {"slots": (1,)}),
    ]
    lines = [json.dumps(event(r, float(n), "train", "a", **more)) for n, (r, more) in enumerate(told)]
    (folder / FILE).write_text("\n".join([*lines, ""]))
    runs.note(runs.state_dir(), "train", "a", 1.0, folder)
    return folder


def say(command: object, *argv: str) -> str:
    result = CliRunner().invoke(command, argv, standalone_mode=False)  # type: ignore[arg-type]
    if result.exception is not None:
        raise result.exception
    return result.output


def test_events_of_a_job_are_told_in_words_and_as_json(ran: Path) -> None:
    lines = say(events, "train").splitlines()
    assert len(lines) == 4
    assert "round 1 formed with 2 workers" in lines[0] and "boom" in lines[2]
    assert [json.loads(line)["event"] for line in say(events, "--json").splitlines()][2] == "failure.charged"


def test_logs_are_those_of_the_last_round(ran: Path) -> None:
    assert "printed in 1 by 0" in say(logs, "train")
    assert "printed in 0" not in say(logs, "train")


def test_a_slot_is_found_whatever_its_local_rank_was(ran: Path) -> None:
    assert "printed in 1 by 0" in say(logs, "train", "--slot", "1")
    with pytest.raises(Complaint, match="slot 0"):
        say(logs, "train", "--slot", "0")


def test_the_output_of_the_worker_that_failed_is_found_after_its_round(ran: Path) -> None:
    said = say(logs, "--failed")
    assert "printed in 0 by 0" in said and "rank 0 (slot 0 on a) ended with exit code 1: boom" in said


def test_that_a_worker_printed_nothing_is_said(ran: Path) -> None:
    for kept in ran.glob("attempt_1/*/*.log"):
        kept.write_text("")
    assert say(logs, "train", "--slot", "1") == "it printed nothing\n"


def test_what_is_not_here_is_said_in_a_sentence(
    ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Complaint, match="named other is kept on this machine: there are train"):
        say(events, "other")
    with pytest.raises(Complaint, match="named b ran here: there is a"):
        say(logs, "train", "--node", "b")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "empty"))
    with pytest.raises(Complaint, match="no run has left anything"):
        say(events)
