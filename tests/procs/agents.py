"""Agents in processes of their own, for tests that kill them. Also functions that wait for processes
to end."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# The beginning of a program that calls its agent.
CALL = """
import os
from elasticd.channel.framing import Channel, connect
from elasticd.channel.worker_messages import *
def call():
    return Channel(connect(os.environ["ELASTICD_LINK"]), WORKER_TO_AGENT, AGENT_TO_WORKER)
"""
PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0


def wait_until_gone(pids: Iterable[int]) -> None:
    """Wait until these processes have ended, whose children they may be."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([fd], [], [], PATIENCE_S)[0], f"process {pid} is still there"
        finally:
            os.close(fd)


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(holds: Callable[[], object], what: str) -> None:
    """Poll until the condition holds, if no event tells of a change."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:g} s"
        time.sleep(0.01)


class Agent:
    """Runs ``programs/agent.py``. The output of the agent and its workers is read line by line."""

    def __init__(self, folder: Path, command: list[str], workers: int = 2, **more: Any) -> None:
        asked = {"folder": str(folder), "command": command, "workers": workers, **more}
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "agent.py"), json.dumps(asked)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        self.heard: list[dict[str, Any]] = []
        self.families: list[dict[str, int]] = []

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self, what: str, count: int = 1) -> list[dict[str, Any]]:
        """Read on until the agent has printed this text so often."""
        while len(said := [line for line in self.heard if line["say"] == what]) < count:
            self._read_line()
        return said

    def hear_families(self, count: int) -> list[dict[str, int]]:
        while len(self.families) < count:
            self._read_line()
        return self.families

    def _read_line(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        assert line, f"the agent ended; it said {self.heard}"
        if line.startswith("family "):
            self.families.append(json.loads(line.removeprefix("family ")))
        elif line.startswith("{"):
            self.heard.append(json.loads(line))

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        for number in (signal.SIGKILL, signal.SIGCONT):
            if self.process.poll() is None:
                self.signal(number)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        ready = [line for line in self.heard if line["say"] == "ready"]
        wait_until_gone([line["warden"] for line in ready])
        for line in ready:  # the test killed both agent and warden, so nobody was left to end the processes
            for path in line["paths"]:
                shutil.rmtree(path, ignore_errors=True)
