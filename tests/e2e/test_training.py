"""Real training with DDP over gloo, through failures."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elasticd.core.facts import Cause
from tests.e2e.harness import PLAYER, Cluster
from tests.e2e.stage import Player, Script

DDP = [str(Path(PLAYER).with_name("ddp.py"))]


def until_the_last_round(player: Player) -> Script:
    """Let the first world train for ever, and a later world for a while; collectives keep ranks in step."""
    return Script(steps=None if player.round == 1 else 10)


@pytest.mark.slow
def test_training_goes_on_after_a_worker_is_killed_and_only_its_death_is_charged(cluster: Cluster) -> None:
    cluster.limits = (2, 2)
    cluster.direct(until_the_last_round)
    a, b = cluster.start("a", "b", program=DDP)
    first = cluster.world(2)
    os.kill(first.players[1].pid, signal.SIGKILL)
    assert [a.end(), b.end()] == [0, 0], cluster.state()
    last = [p for p in cluster.stage.players if p.round == 2]
    assert [(p.step, p.restarts) for p in last] == [(10, 1), (10, 1)], "its neighbour's failure is an echo"
    failure = cluster.round.failure
    assert failure is not None and failure.exit.code == -signal.SIGKILL
    assert failure.exit.rank == 1
    seen = [e for agent in (a, b) for e in agent.find("failure.charged")]
    assert [e["rank"] for e in seen] == [1]


@pytest.mark.parametrize("lost", ["a", pytest.param("b", marks=pytest.mark.slow)])
def test_training_goes_on_after_a_node_is_lost_and_nothing_is_charged(cluster: Cluster, lost: str) -> None:
    """Node a leads, has rank 0 and hosts the round's store. Node b does none of these."""
    cluster.limits = (1, 2)
    cluster.direct(until_the_last_round)
    cluster.policy["settle_s"] = 60  # the first world has workers of both nodes
    (a,) = cluster.start("a", program=DDP)
    cluster.until_said(a, "leader.elected")
    (b,) = cluster.start("b", program=DDP)
    first = cluster.world(2)
    assert first.nodes == ("a", "b")
    agents = {"a": a, "b": b}
    agents.pop(lost).kill()
    (survivor,) = agents.values()
    assert survivor.end() == 0, cluster.state()
    (last,) = [p for p in cluster.stage.players if p.round == 2]
    assert (last.node, last.step, last.restarts) == (survivor.name, 10, 0)
    assert cluster.round.cause is Cause.NODE_LOST
    assert not survivor.find("failure.charged")
