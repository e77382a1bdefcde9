"""What a run says about a worker that waits until the kernel has taken down another process."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from tests.e2e.harness import Cluster
from tests.e2e.test_scrape import eventually, fetch, scrape, url_of
from tests.procs.undead import Undead


def test_a_start_that_is_held_back_is_shown_until_the_worker_starts_and_counts_only_then(
    cluster: Cluster,
) -> None:
    cluster.limits = (1, 1)
    (a,) = cluster.start("a")
    first = cluster.world(1)
    (player,) = first.players
    first.tell("keep_thread")
    cluster.until(lambda: player.did("keeps_thread"), "the worker has another thread")

    def slot() -> dict[str, Any]:
        (node,) = json.loads(cluster.command("status", cluster.job, "--json").out)["nodes"]
        (shown,) = node["slots"]
        return shown

    with Undead(player.pid):
        os.kill(player.pid, signal.SIGKILL)
        cluster.until_said(a, "worker.held_back", slots=[0], until_gone=player.pid)
        shown = eventually(lambda: slot() if slot()["until_gone"] else None)
        assert (shown["state"], shown["rank"], shown["until_gone"]) == ("starting", 0, player.pid)
        said = cluster.command("status", cluster.job).out
        awaits = f"waits for process {player.pid} to be taken down by the kernel"
        assert f"slot 0  rank 0  starting, {awaits}" in said
        (node,) = json.loads(fetch(f"{url_of(a)}status"))["nodes"]
        assert node["slots"] == [shown] and awaits in fetch(url_of(a))
        at = scrape(a)
        assert at("worker_up", slot=0) == at("worker_restarts_total", slot=0, cause="worker_failed") == 0
        late = cluster.until_said(a, "worker.lingers", slot=0, pid=player.pid, level="warning")
        assert "wait up to 50 s more" in late["advice"]
        assert len(a.find("workers.started")) == 1
    second = cluster.world(1, after=first)
    cluster.goes_on(second)
    assert len(a.find("workers.started")) == 2 and len(a.find("worker.lingers")) == 1
    eventually(lambda: slot()["until_gone"] is None and slot()["state"] == "running")
    at = eventually(lambda: now if (now := scrape(a))("worker_up", slot=0) else None)
    assert at("worker_restarts_total", slot=0, cause="worker_failed") == 1
    cluster.finishes(a)
