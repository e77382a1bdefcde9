"""What the commands show of a run: while the run lasts, after its end, and after a crash."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.e2e.harness import ELASTICD, PATIENCE_S, Cluster


@pytest.fixture
def standalone(clusters: Callable[[str | None], Cluster]) -> Cluster:
    return clusters(None)


def told(cluster: Cluster, *command: str, of: str = "") -> str:
    """Return the output of the command, once the output has the text: events are written with a delay."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        said = cluster.command(*command, etcd=False)
        if said.code == 0 and of in said.out:
            return said.out
    raise AssertionError(f"not told in {PATIENCE_S:g} s: {of!r}; last: {said}\n{cluster.state()}")


def test_events_follow_ends_with_the_job_and_the_report_tells_what_happened(
    standalone: Cluster,
) -> None:
    standalone.limits = (2, 2)
    (a,) = standalone.start("a", slots=2)
    world = standalone.world(2)
    told(standalone, "events", standalone.job)
    following = subprocess.Popen(
        [ELASTICD, "events", standalone.job, "--follow"],
        env=standalone.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    os.kill(world.players[1].pid, signal.SIGKILL)
    standalone.world(2, after=world)
    standalone.finishes(a)
    followed, _ = following.communicate(timeout=PATIENCE_S)
    assert following.returncode == 0
    assert "round 2 formed" in followed and "finished after" in followed.splitlines()[-1]
    report = standalone.command("report", standalone.job, etcd=False)
    assert report.code == 0 and "Rounds: 2" in report.out and "Failures: 1" in report.out
    assert "the job finished" in report.out and "productive" in report.out


def test_of_a_run_that_crashed_the_report_tells_as_far_as_it_went(cluster: Cluster) -> None:
    cluster.limits = (1, 1)
    (a,) = cluster.start("a")
    world = cluster.world(1)
    assert "the job still runs" in told(cluster, "report", cluster.job, of="s productive")
    a.kill()
    cluster.until_gone(world.players)
    report = cluster.command("report", cluster.job, etcd=False)
    assert report.code == 0 and "the agent on a died unexpectedly" in report.out
    assert "a slot 0: " in report.out and "s productive" in report.out
