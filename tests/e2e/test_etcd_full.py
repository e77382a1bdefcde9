"""etcd has used up its quota. elasticd says so, and training continues. Once there is room, everything else
continues, too."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from elasticd.etcd.blocking_client import Client
from tests.e2e.harness import ELASTICD, Agent, Cluster
from tests.etcd import cluster as etcds

QUOTA = "--quota-backend-bytes=4000000"


def test_a_full_etcd_is_told_and_a_worker_that_died_meanwhile_is_replaced_once_there_is_room(
    clusters: Callable[[str | None], Cluster], tmp_path: Path
) -> None:
    folder = tmp_path / "etcd"
    folder.mkdir()
    etcd = etcds.Cluster(folder, 1, flags=(QUOTA,))
    try:
        etcd.start()
        cluster = clusters(f"http://{etcd.endpoints[0]}")
        cluster.limits = (2, 2)
        # a full etcd grants no new lease to an agent whose renewal was late
        cluster.pace["--node-ttl"] = "30"
        a, b = cluster.start("a", "b")
        first = cluster.world(2)
        assert not json.loads(cluster.command("status", cluster.job, "--json").out)["etcd_full"]
        argv = [ELASTICD, "status", *cluster.etcd_options, cluster.job, "--watch", "--json"]
        watch = Agent("watch", argv, cluster.environment(), cluster.folder, cluster.news)
        cluster.agents.append(watch)
        cluster.until(lambda: watch.out, "the job is shown")
        etcds.fill(cluster.access)
        full_at = time.monotonic()
        said = cluster.until_anyone_said("etcd.full", level="error")
        assert "alarm disarm" in said["why"] and time.monotonic() < full_at + 10
        cluster.goes_on(first, steps=50)
        status = cluster.command("status", cluster.job)
        assert "is full" in status.out, status
        cluster.until(lambda: json.loads(watch.out[-1])["etcd_full"], "who watches sees that etcd is full")
        scaled = cluster.command("scale", cluster.job, "--max", "3")
        assert scaled.code == 4 and "is full" in scaled.sentence

        first.players[1].tell("exit", code=5)
        cluster.until_gone(first.players[1:])
        status = cluster.command("status", cluster.job)
        assert "is full" in status.out, "why the worker is not replaced yet"
        cluster.policy["etcd_grace_s"] = 1
        late, *_ = cluster.start("late")
        assert late.end() == 4 and "is full" in late.screen
        etcds.make_room(cluster.access)
        second = cluster.world(2, after=first)
        assert second.restarts == 1
        cluster.until_anyone_said("etcd.has_room")
        with Client(cluster.access) as client:
            assert not client.full()
        cluster.until(lambda: not json.loads(watch.out[-1])["etcd_full"], "and that it has room")
        cluster.finishes(a, b)
    finally:
        etcd.stop()
