from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from elasticd.cli.command_error import CommandError
from elasticd.cli.history_commands import living, report
from elasticd.core.facts import Cause
from elasticd.core.reasons import RoundFormed
from elasticd.procs.linux import started_at
from elasticd.telemetry import runs
from elasticd.telemetry.events import ENDED, FILE, STARTED, event, of_agent


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def agent(folder: Path, at: float, node: str = "a", *, outcome: str = "", **fields: Any) -> Path:
    """Write the part of one agent in the job "train", in which it formed round ``at``."""
    folder.mkdir(parents=True)
    lines = [
        of_agent(STARTED, at, "train", node, "here", **{"etcd": "http://e:2379", **fields}),
        event(RoundFormed(int(at), 2, 1, Cause.START), at + 1, "train", node),
    ]
    if outcome:
        lines.append(of_agent(ENDED, at + 5, "train", node, "train ended.", code=0, outcome=outcome))
    (folder / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs.note(runs.state_dir(), "train", node, at, folder)
    return folder


def say(*argv: str) -> str:
    result = CliRunner().invoke(report, argv, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.output


def test_a_report_is_printed_and_written_as_a_page_beside_the_events(tmp_path: Path) -> None:
    folder = agent(tmp_path / "x", 1, outcome="succeeded")
    text = say("train")
    assert "train: train ended" in text and f"The page: {folder / 'report.html'}" in text
    assert "<title>train: report</title>" in (folder / "report.html").read_text()
    assert say() == text, "it is the job that ran last"


def test_the_page_goes_where_it_is_asked_to_or_nowhere(tmp_path: Path) -> None:
    folder = agent(tmp_path / "x", 1)
    say("train", "--text")
    say("train", "--out", str(tmp_path / "mine.html"))
    assert (tmp_path / "mine.html").exists() and not (folder / "report.html").exists()
    with pytest.raises(CommandError, match="cannot be written: .* --out FILE"):
        say("train", "--out", str(tmp_path / "gone" / "mine.html"))


def test_the_agents_of_one_run_are_told_together_and_earlier_runs_not_at_all(tmp_path: Path) -> None:
    agent(tmp_path / "1", 100, outcome="failed")
    agent(tmp_path / "2", 200)
    agent(tmp_path / "3", 300, "b", outcome="succeeded")
    text = say("train", "--text")
    assert "Rounds: 2" in text and "\n  200 " in text and "\n  300 " in text and "\n  100 " not in text


def test_agents_of_one_run_on_this_machine_are_told_together_though_all_have_heard_of_its_end(
    tmp_path: Path,
) -> None:
    agent(tmp_path / "1", 100, outcome="succeeded")
    agent(tmp_path / "2", 101, "b", outcome="succeeded")
    text = say("train", "--text")
    assert "Rounds: 2" in text and "\n  100 " in text and "\n  101 " in text


def test_each_standalone_run_is_one_of_its_own(tmp_path: Path) -> None:
    agent(tmp_path / "1", 100, etcd="embedded")
    agent(tmp_path / "2", 200, etcd="embedded")
    assert "Rounds: 1" in say("train", "--text")


def test_the_folder_of_any_run_will_do(tmp_path: Path) -> None:
    older = agent(tmp_path / "1", 100, outcome="failed")
    agent(tmp_path / "2", 200)
    assert "\n  100 " in say(str(older), "--text")
    with pytest.raises(CommandError, match=r"not the folder of a run: there is no events\.jsonl"):
        say(str(tmp_path))


def test_an_agent_lives_if_it_is_the_very_process_that_wrote_so() -> None:
    me = os.getpid()
    assert living({"event": STARTED, "pid": me, "pid_started": started_at(me)})
    assert not living({"event": STARTED, "pid": me, "pid_started": started_at(me) + 1})
    assert not living({"event": STARTED})
