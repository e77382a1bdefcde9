"""What happens when workers fail, and what it costs."""

from __future__ import annotations

import os
import signal

from tests.e2e.harness import Cluster
from tests.e2e.stage import Player, Script


def test_a_killed_worker_is_replaced_and_the_job_finishes_with_0(cluster: Cluster) -> None:
    cluster.limits = (2, 2)
    a, b = cluster.start("a", "b")
    first = cluster.world(2)
    os.kill(first.players[1].pid, signal.SIGKILL)
    second = cluster.world(2, after=first)
    assert second.nodes == first.nodes, "survivors keep their order"
    assert (first.restarts, second.restarts) == (0, 1)
    cluster.goes_on(second)
    cluster.finishes(a, b)
    assert "finished" in a.screen and "1 restart" in a.screen
