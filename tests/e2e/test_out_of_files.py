"""An agent that runs out of file descriptors."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from tests.e2e.harness import Agent, Cluster
from tests.e2e.stage import Script


def take_all_but(agent: Agent, left: int) -> None:
    """Act as if all descriptors but these were in use, the reserve included."""
    used = len(os.listdir(Path("/proc", str(agent.pid), "fd")))
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (used + left, used + left))


@pytest.mark.parametrize("how", ["unnoticed", "as a worker is to be replaced"])
def test_an_agent_without_files_stops_its_workers_and_leaves_and_the_others_go_on(
    cluster: Cluster, how: str
) -> None:
    cluster.limits = (1, 2)
    cluster.direct(lambda player: Script(on_sigterm="save"))
    (a,) = cluster.start("a")
    cluster.until_said(a, "leader.elected")
    (b,) = cluster.start("b")
    first = cluster.world(2)
    take_all_but(b, 3)
    if how != "unnoticed":
        first.on("a")[0].tell("exit", code=5)
    assert b.end() == 3, b.said()
    (sentence,) = b.text
    assert sentence.startswith("elasticd: the agent has run out of file descriptors"), sentence
    cluster.until_gone(first.on("b"))
    second = cluster.world(1, after=first)
    assert second.nodes == ("a",)
    cluster.finishes(a)
