"""Restarts of real jobs, forked from a process that has torch imported, or not."""

import time

import pytest

from .conftest import PATIENCE_S, PROGRAMS, Launcher, Running

READY = "zygote.ready"


def wait_for(running: Running, text: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while text not in running.err.read_text():  # a log file tells nobody that it grows
        assert running.process.poll() is None, running.err.read_text()
        assert time.monotonic() < deadline, running.err.read_text()
        time.sleep(0.05)


def test_a_restarted_job_is_forked_by_itself(elasticd: Launcher) -> None:
    running = elasticd.start(PROGRAMS / "crash_when_told.py", restarts=3)
    wait_for(running, READY)
    (elasticd.folder / "crash").touch()
    ended = running.end()
    assert ended.status == 0, ended.err
    assert ended.printed("rank 0 attempt 1 forked", "rank 1 attempt 1 forked")


@pytest.mark.parametrize("how", ["option", "environment"])
def test_a_job_that_asks_for_fresh_starts_has_them(elasticd: Launcher, how: str) -> None:
    (elasticd.folder / "crash").touch()
    words, env = (["--fresh-start"], {}) if how == "option" else ([], {"ELASTICD_FRESH_START": "1"})
    ended = elasticd.run(*words, PROGRAMS / "crash_when_told.py", restarts=3, env=env)
    assert ended.status == 0, ended.err
    assert ended.printed("rank 0 attempt 1 fresh", "rank 1 attempt 1 fresh")
    assert READY not in ended.err
