"""Restarts of real jobs. Their workers are forked from a process that has imported torch, or are new
processes."""

import time

import pytest

from .conftest import PATIENCE_S, PROGRAMS, Launcher, Running

READY = "zygote.ready"


def wait_for(running: Running, text: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while text not in running.err.read_text():  # no event tells that a log file grows
        assert running.process.poll() is None, running.err.read_text()
        assert time.monotonic() < deadline, running.err.read_text()
        time.sleep(0.05)


def test_each_start_of_a_job_is_forked(elasticd: Launcher) -> None:
    running = elasticd.start(PROGRAMS / "crash_when_told.py", nproc=1, restarts=3)
    wait_for(running, READY)
    (elasticd.folder / "crash").touch()
    ended = running.end()
    assert ended.status == 0, ended.err
    assert ended.printed("rank 0 attempt 0 forked", "rank 0 attempt 1 forked")


def test_the_first_workers_are_forked_with_torch_imported(elasticd: Launcher) -> None:
    ended = elasticd.run(PROGRAMS / "first_forks.py", nproc=3)
    assert ended.status == 0, ended.err
    assert ended.printed(*(f"rank {rank} forked 2.0" for rank in range(3))), ended.out
    assert ended.err.count(READY) == 1


@pytest.mark.slow
def test_a_job_that_asks_for_fresh_starts_has_them(elasticd: Launcher) -> None:
    (elasticd.folder / "crash").touch()
    ended = elasticd.run("--fresh-start", PROGRAMS / "crash_when_told.py", nproc=1, restarts=3)
    assert ended.status == 0, ended.err
    assert ended.printed("rank 0 attempt 0 fresh", "rank 0 attempt 1 fresh")
    assert READY not in ended.err
