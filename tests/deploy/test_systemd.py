"""The unit for systemd: systemd's own checker accepts it, and it agrees with the documented exit codes."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from tests.cli.commandline import planned

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "systemd"
UNIT = FOLDER / "elasticd@.service"


def settings() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for line in UNIT.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found[key] += value.split() if key != "ExecStart" else [value]
    return found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_has_nothing_to_say_against_it(tmp_path: Path) -> None:
    text = UNIT.read_text().replace("/opt/elasticd/venv/bin/elasticd", shutil.which("true") or "/bin/true")
    (tmp_path / "elasticd@.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "elasticd@.service"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if str(tmp_path) in line or "elasticd@" in line
    ]
    assert done.returncode == 0 and not said, said


def test_systemd_restarts_exactly_the_exit_codes_documented_as_worth_another_try() -> None:
    told = settings()
    assert told["Restart"] == ["on-failure"], "also when killed, or not heard of by the watchdog"
    documented = {
        int(code): again == "yes"
        for codes, again in re.findall(
            r"^\| ([\d, ]+) \|.*\| (yes|no)? ?\|$", (ROOT / "docs/exit-codes.md").read_text(), re.MULTILINE
        )
        for code in codes.split(",")
    }
    assert set(documented) == {0, 1, 2, 3, 4, 5, 6, 7, 130, 143}
    never = {int(c) for c in told["RestartPreventExitStatus"] + told["SuccessExitStatus"]} | {0}
    # The agent was drained or stopped on purpose: people, not systemd, decide when it starts again.
    assert {code for code, again in documented.items() if again} - never == {3, 4}
    assert never - {130, 143} == {code for code, again in documented.items() if not again}


def test_systemd_hears_from_the_agent_alone_and_gives_it_time_to_drain() -> None:
    told = settings()
    assert (told["Type"], told["NotifyAccess"], told["KillMode"]) == (["notify"], ["main"], ["mixed"])
    assert int(told["WatchdogSec"][0].removesuffix("s")) >= 30, "a machine that swaps is not stuck"
    assert int(told["TimeoutStopSec"][0].removesuffix("s")) > 30 + 15
    assert told["User"] == ["elasticd"]


def test_the_real_command_line_takes_what_the_unit_and_the_example_say(tmp_path: Path) -> None:
    env = dict(pair.split("=", 1) for pair in settings()["Environment"])
    for line in (FOLDER / "gpt.env").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            env[name] = value.replace("/opt/elasticd/workers", f"{ROOT}/workers")
    for name in ("ca.crt", "job-gpt.crt", "job-gpt.key"):
        (tmp_path / name).write_text("x")
    env = {k: v.replace("/etc/elasticd/tls", str(tmp_path)).replace("%i", "gpt") for k, v in env.items()}
    (command,) = settings()["ExecStart"]
    _, word, *rest = command.split()
    assert word == "run"
    argv = [part for w in rest for part in env[w.removeprefix("$")].split()]
    config = planned(*argv, environ={k: v for k, v in env.items() if not k.startswith("SCRIPT")}).config
    assert config.job == "gpt" and config.etcd is not None and config.etcd.tls
    assert config.command.args == ("--steps=5000",)
