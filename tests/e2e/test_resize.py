"""Worlds grow and shrink: nodes join and leave, and the operator changes the limits."""

from __future__ import annotations

from elasticd.core.facts import Cause, Limits
from tests.e2e.harness import Cluster
from tests.e2e.stage import Script


def test_new_nodes_grow_the_world_up_to_max_and_no_further(cluster: Cluster) -> None:
    cluster.limits = (1, 3)
    (a,) = cluster.start("a")
    one = cluster.world(1)
    (b,) = cluster.start("b", slots=4)
    three = cluster.world(3, after=one)
    assert three.nodes == ("a", "b", "b")
    assert cluster.round.cause is Cause.GREW and three.restarts == 0
    cluster.goes_on(three, steps=50)
    assert cluster.round.number == three.round
    cluster.finishes(a, b)


def test_scale_changes_the_size_of_a_running_world_up_and_down(cluster: Cluster) -> None:
    cluster.limits = (1, 2)
    (a,) = cluster.start("a", slots=4)
    two = cluster.world(2)
    said = cluster.command("scale", cluster.job, "--max", "4")
    assert (said.code, said.out) == (0, f"{cluster.job} may have 1 to 4 workers.\n")
    four = cluster.world(4, after=two)
    assert cluster.command("scale", cluster.job, "--max", "1").code == 0
    one = cluster.world(1, after=four)
    assert cluster.round.cause is Cause.SCALED
    assert one.restarts == 0
    assert cluster.spec.limits == Limits(1, 1)
    assert cluster.spec.asked == Limits(1, 2), "another agent may still join as the first did"
    cluster.finishes(a)


def test_a_world_below_a_raised_min_waits_for_nodes(cluster: Cluster) -> None:
    cluster.limits = (1, 2)
    (a,) = cluster.start("a")
    one = cluster.world(1)
    assert cluster.command("scale", cluster.job, "--min", "2").code == 0
    cluster.until_gone(one.players)
    cluster.until_said(a, "job.waiting", have=1, need=2)
    (b,) = cluster.start("b")
    cluster.world(2, after=one)
    cluster.finishes(a, b)


def test_workers_that_are_stopped_to_grow_may_save(cluster: Cluster) -> None:
    cluster.limits = (1, 2)
    cluster.direct(lambda player: Script(on_sigterm="save"))
    (a,) = cluster.start("a")
    one = cluster.world(1)
    (b,) = cluster.start("b")
    two = cluster.world(2, after=one)
    (saved,) = one.players[0].did("saved")
    assert saved["at"] < min(p.first_at for p in two.players)
    cluster.finishes(a, b)
