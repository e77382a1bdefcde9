"""An agent may open as many files as it needs. Its workers keep the limit that they would have without the
agent, unless their world is so large that they need more."""

from __future__ import annotations

import os
import queue
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from elasticd.channel.warden_messages import Ended
from elasticd.daemon.openfiles import of_a_worker
from elasticd.procs.warden_client import Warden

PATIENCE_S = 60.0
SAY = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
ASK = """
import resource, sys
from elasticd.daemon.config import CannotStart
from elasticd.daemon.openfiles import raise_limit
soft, hard, slots, workers = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    print(raise_limit(slots, workers), *resource.getrlimit(resource.RLIMIT_NOFILE))
except CannotStart as refusal:
    print(refusal)
"""


def ask(soft: int, hard: int, slots: int, workers: int) -> str:
    numbers = map(str, (soft, hard, slots, workers))
    return subprocess.run(
        [sys.executable, "-c", ASK, *numbers], check=True, capture_output=True, text=True
    ).stdout


def test_an_agent_raises_its_own_limit_and_remembers_what_it_was() -> None:
    assert ask(64, 900, 40, 40) == "64 900 900\n"


def test_a_hard_limit_of_files_that_is_too_low_is_refused_before_any_process_starts() -> None:
    refusal = ask(256, 256, 100, 200)
    assert refusal.startswith(
        "a process may have 256 files open here, and an agent of 100 slots in a world of at"
    )
    assert "raise the hard limit" in refusal and refusal.count("\n") == 1


@pytest.mark.parametrize(
    ("soft", "workers", "files"), [(1024, 8, 1024), (1024, 256, 1024), (1024, 1000, 2512), (64, 8, 64)]
)
def test_a_worker_may_open_a_connection_to_each_other_worker(soft: int, workers: int, files: int) -> None:
    assert of_a_worker(soft, workers) == files


def test_a_worker_s_limit_is_never_above_the_hard_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert of_a_worker(1024, 10**9) == hard


def test_a_worker_has_the_limit_it_would_have_had_and_a_service_the_agents(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ended: queue.Queue[Ended] = queue.Queue()
    said, wanted = [tmp_path / "worker", tmp_path / "service"], [f"100 {hard}\n", f"{soft} {hard}\n"]
    with Warden.start(worker_files=100) as warden:
        fds = [os.open(os.devnull, os.O_RDONLY), *(os.open(said[0], os.O_WRONLY | os.O_CREAT) for _ in "12")]
        argv = [sys.executable, "-c", SAY]
        warden.spawn_worker(argv, env=os.environ, cwd=str(tmp_path), fds=fds, ended=ended.put)
        warden.spawn_service(argv, log_path=said[1], ended=ended.put)
        assert [ended.get(timeout=PATIENCE_S).code for _ in said] == [0, 0]
    assert [file.read_text() for file in said] == wanted
