"""Real torchrun agents on a real etcd, in the cases that torch's own back ends get wrong."""

from __future__ import annotations

import signal

import pytest
from torchrun_harness import Agents, gone, runs


def test_the_node_of_rank_0_dies_and_comes_back(agents: Agents) -> None:
    pair = [agents.start("1:2"), agents.start("1:2")]
    for agent in pair:
        agent.joins(world=2)
    dies, stays = sorted(pair, key=lambda agent: agent.rank_in(world=2))
    before = stays.worlds(2)
    dies.signal(signal.SIGKILL)
    stays.joins(world=1)
    returns = agents.start("1:2")
    stays.joins(world=2, times=before + 1)
    returns.joins(world=2)
    agents.stop.touch()
    assert (stays.ends(), returns.ends()) == (0, 0)
    assert "RendezvousClosedError" not in stays.said + returns.said


@pytest.mark.slow
def test_the_node_of_rank_0_of_three_dies_and_the_rest_goes_on(agents: Agents) -> None:
    three = [agents.start("2:3") for _ in range(3)]
    for agent in three:
        agent.joins(world=3)
    dies, *rest = sorted(three, key=lambda agent: agent.rank_in(world=3))
    worker = dies.joins(world=3)
    before = [agent.worlds(2) for agent in rest]
    dies.signal(signal.SIGKILL)
    gone(worker)
    for agent, worlds in zip(rest, before, strict=True):
        agent.joins(world=2, times=worlds + 1)
    agents.stop.touch()
    assert [agent.ends() for agent in rest] == [0, 0]


@pytest.mark.slow
def test_an_agent_stopped_past_its_lease_never_trains_beside_the_new_world(agents: Agents) -> None:
    pair = [agents.start("1:2", "alone"), agents.start("1:2", "alone")]
    for agent in pair:
        agent.joins(world=2)
    stays, stopped = sorted(pair, key=lambda agent: agent.rank_in(world=2))
    before = stays.worlds(2), stays.worlds(1)
    worker = stopped.joins(world=2, times=stopped.worlds(2))
    stopped.signal(signal.SIGSTOP)
    stays.joins(world=1, times=before[1] + 1)
    assert not runs(worker), "the old world still trains beside the new one"
    stopped.signal(signal.SIGCONT)
    stays.joins(world=2, times=before[0] + 1)
    agents.stop.touch()
    assert (stays.ends(), stopped.ends()) == (0, 0)


def test_an_agent_that_is_killed_leaves_no_worker_behind(agents: Agents) -> None:
    agent = agents.start("1:1", nproc=2)
    workers = [int(m[1]) for m in agent.hears(r"<joined rank=\d world=2 pid=(\d+)", times=2)]
    agent.signal(signal.SIGKILL)
    for pid in workers:
        gone(pid)


@pytest.mark.slow
def test_an_agent_that_is_terminated_leaves_at_once_and_does_not_end_the_job(agents: Agents) -> None:
    pair = [agents.start("1:2"), agents.start("1:2")]
    for agent in pair:
        agent.joins(world=2)
    stays, leaves = pair
    leaves.signal(signal.SIGTERM)
    assert leaves.ends() != 0
    stays.joins(world=1)
    agents.stop.touch()
    assert stays.ends() == 0


@pytest.mark.slow
def test_workers_killed_three_times_in_a_row_come_back_three_times(agents: Agents) -> None:
    agent = agents.start("1:1", "crash", "3", nproc=2, restarts=3)
    agent.hears(r"<joined rank=\d world=2 pid=\d+ attempt=3>", times=2)
    agents.stop.touch()
    assert agent.ends() == 0
    assert len(agent.hears("<joined")) == 8


@pytest.mark.slow
def test_a_job_that_fails_for_good_ends_on_all_nodes(agents: Agents) -> None:
    pair = [agents.start("2:2", "crash", "9", restarts=0) for _ in range(2)]
    assert [agent.ends() != 0 for agent in pair] == [True, True]
