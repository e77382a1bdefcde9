"""Nodes with different versions of elasticd, under slow watches: the workers of a world have one version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest

from elasticd.core.facts import Limits
from tests.sim.cluster import Cluster, Setup, SimAgent
from tests.sim.invariants import Invariants
from tests.sim.procs import Job

SEEDS = range(30)
SETTLED_S = 30.0


def started(seed: int) -> Cluster:
    """Return a cluster without nodes, whose watches tell half of the changes up to a second late."""
    cluster = Cluster(seed, Setup((), Limits(1, 8), job=Job(total_steps=100_000)))
    cluster.network.watch_lag, cluster.network.watch_lag_max_s = 0.5, 1.0
    Invariants(cluster)  # also compares the versions of a world's workers
    return cluster


def start(cluster: Cluster, versions: Mapping[str, str], within_s: float) -> list[SimAgent]:
    """Start nodes with these versions at random times, and return their agents a while later."""
    random, setup, before = Random(len(cluster.all)), cluster.setup, len(cluster.all)

    def join(name: str, version: str) -> None:
        cluster.setup = replace(setup, version=version)
        cluster.join(name, 2)
        cluster.setup = setup

    for name, version in versions.items():
        at = random.uniform(0.0, within_s)
        cluster.clock.after(at, lambda name=name, version=version: join(name, version))
    cluster.clock.run(until=cluster.clock.now() + SETTLED_S)
    return cluster.all[before:]


def version(agent: SimAgent) -> str:
    return agent.driver.state.wanted.version


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_that_starts_with_two_versions_keeps_nodes_of_one(seed: int) -> None:
    cluster = started(seed)
    agents = start(cluster, {"a": "1", "b": "2", "c": "1", "d": "2"}, within_s=0.05)
    assert len({version(agent) for agent in agents if agent.running}) == 1
    assert {agent.left.code for agent in agents if agent.left is not None} == {2}
    assert cluster.round is not None, "the other nodes train"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_without_nodes_goes_on_when_all_nodes_start_with_another_version(seed: int) -> None:
    """The first node gives the job its version. The watches of the other nodes may show that late."""
    cluster = started(seed)
    for agent in start(cluster, dict.fromkeys("abcd", "1"), within_s=0.05):
        agent.crash()
    cluster.clock.run(until=cluster.clock.now() + 10.0)
    agents = start(cluster, dict.fromkeys("abcd", "2"), within_s=0.05)
    assert all(agent.running for agent in agents), "no node takes another one for a node of the old version"
    (late,) = start(cluster, {"e": "1"}, within_s=0.0)
    assert late.left is not None and late.left.code == 2
    assert all(agent.running for agent in agents)
