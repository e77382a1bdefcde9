"""Each alert fires when its cause really happens to a run, and resolves when the cause is over. Meanwhile the
panels show what happened. A real Prometheus evaluates the rules, with all their times shortened."""

from __future__ import annotations

import inspect
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticd.core.facts import Checkpoint
from tests.e2e.conftest import Etcd
from tests.e2e.harness import Agent, Cluster
from tests.e2e.prometheus import (
    SHOWN_BY,
    Prometheus,
    hastened,
    names,
    needs_prometheus,
    queries,
    rules,
    texts,
)
from tests.etcd import cluster as etcds

Serve = Callable[[dict[str, Any]], Prometheus]

PROGRAMS = Path(__file__).parent / "programs"
HASTE = 60  # a minute in the rules takes a second


def scenario(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that takes minutes and needs a Prometheus."""
    return pytest.mark.slow(needs_prometheus(test))


def begin(prometheus: Prometheus, cluster: Cluster, *agents: Agent) -> None:
    """Scrape these agents from now on."""
    for agent in agents:
        cluster.until_said(agent, "agent.started")
    prometheus.watch(*agents)
    query = "count(elasticd_build_info)"
    prometheus.until(query, lambda found: found and found() >= len(agents))


def test_all_times_of_the_rules_are_shortened_and_nothing_else() -> None:
    before = [rule for group in rules()["groups"] for rule in group["rules"]]
    after = [rule for group in hastened(60)["groups"] for rule in group["rules"]]
    changed = {
        (a.get("alert"), a["expr"]) for b, a in zip(before, after, strict=True) if a["expr"] != b["expr"]
    }
    assert ("ElasticdStalled", "time() - run:elasticd_last_step_timestamp_seconds:max > 10") in changed
    by_name = {rule.get("alert") or rule["record"]: rule for rule in after}
    assert by_name["run:elasticd_steps:rate1m"]["expr"].count("[1000ms]") == 1
    assert (
        by_name["ElasticdGpuXid"]["expr"].count("15000ms") == 2 and "> 0" in by_name["ElasticdGpuXid"]["expr"]
    )
    assert by_name["ElasticdRestartStorm"]["expr"].endswith("> 3")
    assert by_name["ElasticdEtcdUnreachable"]["for"] == "500ms"
    assert by_name["ElasticdGoodputLow"]["expr"] == "run:elasticd_goodput:ratio1h < 0.8"


@scenario
def test_workers_that_are_killed(cluster: Cluster, serve: Serve) -> None:
    prometheus = serve(hastened(HASTE))
    alerts, run = prometheus.alerts, cluster.job
    cluster.limits = (2, 3)
    cluster.policy |= {"broken_s": 6, "quarantine_after": 5, "quarantine_s": 5, "restart_window_s": 25}
    (a,) = cluster.start("a", slots=3, options=["--max-restarts=7"])
    begin(prometheus, cluster, a)
    world = cluster.world(3)
    for kill in range(1, 6):
        (victim,) = (p for p in world.players if p.slot == 2)
        os.kill(victim.pid, signal.SIGKILL)
        cluster.until_said(a, "failure.charged", times=kill)
        if kill < 5:
            world = cluster.world(3, after=world)
    storm = alerts.fires("ElasticdRestartStorm", run=run)
    assert storm.summary.startswith(f"{run}: ")
    low = alerts.fires("ElasticdBudgetLow", run=run)
    assert low.summary in (f"{run}: {n / 7:.4g}% of the restart budget is left" for n in (200, 100, 0))
    out = alerts.fires("ElasticdSlotQuarantined", run=run)
    assert out.summary == f"{run}: 1 slots are in quarantine because they failed alone"
    alerts.resolves("ElasticdSlotQuarantined")
    # A worker that does not end when it is asked to, so that the next round forms late.
    world = cluster.world(3, after=world)
    world.tell("begin", steps=None, on_sigterm="ignore")
    cluster.goes_on(world)
    os.kill(world.players[0].pid, signal.SIGKILL)
    cluster.world(3, after=world)
    alerts.fires("ElasticdRendezvousSlow", run=run)
    slow = alerts.fires("ElasticdRecoverySlow", run=run)
    assert slow.summary.startswith(f"{run}: recovery took ")

    exits = Counter(f"{e['slot']} {e['code']}" for e in a.find("worker.ended"))
    (shown,) = prometheus.shows("Exits", "workers")
    by_slot = {slot: round(n) for (slot,), n in shown.by("slot").items()}
    assert by_slot == {slot: exits[f"{slot} -9"] for slot in by_slot} and sum(by_slot.values()) == 6
    (rounds,) = prometheus.shows("Rounds by cause", "job")
    formed = Counter(e["cause"] for e in a.find("round.formed"))
    assert {c: round(n) for (c,), n in rounds.by("cause").items() if c != "start"} == formed - Counter(
        start=1
    )
    recovered, _ = prometheus.shows("From a fault to the next step", "job")
    assert recovered(run=run) > 0.8, "the last of six took more than five seconds"
    (left,) = prometheus.shows("Restarts left", "job")
    assert left(run=run) <= 2
    (states,) = prometheus.shows("State", "workers")
    assert "quarantined" in map(texts("State", "workers").get, states.over(slot=2))
    (faults,) = prometheus.shows("Faults of the last 15 minutes", "fleet")
    assert max(faults.over(run=run)) > 4
    (firing,) = prometheus.shows("Firing alerts", "fleet")
    assert {"ElasticdRestartStorm", "ElasticdBudgetLow"} <= {
        labels["alertname"] for labels, _ in firing.series
    }
    for name in ("RestartStorm", "BudgetLow", "RendezvousSlow", "RecoverySlow"):
        alerts.resolves(f"Elasticd{name}")
    cluster.finishes(a)


@scenario
def test_workers_that_are_stopped_slow_or_idle(cluster: Cluster, serve: Serve) -> None:
    prometheus = serve(hastened(HASTE))
    alerts, run = prometheus.alerts, cluster.job
    cluster.limits = (3, 3)
    (a,) = cluster.start("a", slots=3)
    begin(prometheus, cluster, a)
    first = cluster.world(3)
    cluster.goes_on(first, steps=100)
    (stopped,) = (p for p in first.players if p.slot == 1)
    os.kill(stopped.pid, signal.SIGSTOP)
    hung = alerts.fires("ElasticdWorkerHung", run=run)
    assert hung.summary == f"{run}: a worker in slot 1 of a hung"
    assert [e["ranks"] for e in a.find("workers.hung")] == [[stopped.rank]]
    second = cluster.world(3, after=first)
    # A worker that is slow.
    (slow,) = (p for p in second.players if p.slot == 2)
    slow.tell("pace", step_s=0.2)
    (mean,) = (q.expr for q in queries() if q.panel == "Time of a step, mean")
    prometheus.until(mean, lambda found: found(slot=2) > 2 * found(slot=0))
    query = "rate(elasticd_worker_steps_total[5s])"
    prometheus.until(query, lambda found: 3 * found(slot=2) < found(slot=0))
    (means,), (paces,) = (prometheus.shows(n, "workers") for n in ("Time of a step, mean", "Steps a second"))
    assert means(slot=2) > 2 * means(slot=0) and paces(slot=2) < paces(slot=0)
    (hangs,) = prometheus.shows("Hung", "workers")
    assert {slot: round(n) for (slot,), n in hangs.by("slot").items()} == {"0": 0, "1": 1, "2": 0}
    (spent,) = prometheus.shows("Where the time goes", "job")
    assert max(spent.over(kind="hung")) > 0
    alerts.resolves("ElasticdWorkerHung")
    # No worker makes steps for a while.
    second.tell("pace", step_s=1000.0)
    alerts.fires("ElasticdStalled", run=run)
    (since,) = prometheus.shows("Since the last step", "job")
    assert since(run=run) > 10
    second.tell("pace", step_s=0.02)
    cluster.goes_on(second)
    alerts.resolves("ElasticdStalled")
    cluster.finishes(a)


@scenario
def test_a_worker_that_lags_behind(cluster: Cluster, serve: Serve, tmp_path: Path) -> None:
    prometheus = serve(hastened(HASTE))
    alerts, run = prometheus.alerts, cluster.job
    cluster.limits = (3, 3)
    (tmp_path / "slow").touch()
    uneven = (str(PROGRAMS / "uneven.py"), "ddp", "1", "1.5", str(tmp_path))
    cluster.policy["straggler_window_s"] = 8
    (a,) = cluster.start("a", slots=3, program=uneven)
    begin(prometheus, cluster, a)
    lags = alerts.fires("ElasticdStraggler", run=run)
    assert lags.summary == f"{run}: the worker in slot 1 of a is slower than its peers"
    (ratios,) = prometheus.shows("Time of a step relative to peers", "workers")
    assert ratios(slot=1) > 1.2 > ratios(slot=0)
    _, _, _, relative, *_ = prometheus.shows("Each worker", "job")
    assert relative(slot=1) > 1.2 > relative(slot=0)
    lagging, bad = prometheus.shows("Stragglers and bad GPUs", "workers")
    assert lagging.by("node", "slot") == {("a", "1"): 1} and not bad
    assert "lags      rank 1 (slot 1 on a) takes " in cluster.command("status", run).out
    (tmp_path / "slow").unlink()
    alerts.resolves("ElasticdStraggler")
    assert [e["slot"] for e in a.find("worker.keeps_up")] == [1]
    (tmp_path / "end").touch()
    assert a.end() == 0, a.said()


@scenario
def test_nodes_that_are_lost(cluster: Cluster, serve: Serve) -> None:
    prometheus = serve(hastened(HASTE))
    alerts, run = prometheus.alerts, cluster.job
    cluster.limits = (3, 4)
    (a,) = cluster.start("a", slots=2)
    cluster.until_said(a, "leader.elected")
    b, c = cluster.start("b", "c")
    begin(prometheus, cluster, b, c)  # do not scrape a: the leader knows all nodes
    full = cluster.world(4)
    absent = alerts.fires("ElasticdTargetAbsent", run=run)
    assert absent.summary == f"{run}: Prometheus does not scrape 1 of the job's nodes"
    begin(prometheus, cluster, a)
    alerts.resolves("ElasticdTargetAbsent")
    c.kill()
    smaller = cluster.world(3, after=full)
    down = alerts.fires("ElasticdTargetDown")
    assert f"/{down.labels['instance']}/" in c.find("agent.started")[0]["http"]
    at_min = alerts.fires("ElasticdWorldAtMin", run=run)
    assert at_min.summary.startswith(f"{run}: runs with 3 workers")
    alerts.fires("ElasticdWorldBelowMax", run=run)
    cluster.goes_on(smaller)
    (workers,) = prometheus.shows("Workers", "job")
    assert workers(run=run) == 3
    b.kill()
    waits = alerts.fires("ElasticdWaitingForWorkers", run=run)
    assert waits.labels["severity"] == "critical"
    (phase,), (nodes,) = prometheus.shows("Phase", "job"), prometheus.shows("Nodes by state", "job")
    assert "waiting" in map(texts("Phase", "job").get, phase.over(run=run))
    assert nodes(node_state="waiting") + nodes(node_state="member") == 1
    alerts.fires("ElasticdGoodputLow", run=run)
    (goodput,), (spent,) = (
        prometheus.shows("Goodput, last hour", "job"),
        prometheus.shows("Where the time goes", "fleet"),
    )
    assert goodput(run=run) < 0.8 and spent(kind="waiting") > 0
    prometheus.forget(b, c)
    others = cluster.start("b", "c")
    begin(prometheus, cluster, *others)
    whole = cluster.world(4, after=smaller)
    for name in ("TargetDown", "WorldAtMin", "WorldBelowMax", "WaitingForWorkers", "GoodputLow"):
        alerts.resolves(f"Elasticd{name}")
    (size, least, most) = prometheus.shows("World size", "job")
    assert {0, 3, 4} <= set(size.over(run=run)) and (least(run=run), most(run=run)) == (3, 4)
    cluster.goes_on(whole)
    cluster.finishes(a, *others)


@scenario
def test_an_etcd_that_is_away_or_slow(
    clusters: Callable[[str | None], Cluster], etcd: Etcd, serve: Serve
) -> None:
    prometheus = serve(hastened(HASTE))
    cluster = clusters(etcd.url)
    alerts, run = prometheus.alerts, cluster.job
    cluster.limits = (1, 2)
    a, b = cluster.start("a", "b")
    begin(prometheus, cluster, a, b)
    world = cluster.world(2)
    etcd.hang()
    for node in ("a", "b"):
        away = alerts.fires("ElasticdEtcdUnreachable", node=node)
        assert away.summary == f"{run}: etcd does not answer {node}"
    (answers,) = prometheus.shows("etcd answers", "fleet")
    assert answers(run=run) == 0
    cluster.goes_on(world)
    etcd.wake()
    alerts.resolves("ElasticdEtcdUnreachable", node="a")
    alerts.resolves("ElasticdEtcdUnreachable", node="b")
    # etcd answers, but always late.
    while not alerts.of("ElasticdEtcdSlow"):
        etcd.hang()
        time.sleep(0.8)
        etcd.wake()
        time.sleep(0.2)
    slow = alerts.fires("ElasticdEtcdSlow", run=run)
    assert slow.summary.startswith(f"{run}: requests of {slow.labels['node']} to etcd take ")
    slowest, *_ = prometheus.shows("etcd request time, 99th percentile", "job")
    assert max(slowest.over()) > 0.5
    alerts.resolves("ElasticdEtcdSlow")
    # A node that is silent for longer than its lease.
    newest = cluster.world(2)
    b.signal(signal.SIGSTOP)
    cluster.world(1, after=newest)
    b.signal(signal.SIGCONT)
    lost = alerts.fires("ElasticdLeaseLost", node="b")
    assert lost.summary == f"{run}: the lease of b ran out"
    cluster.world(2, after=newest)
    alerts.resolves("ElasticdLeaseLost")
    cluster.finishes(a, b)


@scenario
def test_an_etcd_that_is_full(
    clusters: Callable[[str | None], Cluster], tmp_path: Path, serve: Serve
) -> None:
    folder = tmp_path / "etcd"
    folder.mkdir()
    etcd = etcds.Cluster(folder, 1, flags=("--quota-backend-bytes=4000000",))
    try:
        etcd.start()
        prometheus = serve(hastened(HASTE))
        cluster = clusters(f"http://{etcd.endpoints[0]}")
        alerts, run = prometheus.alerts, cluster.job
        cluster.limits = (1, 1)
        # a full etcd grants no new lease to an agent whose renewal was late
        cluster.pace["--node-ttl"] = "30"
        (a,) = cluster.start("a")
        begin(prometheus, cluster, a)
        world = cluster.world(1)
        etcds.fill(cluster.access)
        full = alerts.fires("ElasticdEtcdFull", run=run)
        assert full.summary == f"{run}: etcd is full and refuses writes, so no worker is replaced"
        cluster.goes_on(world)
        etcds.make_room(cluster.access)
        alerts.resolves("ElasticdEtcdFull")
        cluster.finishes(a)
    finally:
        etcd.stop()


@scenario
def test_gpus_that_have_errors(cluster: Cluster, serve: Serve) -> None:
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler is installed, to make a library of GPUs with")
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py, which elasticd's extra `gpu` installs")
    library, gpus = cluster.folder / "libnvidia-ml.so.1", cluster.folder / "gpus"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, PROGRAMS / "nvml.c"], check=True)
    well, hot = "75 3221225472 85899345920 412500 61 4 2 0", "10 1024 85899345920 90500 93 32 2 0"

    def say(first: str, second: str) -> None:
        (cluster.folder / "new").write_text(f"{first}\n{second}\n")
        (cluster.folder / "new").rename(gpus)

    say(well, well)
    prometheus = serve(hastened(HASTE))
    alerts, run = prometheus.alerts, cluster.job
    cluster.limits = (2, 2)
    (a,) = cluster.start("a", slots=2, env={"FAKE_NVML": str(gpus), "LD_LIBRARY_PATH": str(cluster.folder)})
    begin(prometheus, cluster, a)
    world = cluster.world(2)
    prometheus.until("elasticd_gpu_utilization_ratio", lambda found: len(found.series) == 2)
    expected = {
        "GPU in use": 0.75,
        "GPU memory in use": 3 / 80,
        "GPU temperature": 61,
        "GPU power": 412.5,
    }
    for panel, value in expected.items():
        (shown,) = prometheus.shows(panel, "workers")
        assert shown.by("node", "slot") == {("a", "0"): value, ("a", "1"): value}, panel
    (held,) = prometheus.shows("GPU throttled", "workers")
    assert held.by("slot", "reason") == {("0", "power"): 1, ("1", "power"): 1}
    assert not alerts.told
    say(well, f"{hot} 79")
    xid = alerts.fires("ElasticdGpuXid", run=run)
    assert xid.summary == f"{run}: XID error 79 of the GPU of slot 1 of a"
    throttled = alerts.fires("ElasticdGpuThrottled")
    assert throttled.summary == f"{run}: the GPU of slot 1 of a runs at a reduced clock: thermal"
    say(well, "10 1024 85899345920 90500 60 4 2 3 79")
    broken = alerts.fires("ElasticdGpuMemoryErrors")
    assert broken.summary == f"{run}: uncorrected memory errors in the GPU of slot 1 of a"
    xids, errors = prometheus.shows("GPU errors", "workers")
    assert xids.by("slot", "xid") == {("1", "79"): 1}
    assert errors(slot=1, error="uncorrected") == 3 and errors(slot=0, error="uncorrected") == 0
    _, bad = prometheus.shows("Stragglers and bad GPUs", "workers")
    assert bad.by("node", "slot") == {("a", "1"): 1}
    for name in ("GpuXid", "GpuThrottled", "GpuMemoryErrors"):
        alerts.resolves(f"Elasticd{name}")
    cluster.goes_on(world)
    cluster.finishes(a)


@scenario
def test_checkpoints_that_are_no_longer_made(cluster: Cluster, serve: Serve, tmp_path: Path) -> None:
    prometheus = serve(hastened(10 * HASTE))
    alerts, run = prometheus.alerts, cluster.job
    cluster.limits = (1, 1)
    (a,) = cluster.start("a", program=[str(PROGRAMS / "saving.py"), str(tmp_path / "checkpoints")])
    begin(prometheus, cluster, a)
    (worker,) = cluster.world(1).players
    for board in ("job", "fleet"):
        assert not prometheus.shows("Age of the newest checkpoint", board)[0], "there is none"
    worker.tell("save")
    cluster.until(lambda: worker.did("saved"), "it has saved")
    saved_at = time.time()
    prometheus.until(
        "elasticd_checkpoint_step", lambda found: found and found() == worker.did("saved")[0]["step"]
    )
    old = alerts.fires("ElasticdCheckpointOld", run=run)
    assert old.labels["severity"] == "warning"
    committed = cluster.fact("checkpoint", Checkpoint)
    assert committed is not None and committed.newest is not None
    for board in ("job", "fleet"):
        (age,) = prometheus.shows("Age of the newest checkpoint", board)
        assert 6 < age(run=run) < time.time() - saved_at + 5
    (size,) = prometheus.shows("Size of the newest checkpoint", "job")
    assert size(run=run) == committed.newest.size > 3 * 64 * 64 * 4
    worker.tell("save")
    alerts.resolves("ElasticdCheckpointOld")
    (samples,), (loss,) = prometheus.shows("Samples a second", "job"), prometheus.shows("Loss", "job")
    assert samples(run=run) > 0 and 0 < loss(run=run) < 10
    (samples,) = prometheus.shows("Samples a second", "workers")
    assert samples(node="a", slot=0) > 0
    took, waited = prometheus.shows("Time for a checkpoint", "job")
    assert waited(run=run) > 0 and 0 < took(run=run) < time.time() - saved_at
    # Checkpoints are made faster than they can be committed, until one is left out.
    worker.tell("hurry")
    (hurried,) = cluster.until(lambda: worker.did("hurried"), "a save is left out")
    assert hurried["durable"]
    prometheus.until('elasticd_checkpoints_total{result="skipped"}', lambda found: found and found() == 1)
    # The folder of checkpoints is replaced by a file.
    (tmp_path / "checkpoints").rename(tmp_path / "away")
    (tmp_path / "checkpoints").write_text("in the way")
    worker.tell("save")
    failing = alerts.fires("ElasticdCheckpointFailing", run=run)
    assert failing.summary.endswith("checkpoints of the last 15 minutes have failed")
    (fates,) = prometheus.shows("Checkpoints by result", "job")
    assert {result: whole for (result,), n in fates.by("result").items() if (whole := round(n))} == {
        "committed": 2 + hurried["saves"], "skipped": 1, "failed": 1,
    }  # fmt: skip
    assert [one["durable"] for one in worker.did("saved")] == [True, True, False]
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "away").rename(tmp_path / "checkpoints")
    alerts.resolves("ElasticdCheckpointFailing")
    worker.tell("poison")
    alerts.fires("ElasticdNotFinite", run=run)
    alerts.resolves("ElasticdNotFinite")
    cluster.finishes(a)


def test_each_panel_and_each_alert_is_caused_by_a_test() -> None:
    told = "".join(p.read_text() for p in Path(__file__).parent.glob("test_*.py"))
    for name in names("alert"):
        assert f'"{name}"' in told or f'"{name.removeprefix("Elasticd")}"' in told, name
    for query in queries():
        assert f'"{query.panel}"' in told, query.panel
    for test, places in SHOWN_BY.items():
        for _, panel in places:
            assert f'"{panel}"' in inspect.getsource(globals()[test]), (test, panel)
