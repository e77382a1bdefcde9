"""Runs chaos for some minutes. Also: what the command says on a machine that cannot run chaos."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.__main__ import unable

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "tests.chaos"]


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *argv], cwd=ROOT, capture_output=True, text=True)


def test_a_fault_that_does_not_exist_is_bad_usage() -> None:
    done = run("--only", "worker.kill,worker.tickle")
    assert done.returncode == 2
    assert "no such fault: worker.tickle" in done.stderr


def test_a_plan_can_be_seen_before() -> None:
    done = run("--plan", "--seed", "7")
    assert done.returncode == 0
    assert "episode 0" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give it up")
def test_without_root_the_error_is_one_sentence() -> None:
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", *COMMAND, "--seed", "7"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("tests.chaos: needs root") and len(done.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(bool(unable()), reason=unable())
@pytest.mark.parametrize("busy", [0, 8])
def test_trainings_hold_under_every_fault(busy: int) -> None:
    done = run("--minutes", "4", "--busy", str(busy))
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(unable()), reason=unable())
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_it_when_it_is_told_to_end(number: int, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "CHAOS_TEST": str(tmp_path)}
    with subprocess.Popen(
        [*COMMAND, "--seed", "7"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as chaos:
        assert chaos.stdout is not None
        while "trains" not in (line := chaos.stdout.readline()):
            assert line, "it ended by itself"
        theirs = [os.pidfd_open(pid) for pid in marked(f"CHAOS_TEST={tmp_path}") if pid != chaos.pid]
        assert len(theirs) > 10
        chaos.send_signal(number)
        assert chaos.wait() == (-number if number == signal.SIGKILL else 128 + number)
    for pidfd in theirs:
        assert ended(pidfd)
    if number != signal.SIGKILL:
        assert not list(tmp_path.iterdir())


def marked(entry: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and entry.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 60.0)[0])
