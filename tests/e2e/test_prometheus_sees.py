"""A real Prometheus scrapes real runs: each panel and each rule says what really happened.

What happened is known from the agents' event logs, and from the workers themselves.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import pytest

from elasticd.core.facts import Policy
from elasticd.core.ledger import Kind
from tests.e2e.harness import PATIENCE_S, Cluster
from tests.e2e.programs.player import STEP_S
from tests.e2e.prometheus import SHOWN_BY, Answer, Prometheus, names, needs_prometheus, queries, rules

Serve = Callable[[dict[str, Any]], Prometheus]

pytestmark = needs_prometheus


def counted(cluster: Cluster, event: str, by: str) -> Counter[str]:
    """How often which ``by`` was told with this event, by all agents together."""
    return Counter(str(e[by]) for agent in cluster.agents for e in agent.find(event))


def whole(increase: float) -> int:
    """Of a counter: Prometheus estimates a little more than it saw, before and after."""
    return round(increase)


def steps(cluster: Cluster, node: str, slot: int) -> int:
    """All that were made in the slot so far, as its workers say."""
    return sum(p.step for p in cluster.stage.players if (p.node, p.slot) == (node, slot))


SLOTS = (("a", 0), ("a", 1), ("b", 0))


def test_a_kill_is_seen_by_panels_and_rules_as_it_was(cluster: Cluster, serve: Serve) -> None:
    prometheus = serve(rules())
    cluster.limits = (3, 3)
    a, b = cluster.start("a", slots=2) + cluster.start("b")
    for agent in (a, b):
        cluster.until_said(agent, "agent.started")
    prometheus.watch(a, b)
    first = cluster.world(3)
    prometheus.until("elasticd_worker_steps_total > 10", lambda found: len(found.series) == 3)
    (killed,) = first.on("b")
    killed_at = time.monotonic()
    os.kill(killed.pid, signal.SIGKILL)
    second = cluster.world(3, after=first)
    prometheus.until("sum(elasticd_recover_seconds_count)", lambda found: found and found() == 1)
    cluster.goes_on(second, steps=75)
    made = {(node, str(slot)): steps(cluster, node, slot) for node, slot in SLOTS}
    for query in ("elasticd_worker_resident_memory_bytes", "elasticd_worker_cpu_seconds_total > 0"):
        prometheus.until(query, lambda found: len(found.series) == 3)
    prometheus.until(
        "run_node:elasticd_etcd_request_seconds:p99_5m > 0", lambda found: len(found.series) == 2
    )

    # Steps are counted exactly, over all workers of a slot.
    def counted_all(found: Answer) -> Answer | None:
        return found if all(found.by("node", "slot")[slot] >= made[slot] for slot in made) else None

    counters = prometheus.until("elasticd_worker_steps_total", counted_all)
    for node, slot in SLOTS:
        assert counters(node=node, slot=slot) <= steps(cluster, node, slot)

    run = cluster.job
    job, worker, fleet = (partial(prometheus.shows, board=name) for name in ("job", "workers", "fleet"))
    # The job.
    (workers,), (round,), (left,) = job("Workers"), job("Round"), job("Restarts left")
    assert (workers(run=run), round(run=run)) == (3, second.round) == (3, 2)
    charged = len(a.find("failure.charged") + b.find("failure.charged"))
    assert left(run=run) == int(Policy().restarts_max) - charged == Policy().restarts_max - 1
    assert [size(run=run) for size in job("World size")] == [3, 3, 3]
    (causes,) = job("Rounds, by why they began")
    # The first round may have been formed before the first scrape, whence no increase is seen.
    began = {cause: whole(n) for (cause,), n in causes.by("cause").items() if cause != "start"}
    assert began == counted(cluster, "round.formed", "cause") - Counter(start=1) == {"worker_failed": 1}
    recovered, detected = job("From a fault to the next step")
    really_s = max(p.first_at for p in second.players) - killed_at
    assert 0 < detected(cause="worker_failed") <= recovered(cause="worker_failed") < really_s + 0.01
    (nodes,), (phase,) = job("Nodes, by state"), job("Phase")
    assert nodes.by("kind") == {("member",): 2, ("waiting",): 0, ("draining",): 0, ("lost",): 0}
    assert phase(kind="live") == 1
    (since,), (pace,) = job("Since the last step"), job("Steps a second")
    assert 0 <= since(run=run) < PATIENCE_S
    assert 0 < pace(run=run) * 60 <= 1.2 * min(steps(cluster, *slot) for slot in SLOTS)
    (spent,), (goodput,), (goodput_1h,) = (
        job(n) for n in ("Where the time goes", "Goodput", "Goodput, last hour")
    )
    seconds = {kind: share * 300 for (kind,), share in spent.by("kind").items()}
    lasted_s = time.time() - prometheus.began_at
    assert 0 < seconds.pop("productive") < 3 * lasted_s and 0 < seconds.pop("restarting") < 3 * lasted_s
    assert not any(seconds[kind] for kind in ("checkpoint", "hung", "idle", "replayed"))
    assert 0 < goodput(run=run) < 1 and goodput_1h(run=run) == pytest.approx(goodput(run=run), abs=0.1)
    (requests,) = job("etcd: 99 of 100 requests within")
    assert set(requests.by("node")) == {("a",), ("b",)} and 0 < requests(node="a") <= 5
    # Its workers.
    slots = set(made)
    for panel in ("Up", "Since the last step", "Steps a second", "Time of a step, mean"):
        assert set(worker(panel)[0].by("node", "slot")) == slots, panel
    for panel in ("Memory", "CPUs in use", "Hung"):
        assert set(worker(panel)[0].by("node", "slot")) == slots, panel
    assert {v for (up,) in [worker("Up")] for v in up.by("node", "slot").values()} == {1}
    (mean_s,), (restarts,), (exits,), (states,), (memory,), (hung,) = (
        worker(n)
        for n in (
            "Time of a step, mean",
            "Restarts within five minutes, by cause",
            "Exits within five minutes",
            "State",
            "Memory",
            "Hung",
        )
    )
    assert all(STEP_S <= s < 2 for s in mean_s.by("node", "slot").values())
    assert {k: whole(n) for k, n in restarts.by("node", "slot", "cause").items()} == {
        (*slot, "worker_failed"): 1 for slot in slots
    }
    assert {k: whole(n) for k, n in exits.by("node", "slot", "kind").items()} == {("b", "0", "signal"): 1}
    assert {slot[:2] for slot in states.by("node", "slot", "kind") if slot[2] == "running"} == slots
    rss = psutil.Process(second.on("b")[0].pid).memory_info().rss
    assert 0.1 < memory(node="b", slot=0) / rss < 10
    assert not any(hung.by("node", "slot").values())
    # All jobs, of which there is one.
    assert [fleet(n)[0]() for n in ("Jobs", "Workers", "Agents scraped", "Alerts")] == [1, 3, 2, 0]
    (faults,), (world,), (good,) = (
        fleet(n) for n in ("Faults of the last 15 minutes", "World size", "Goodput")
    )
    assert whole(faults(run=run)) == 1 and world(run=run) == 3 and 0 < good(run=run) < 1
    assert {kind for (kind,) in fleet("Where the time goes")[0].by("kind")} == set(Kind)
    assert fleet("etcd answers")[0](run=run) == 1 and fleet("Since the last step")[0](run=run) >= 0
    assert fleet("CPUs that agents use")[0](run=run) > 0
    rss = sum(psutil.Process(agent.pid).memory_info().rss for agent in (a, b))
    assert 0.1 < fleet("Memory of agents")[0](run=run) / rss < 10
    assert not prometheus.alerts.told
    # No query is one that Prometheus does not take, and no record is without a value.
    empty = {(q.board, q.panel) for q in queries() if not all(prometheus.shows(q.panel, q.board))}
    assert empty == {place for places in SHOWN_BY.values() for place in places}
    for name in names("record"):
        assert prometheus.query(name), name
    (fault,) = prometheus.query("run_cause:elasticd_faults:increase15m > 0").by("cause")
    assert fault == ("worker_failed",)
    # As it lies somewhere in its bucket, whose end is at most two and a half times its beginning.
    assert 0 < prometheus.query("run:elasticd_recover_seconds:p90_1h")() < max(0.05, 2.5 * really_s + 0.01)
    cluster.finishes(a, b)
