"""Nodes that are asked to leave, and jobs that are asked to stop."""

from __future__ import annotations

import signal

import pytest

from elasticd.core.facts import Cause, Outcome, Phase
from tests.e2e.harness import Cluster
from tests.e2e.stage import Script


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signalled_agent_drains_its_workers_save_and_the_others_go_on(
    cluster: Cluster, number: signal.Signals, code: int
) -> None:
    cluster.limits = (1, 2)
    cluster.direct(lambda player: Script(on_sigterm="save"))
    a, b = cluster.start("a", "b")
    first = cluster.world(2)
    b.signal(number)
    assert b.end() == code
    (worker,) = first.on("b")
    cluster.until(lambda: worker.gone, "the worker's last word is heard")
    assert [m["is"] for m in worker.heard] == ["asked", "saved"]
    second = cluster.world(1, after=first)
    assert second.nodes == ("a",) and second.restarts == 0
    assert cluster.round.cause is Cause.NODE_DRAINED
    assert worker.heard[0]["signal"] == signal.SIGTERM, "which scripts save on, also for Ctrl-C"
    assert first.on("a")[0].did("saved"), "all of a planned end may save"
    cluster.finishes(a)


def test_a_second_signal_kills_at_once(cluster: Cluster) -> None:
    cluster.limits = (1, 1)
    cluster.direct(lambda player: Script(on_sigterm="ignore"))
    (a,) = cluster.start("a", options=["--shutdown-timeout=3600"])
    world = cluster.world(1)
    a.signal(signal.SIGINT)
    cluster.until(lambda: world.players[0].heard, "the worker was asked")
    cluster.goes_on(world)
    a.signal(signal.SIGINT)
    assert a.end() == 130
    cluster.until_gone(world.players)


def test_a_worker_that_does_not_heed_is_killed_when_its_time_is_up(cluster: Cluster) -> None:
    cluster.limits = (1, 2)
    cluster.direct(lambda player: Script(on_sigterm="ignore" if player.node == "b" else "save"))
    options = ["--shutdown-timeout=1"]
    a, b = cluster.start("a", "b", options=options)
    first = cluster.world(2)
    b.signal(signal.SIGTERM)
    assert b.end() == 143
    assert first.on("b")[0].did("asked") and not first.on("b")[0].did("saved")
    second = cluster.world(1, after=first)
    assert second.restarts == 0
    cluster.finishes(a)


def test_drain_asks_one_node_to_leave_from_anywhere(cluster: Cluster) -> None:
    cluster.limits = (1, 2)
    cluster.direct(lambda player: Script(on_sigterm="save"))
    a, b = cluster.start("a", "b")
    first = cluster.world(2)
    said = cluster.command("drain", "a")
    assert (said.code, said.out) == (0, f"a is asked to leave {cluster.job}.\n")
    assert a.end() == 143
    second = cluster.world(1, after=first)
    assert second.nodes == ("b",) and second.restarts == 0
    assert first.on("a")[0].did("saved")
    # The drain was for that agent. A new agent of the same name may join.
    (a,) = cluster.start("a")
    third = cluster.world(2, after=second)
    assert cluster.spec.drain == ()
    assert third.nodes == ("b", "a")
    cluster.finishes(a, b)


def test_stop_ends_the_job_on_all_nodes_with_143_after_saving(cluster: Cluster) -> None:
    cluster.limits = (2, 2)
    cluster.direct(lambda player: Script(on_sigterm="save"))
    agents = cluster.start("a", "b")
    world = cluster.world(2)
    assert cluster.command("stop", cluster.job).code == 0
    assert [agent.end() for agent in agents] == [143, 143]
    assert all(player.did("saved") for player in world.players)
    assert cluster.round.outcome is Outcome.STOPPED
    assert all("was stopped" in agent.screen for agent in agents)
    # A job that was stopped can be started again, and continues to count.
    cluster.direct(lambda player: Script())
    a, b = cluster.start("a", "b")
    cluster.world(2, after=world)
    cluster.finishes(a, b)
    assert cluster.round.phase is Phase.ENDED


def test_stop_now_ends_a_job_whose_workers_take_too_long_to_save(cluster: Cluster) -> None:
    cluster.limits = (2, 2)
    cluster.direct(lambda player: Script(on_sigterm="ignore"))
    agents = cluster.start("a", "b", options=["--shutdown-timeout=3600"])
    world = cluster.world(2)
    assert cluster.command("stop", cluster.job).code == 0
    cluster.until(lambda: all(player.heard for player in world.players), "the workers were asked")
    said = cluster.command("stop", "--now", cluster.job)
    assert (said.code, said.out) == (0, f"{cluster.job} is asked to stop at once.\n")
    assert [agent.end() for agent in agents] == [143, 143]
    assert cluster.round.outcome is Outcome.STOPPED
    cluster.direct(lambda player: Script())
    a, b = cluster.start("a", "b")
    cluster.world(2, after=world)
    cluster.finishes(a, b)


def test_the_last_node_may_leave_and_come_back(cluster: Cluster) -> None:
    cluster.limits = (1, 1)
    (a,) = cluster.start("a")
    first = cluster.world(1)
    a.signal(signal.SIGTERM)
    assert a.end() == 143
    (a,) = cluster.start("a")
    second = cluster.world(1, after=first)
    assert second.restarts == 0
    cluster.finishes(a)


def test_a_node_that_still_waits_for_others_leaves_at_once(cluster: Cluster) -> None:
    cluster.limits = (2, 2)
    (a,) = cluster.start("a")
    cluster.until_said(a, "job.waiting")
    a.signal(signal.SIGTERM)
    assert a.end() == 143
