"""etcd restarts, hangs or loses a member, and training goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticd.core.facts import Phase
from tests.e2e.conftest import Etcd
from tests.e2e.harness import Cluster
from tests.e2e.line import Line
from tests.e2e.stage import Script
from tests.e2e.test_in_place import Residents
from tests.etcd import cluster as etcds

MakeCluster = Callable[[str | None], Cluster]


def test_no_worker_restarts_when_etcd_is_killed_and_started_again_during_training(
    clusters: MakeCluster, etcd: Etcd
) -> None:
    cluster = clusters(etcd.url)
    cluster.limits = (2, 2)
    a, b = cluster.start("a", "b")
    world = cluster.world(2)
    etcd.kill()
    for agent in (a, b):
        cluster.until_said(agent, "etcd.away")
    cluster.goes_on(world)
    etcd.start()
    for agent in (a, b):
        cluster.until_said(agent, "etcd.back")
    cluster.goes_on(world)
    # The job is under control again, and still in the same round.
    assert cluster.command("stop", cluster.job).code == 0
    assert [a.end(), b.end()] == [143, 143]
    assert {p.round for p in cluster.stage.players} == {world.round}


@pytest.mark.parametrize("how", ["hangs", pytest.param("is dead", marks=pytest.mark.slow)])
def test_no_worker_restarts_when_etcd_is_away_for_longer_than_every_lease(
    clusters: MakeCluster, etcd: Etcd, how: str
) -> None:
    cluster = clusters(etcd.url)
    cluster.limits = (2, 2)
    a, b = cluster.start("a", "b")
    world = cluster.world(2)
    etcd.hang() if how == "hangs" else etcd.kill()
    for agent in (a, b):
        cluster.until_said(agent, "etcd.away", cut_off=False)
    # By the workers' own clocks they still make steps long after the leases would have run out.
    last = max(p.last_at for p in world.players)
    ttl_s = float(cluster.pace["--node-ttl"])
    cluster.until(
        lambda: all(p.last_at > last + 3 * ttl_s for p in world.players), "the workers outlive three leases"
    )
    etcd.wake() if how == "hangs" else etcd.start()
    for agent in (a, b):
        cluster.until_said(agent, "etcd.back")
    cluster.goes_on(world, steps=100)
    cluster.finishes(a, b)
    assert {p.round for p in cluster.stage.players} == {world.round}


def test_a_node_that_alone_is_cut_off_stops_its_workers_before_the_others_go_on_without_it(
    clusters: MakeCluster, etcd: Etcd, line: Line
) -> None:
    cluster = clusters(etcd.url)
    cluster.limits = (1, 2)
    (a,) = cluster.start("a")
    (b,) = cluster.start("b", options=[f"--etcd=http://127.0.0.1:{line.port}"])
    first = cluster.world(2)
    line.cut()
    second = cluster.world(1, after=first)
    assert second.nodes == ("a",)
    # Cluster.close checks that no step of the old world came after this.
    cluster.until_gone(first.on("b"))
    assert b.find("etcd.away", cut_off=True)
    cluster.goes_on(second)
    line.mend()
    cluster.until_said(b, "etcd.back")
    third = cluster.world(2, after=second)
    assert third.restarts == 0
    cluster.finishes(a, b)


def test_an_agent_that_stops_while_etcd_is_away_does_not_train_beside_the_next_world(
    clusters: MakeCluster, etcd: Etcd
) -> None:
    cluster = clusters(etcd.url)
    cluster.limits = (1, 2)
    a, b = cluster.start("a", "b")
    first = cluster.world(2)
    etcd.hang()
    for agent in (a, b):
        cluster.until_said(agent, "etcd.away")
    b.signal(signal.SIGSTOP)
    cluster.until_gone(first.on("b"))
    etcd.wake()
    second = cluster.world(1, after=first)
    assert second.nodes == ("a",)
    b.signal(signal.SIGCONT)
    third = cluster.world(2, after=second)
    assert third.restarts == 0
    cluster.finishes(a, b)


def test_an_agent_drains_although_etcd_is_away(clusters: MakeCluster, etcd: Etcd) -> None:
    cluster = clusters(etcd.url)
    cluster.direct(lambda player: Script(on_sigterm="save"))
    (a,) = cluster.start("a")
    world = cluster.world(1)
    etcd.kill()
    cluster.until_said(a, "etcd.away")
    a.signal(signal.SIGTERM)
    assert a.end() == 143
    assert cluster.until(lambda: world.players[0].did("saved"), "its worker saved")


def test_a_worker_that_dies_while_etcd_is_away_is_replaced_when_it_is_back(
    clusters: MakeCluster, etcd: Etcd
) -> None:
    cluster = clusters(etcd.url)
    cluster.limits = (2, 2)
    a, b = cluster.start("a", "b")
    first = cluster.world(2)
    etcd.kill()
    cluster.until_said(a, "etcd.away")
    first.players[1].tell("exit", code=5)
    cluster.until_gone(first.players[1:])
    etcd.start()
    second = cluster.world(2, after=first)
    assert second.restarts == 1
    cluster.finishes(a, b)


@pytest.mark.slow
def test_survivors_in_place_wait_for_etcd_with_the_state_in_memory(clusters: MakeCluster, etcd: Etcd) -> None:
    cluster = clusters(etcd.url)
    residents = Residents(cluster)
    cluster.limits = (2, 3)
    a, b, c = residents.start("a", "b", "c", slots=1, NEWS_S="0.2")
    first, before = residents.world(3)
    etcd.kill()
    for agent in (a, b, c):
        cluster.until_said(agent, "etcd.away")
    os.kill(before[2].pid, signal.SIGKILL)
    for agent in (a, b, c):
        if agent.name != before[2].node:
            cluster.until_said(agent, "worker.broken")
    etcd.start()
    _, after = residents.world(3, after=first)
    assert {p.pid for p in after} > {p.pid for p in before[:2]}
    residents.finish(a, b, c)
    assert cluster.round.restarts == 1


def test_a_round_forms_although_etcd_dies_in_the_middle_of_it(clusters: MakeCluster, etcd: Etcd) -> None:
    cluster = clusters(etcd.url)
    cluster.limits = (2, 2)
    cluster.direct(lambda player: Script(on_sigterm="ignore"))
    a, b = cluster.start("a", "b")
    first = cluster.world(2)
    # One worker ignores SIGTERM, so the closing round is not released yet when etcd dies.
    first.players[0].tell("exit", code=5)
    cluster.until(lambda: first.players[1].did("asked"), "the other worker is asked to end")
    etcd.kill()
    cluster.until_gone(first.players)
    cluster.until_said(a, "etcd.away")
    etcd.start()
    second = cluster.world(2, after=first)
    assert second.restarts == 1
    cluster.finishes(a, b)


def test_a_job_starts_although_etcd_is_killed_while_its_nodes_arrive(
    clusters: MakeCluster, etcd: Etcd
) -> None:
    cluster = clusters(etcd.url)
    cluster.limits = (2, 2)
    (a,) = cluster.start("a")
    cluster.until_said(a, "job.waiting")
    (b,) = cluster.start("b")
    etcd.kill()
    etcd.start()
    world = cluster.world(2)
    assert world.restarts == 0
    cluster.finishes(a, b)


def test_an_agent_gives_up_with_4_when_etcd_stays_away_beyond_its_grace(
    clusters: MakeCluster, etcd: Etcd
) -> None:
    cluster = clusters(etcd.url)
    cluster.policy["etcd_grace_s"] = 2
    (a,) = cluster.start("a")
    world = cluster.world(1)
    etcd.kill()
    assert a.end() == 4
    assert "has not answered for 2 s" in a.screen
    cluster.until_gone(world.players)


@pytest.mark.slow
def test_one_of_three_etcds_may_be_killed_and_another_leader_elected(
    clusters: MakeCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "etcd"
    folder.mkdir()
    three = etcds.Cluster(folder, 3, flags=("--heartbeat-interval=50", "--election-timeout=500"))
    try:
        three.start()
        cluster = clusters(",".join(f"http://{endpoint}" for endpoint in three.endpoints))
        cluster.limits = (2, 2)
        a, b = cluster.start("a", "b")
        first = cluster.world(2)
        leader = three.leader()
        leader.kill()
        cluster.goes_on(first, steps=100)
        # The two members that are left are enough for all other requests, too.
        first.players[0].tell("exit", code=5)
        second = cluster.world(2, after=first)
        leader.start()
        three.members[0 if leader is three.members[1] else 1].signal(signal.SIGSTOP)
        cluster.goes_on(second, steps=100)
        second.players[1].tell("exit", code=5)
        third = cluster.world(2, after=second)
        assert (third.round, third.restarts) == (3, 2)
        cluster.finishes(a, b)
        assert cluster.round.phase is Phase.ENDED
    finally:
        for member in three.members:
            member.kill()


@pytest.mark.slow
def test_no_worker_restarts_when_all_three_etcds_freeze_for_longer_than_every_lease(
    clusters: MakeCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "etcd"
    folder.mkdir()
    three = etcds.Cluster(folder, 3)
    try:
        three.start()
        cluster = clusters(",".join(f"http://{endpoint}" for endpoint in three.endpoints))
        cluster.limits = (2, 2)
        cluster.pace["--node-ttl"] = "6"
        a, b = cluster.start("a", "b")
        world = cluster.world(2)
        for member in three.members:
            member.signal(signal.SIGSTOP)
        for agent in (a, b):
            cluster.until_said(agent, "etcd.away")
        last = max(p.last_at for p in world.players)
        ttl_s = float(cluster.pace["--node-ttl"])
        cluster.until(
            lambda: all(p.last_at > last + 3 * ttl_s for p in world.players),
            "the workers outlive three leases",
        )
        for member in three.members:
            member.signal(signal.SIGCONT)
        for agent in (a, b):
            cluster.until_said(agent, "etcd.back")
        cluster.goes_on(world, steps=100)
        cluster.finishes(a, b)
        assert {p.round for p in cluster.stage.players} == {world.round}
    finally:
        three.stop()
