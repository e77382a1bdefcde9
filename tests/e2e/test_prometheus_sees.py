"""A real Prometheus scrapes real runs. Each panel and each rule shows what really happened.

What happened is known from the agents' event logs, and from the workers themselves.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import pytest

from elasticd import __version__
from elasticd.core.facts import Policy
from elasticd.core.ledger import Kind
from tests.e2e.harness import PATIENCE_S, Cluster, World
from tests.e2e.programs.player import STEP_S
from tests.e2e.prometheus import (
    SHOWN_BY,
    Answer,
    Prometheus,
    names,
    needs_prometheus,
    queries,
    rules,
    texts,
)

Serve = Callable[[dict[str, Any]], Prometheus]

pytestmark = needs_prometheus


def counted(cluster: Cluster, event: str, by: str) -> Counter[str]:
    """Return how often each value of ``by`` occurred with this event, in the logs of all agents."""
    return Counter(str(e[by]) for agent in cluster.agents for e in agent.find(event))


def whole(increase: float) -> int:
    """Return the counter as an integer: Prometheus extrapolates a little beyond what it has scraped."""
    return round(increase)


SLOTS = {("a", "0"), ("a", "1"), ("b", "0")}

Shows = Callable[[str], list[Answer]]


@dataclass(frozen=True)
class Killed:
    """A job of three workers on two nodes, whose worker on b was killed. ``at``: when, by the monotonic
    clock."""

    cluster: Cluster
    second: World
    at: float

    @property
    def really_s(self) -> float:
        """Return the time until all workers had made their next step."""
        return max(player.first_at for player in self.second.players) - self.at

    def steps(self, node: str, slot: str) -> int:
        """Return the steps that the slot's workers say they have made so far."""
        played = self.cluster.stage.players
        return sum(p.step for p in played if (p.node, str(p.slot)) == (node, slot))


def test_a_kill_is_seen_by_panels_and_rules_as_it_was(cluster: Cluster, serve: Serve) -> None:
    prometheus = serve(rules())
    killed = _kill_one_of_three(cluster, prometheus)
    _steps_are_counted_exactly(prometheus, killed)
    job, workers, fleet = (partial(prometheus.shows, board=name) for name in ("job", "workers", "fleet"))
    _the_job_is_shown(job, killed, prometheus.began_at)
    _its_workers_are_shown(workers, killed)
    _all_jobs_are_shown(fleet, killed)
    _no_curve_is_of_one_worker(prometheus)
    _rows_are_told_apart(prometheus)
    assert not prometheus.alerts.told
    # Prometheus accepts all queries, and each recording rule has a value.
    empty = {(q.board, q.panel) for q in queries() if not all(prometheus.shows(q.panel, q.board))}
    assert empty == {place for places in SHOWN_BY.values() for place in places}
    for name in names("record"):
        assert prometheus.query(name), name
    (fault,) = prometheus.query("run_cause:elasticd_faults:increase15m > 0").by("cause")
    assert fault == ("worker_failed",)
    # Prometheus knows only the bucket of the time; the end of a bucket is at most two and a half times its
    # beginning.
    most_s = max(0.05, 2.5 * killed.really_s + 0.01)
    assert 0 < prometheus.query("run:elasticd_recover_seconds:p90_1h")() < most_s
    cluster.finishes(*cluster.agents)


def _kill_one_of_three(cluster: Cluster, prometheus: Prometheus) -> Killed:
    cluster.limits = (3, 3)
    a, b = cluster.start("a", slots=2) + cluster.start("b")
    for agent in (a, b):
        cluster.until_said(agent, "agent.started")
    prometheus.watch(a, b)
    first = cluster.world(3)
    prometheus.until("elasticd_worker_steps_total > 10", lambda found: len(found.series) == 3)
    (victim,) = first.on("b")
    at = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    second = cluster.world(3, after=first)
    prometheus.until("sum(elasticd_recover_seconds_count)", lambda found: found and found() == 1)
    cluster.goes_on(second, steps=75)
    return Killed(cluster, second, at)


def _steps_are_counted_exactly(prometheus: Prometheus, killed: Killed) -> None:
    """Count the steps of all workers of a slot together."""
    made = {place: killed.steps(*place) for place in SLOTS}
    for query in ("elasticd_worker_resident_memory_bytes", "elasticd_worker_cpu_seconds_total > 0"):
        prometheus.until(query, lambda found: len(found.series) == 3)
    for query in (
        "run_node:elasticd_etcd_request_seconds:p99_5m > 0",
        "rate(elasticd_agent_cpu_seconds_total[1m]) > 0",  # an agent samples its usage every five seconds
    ):
        prometheus.until(query, lambda found: len(found.series) == 2)

    def counted_all(found: Answer) -> Answer | None:
        return found if all(found.by("node", "slot")[place] >= made[place] for place in made) else None

    counters = prometheus.until("elasticd_worker_steps_total", counted_all)
    for node, slot in SLOTS:
        assert counters(node=node, slot=slot) <= killed.steps(node, slot)


def _the_job_is_shown(shows: Shows, killed: Killed, began_at: float) -> None:
    run = killed.cluster.job
    (workers,), (round,), (left,) = shows("Workers"), shows("Round"), shows("Restarts left")
    assert (workers(run=run), round(run=run)) == (3, killed.second.round) == (3, 2)
    charged = sum(len(agent.find("failure.charged")) for agent in killed.cluster.agents)
    assert left(run=run) == int(Policy().restarts_max) - charged == Policy().restarts_max - 1
    assert [size(run=run) for size in shows("World size")] == [3, 3, 3]
    assert [units(run=run) for units in shows("Units of workers")] == [3, 3, 3], "each worker is a unit"
    waiting, unit = shows("Workers that wait")
    assert (set(waiting.by("slot_state").values()), unit(run=run)) == ({0}, 1)
    (causes,) = shows("Rounds by cause")
    # Prometheus may have scraped first when the first round had formed; then there is no increase to see.
    began = {cause: whole(n) for (cause,), n in causes.by("cause").items() if cause != "start"}
    assert (
        began == counted(killed.cluster, "round.formed", "cause") - Counter(start=1) == {"worker_failed": 1}
    )
    recovered, detected = shows("From a fault to the next step")
    assert 0 < detected(run=run) <= recovered(run=run) < killed.really_s + 0.01
    (nodes,), (phase,) = shows("Nodes by state"), shows("Phase")
    assert nodes.by("node_state") == {("member",): 2, ("waiting",): 0, ("draining",): 0, ("lost",): 0}
    assert texts("Phase", "job")[phase(run=run)] == "live"
    (since,), (pace,) = shows("Since the last step"), shows("Steps a second")
    assert 0 <= since(run=run) < PATIENCE_S
    assert 0 < pace(run=run) * 60 <= 1.2 * min(killed.steps(*slot) for slot in SLOTS)
    (spent,), (goodput,), (goodput_1h,) = (
        shows(n) for n in ("Where the time goes", "Goodput", "Goodput, last hour")
    )
    seconds = {kind: share * 300 for (kind,), share in spent.by("kind").items()}
    lasted_s = time.time() - began_at
    assert 0 < seconds.pop("productive") < 3 * lasted_s and 0 < seconds.pop("restarting") < 3 * lasted_s
    assert not any(seconds[kind] for kind in ("checkpoint", "hung", "idle", "replayed"))
    assert 0 < goodput(run=run) < 1 and goodput_1h(run=run) == pytest.approx(goodput(run=run), abs=0.1)
    slowest, median, fastest = (answer() for answer in shows("etcd request time, 99th percentile"))
    assert 0 < fastest <= median <= slowest <= 5
    slowest, median, fastest = (answer() for answer in shows("Time of a step"))
    assert STEP_S <= fastest <= median <= slowest < 2
    (slots,), (outages,) = shows("Slots by state"), shows("Outages by cause")
    assert {state for (state,), number in slots.by("slot_state").items() if number} == {"running"}
    assert 0 < outages(cause="worker_failed") < 1.2 * killed.really_s + 0.01
    states, *others, _ = shows("Each worker")
    says = texts("State", "workers")
    assert {place: says[n] for place, n in states.by("node", "slot").items()} == dict.fromkeys(
        SLOTS, "running"
    )
    assert all(set(column.by("node", "slot")) <= SLOTS for column in others)
    (rounds,), (failures,) = shows("Rounds"), shows("Failures")
    assert ("worker_failed",) in rounds.by("cause")
    assert set(failures.by("node", "exit")) == {("b", "signal")}


def _rows_are_told_apart(prometheus: Prometheus) -> None:
    """Check that labels are equal in the columns of a table: Grafana joins columns by equal labels."""
    for board, panel, by in (("fleet", "Each job", {"run"}), ("job", "Each worker", {"node", "slot"})):
        for column in prometheus.shows(panel, board):
            assert all(labels.keys() == by for labels, _ in column.series), column


def _no_curve_is_of_one_worker(prometheus: Prometheus) -> None:
    """Check that no curve is of one worker or one node, since there may be hundreds. The marks of failures
    name the node."""
    for query in queries():
        if query.board != "workers" and not query.now and query.panel != "Failures":
            for labels, _ in prometheus.over_time(query.expr).series:
                assert not {"node", "slot"} & labels.keys(), query


def _its_workers_are_shown(shows: Shows, killed: Killed) -> None:
    for panel in ("Since the last step", "Steps a second", "Time of a step, mean"):
        assert set(shows(panel)[0].by("node", "slot")) == SLOTS, panel
    for panel in ("Memory", "CPUs in use", "Hung"):
        assert set(shows(panel)[0].by("node", "slot")) == SLOTS, panel
    (mean_s,), (restarts,), (exits,), (states,), (memory,), (hung,) = (
        shows(n)
        for n in (
            "Time of a step, mean",
            "Restarts by cause",
            "Exits",
            "State",
            "Memory",
            "Hung",
        )
    )
    assert all(STEP_S <= s < 2 for s in mean_s.by("node", "slot").values())
    assert {k: whole(n) for k, n in restarts.by("node", "slot", "cause").items()} == {
        (*slot, "worker_failed"): 1 for slot in SLOTS
    }
    assert {k: whole(n) for k, n in exits.by("node", "slot", "exit").items()} == {("b", "0", "signal"): 1}
    says = texts("State", "workers")
    assert {place: says[n] for place, n in states.by("node", "slot").items()} == dict.fromkeys(
        SLOTS, "running"
    )
    rss = psutil.Process(killed.second.on("b")[0].pid).memory_info().rss
    assert 0.1 < memory(node="b", slot=0) / rss < 10
    assert not any(hung.by("node", "slot").values())
    assert set(shows("Failures")[0].by("slot", "exit")) == {("0", "signal")}


def _all_jobs_are_shown(shows: Shows, killed: Killed) -> None:
    """There is one job."""
    run = killed.cluster.job
    assert [shows(n)[0]() for n in ("Jobs", "Workers", "Agents scraped", "Alerts")] == [1, 3, 2, 0]
    phase, workers, unit, good, since, left, alerts = (column(run=run) for column in shows("Each job"))
    assert texts("Phase", "fleet")[phase] == "live" and phase == shows("Phase")[0](run=run)
    assert (workers, unit, left, alerts) == (3, 1, Policy().restarts_max - 1, 0)
    assert 0 < good < 1 and since >= 0
    assert shows("Agents by version")[0](version=__version__) == 2
    assert shows("Failures")[0](run=run) > 0
    (faults,), (world,), (good,) = (
        shows(n) for n in ("Faults of the last 15 minutes", "World size", "Goodput")
    )
    assert whole(faults(run=run)) == 1 and world(run=run) == 3 and 0 < good(run=run) < 1
    assert {kind for (kind,) in shows("Where the time goes")[0].by("kind")} == set(Kind)
    assert shows("etcd answers")[0](run=run) == 1 and shows("Since the last step")[0](run=run) >= 0
    assert shows("CPUs that agents use")[0](run=run) > 0
    rss = sum(psutil.Process(agent.pid).memory_info().rss for agent in killed.cluster.agents)
    assert 0.1 < shows("Memory of agents")[0](run=run) / rss < 10
