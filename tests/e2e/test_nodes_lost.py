"""Agents die or stop suddenly. What happens to their workers, and to the workers of other nodes."""

from __future__ import annotations

import signal

from elasticd.core.facts import Cause
from tests.e2e.harness import Cluster


def test_a_killed_agent_leaves_nothing_and_the_others_go_on_uncharged(cluster: Cluster) -> None:
    cluster.limits = (2, 3)
    a, b, c = cluster.start("a", "b", "c")
    first = cluster.world(3)
    (worker,) = first.on("c")
    orphan = cluster.orphan_of(worker)
    c.kill()
    cluster.until_gone([worker, orphan])
    second = cluster.world(2, after=first)
    assert "c" not in second.nodes
    assert second.restarts == 0
    assert cluster.round.cause is Cause.NODE_LOST
    cluster.goes_on(second)
    cluster.finishes(a, b)


def test_the_node_that_came_first_leads_and_has_rank_0_is_not_special(cluster: Cluster) -> None:
    cluster.limits = (2, 3)
    (a,) = cluster.start("a")
    cluster.until_said(a, "leader.elected")
    b, c = cluster.start("b", "c")
    first = cluster.world(3)
    assert first.nodes[0] == "a"
    a.kill()
    second = cluster.world(2, after=first)
    assert second.nodes == first.nodes[1:], "survivors keep their order"
    assert b.find("leader.elected") or c.find("leader.elected")
    # The node comes back as if nothing had happened.
    (a,) = cluster.start("a")
    third = cluster.world(3, after=second)
    assert third.nodes == (*second.nodes, "a")
    assert third.restarts == 0
    cluster.finishes(a, b, c)


def test_a_job_whose_agents_all_died_at_once_goes_on_in_a_later_round(cluster: Cluster) -> None:
    cluster.limits = (2, 2)
    agents = cluster.start("a", "b")
    first = cluster.world(2)
    for agent in agents:
        agent.signal(signal.SIGKILL)
    cluster.until_gone(first.players)
    a, b = cluster.start("a", "b")
    second = cluster.world(2, after=first)
    assert second.restarts == 0
    cluster.finishes(a, b)


def test_an_agent_stopped_past_its_lease_never_trains_beside_the_new_world(cluster: Cluster) -> None:
    cluster.limits = (1, 2)
    a, b = cluster.start("a", "b")
    first = cluster.world(2)
    b.signal(signal.SIGSTOP)
    # the stage records a step of the old world, if there is one: see Cluster.close
    second = cluster.world(1, after=first)
    assert second.nodes == ("a",)
    cluster.until_gone(first.on("b"))
    b.signal(signal.SIGCONT)
    third = cluster.world(2, after=second)
    assert third.nodes == ("a", "b"), "it comes back as a newcomer"
    assert third.restarts == 0
    cluster.finishes(a, b)


def test_a_stopped_leader_is_deposed_and_comes_back_as_a_follower(cluster: Cluster) -> None:
    cluster.limits = (1, 2)
    (a,) = cluster.start("a")
    cluster.until_said(a, "leader.elected")
    (b,) = cluster.start("b")
    first = cluster.world(2)
    a.signal(signal.SIGSTOP)
    second = cluster.world(1, after=first)
    cluster.until_said(b, "leader.elected")
    cluster.until_gone(first.on("a"))
    a.signal(signal.SIGCONT)
    cluster.world(2, after=second)
    assert len(a.find("leader.elected")) == 1
    cluster.finishes(a, b)


def test_below_the_minimum_the_job_waits_and_goes_on_when_a_node_is_back(cluster: Cluster) -> None:
    cluster.limits = (2, 2)
    a, b = cluster.start("a", "b")
    first = cluster.world(2)
    b.kill()
    cluster.until_anyone_said("job.waiting", have=1, need=2)
    cluster.until_gone(first.players)
    (b,) = cluster.start("b")
    second = cluster.world(2, after=first)
    assert second.restarts == 0
    cluster.finishes(a, b)


def test_a_job_that_stays_below_the_minimum_ends_with_3(cluster: Cluster) -> None:
    cluster.limits = (2, 2)
    cluster.pace["--join-timeout"] = "1"
    (a,) = cluster.start("a")
    assert a.end() == 3
    assert "only 1 of the 2 workers" in a.screen
    report = cluster.command("report", cluster.job, "--text", etcd=False)
    assert report.code == 0 and "only 1 of the 2 workers" in report.out, report


def test_a_node_whose_keeper_of_processes_is_killed_leaves_and_nothing_of_it_stays(cluster: Cluster) -> None:
    cluster.limits = (1, 2)
    a, b = cluster.start("a", "b")
    first = cluster.world(2)
    (worker,) = first.on("b")
    orphan = cluster.orphan_of(worker)
    cluster.kill_keeper(b)
    cluster.until_gone([worker, orphan])
    assert b.end() == 143
    second = cluster.world(1, after=first)
    assert second.restarts == 0
    cluster.finishes(a)
