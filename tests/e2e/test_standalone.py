"""Runs without --etcd, which start an etcd of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from elasticd.etcd.embedded import fault_of, find_etcd, version_of
from elasticd.etcd.registry import standalone_runs
from tests.e2e.harness import Cluster, await_end, marked

MakeCluster = Callable[[str | None], Cluster]


@pytest.fixture
def alone(clusters: MakeCluster) -> Cluster:
    return clusters(None)


def etcd_of(cluster: Cluster) -> int:
    """Return the pid of the run's own etcd."""
    (pid,) = (pid for pid in marked(cluster.mark) if psutil.Process(pid).name() == "etcd")
    return pid


def test_status_and_ls_find_it_and_scale_steers_it(alone: Cluster) -> None:
    alone.limits = (1, 3)
    (a,) = alone.start("a", slots=3)
    first = alone.world(3)
    listed = alone.command("ls")
    assert listed.code == 0 and alone.job in listed.out
    seen = alone.command("status", alone.job, "--json")
    report = json.loads(seen.out)
    assert (report["job"], report["round"], report["world_size"]) == (alone.job, first.round, 3)
    assert alone.command("scale", alone.job, "--max", "2").code == 0
    second = alone.world(2, after=first)
    assert alone.command("stop", alone.job).code == 0
    assert a.end() == 143
    alone.until_gone(second.players)
    assert alone.job not in alone.command("ls").out


def test_other_users_cannot_reach_its_etcd_and_its_ports_are_on_loopback_only(
    alone: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,) = alone.start("a", slots=2)
    alone.world(2)
    monkeypatch.setenv("XDG_RUNTIME_DIR", alone.environment()["XDG_RUNTIME_DIR"])
    (run,) = standalone_runs()
    assert run.endpoint.startswith("unix:")
    if os.geteuid() == 0:
        argv = [sys.executable, "-I", "-c", AS_NOBODY, run.endpoint.removeprefix("unix:")]
        said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        assert said == "PermissionError\n"
    at: dict[str, set[str]] = {}
    for pid in (a.pid, *marked(alone.mark)):
        process = psutil.Process(pid)
        heard = at.setdefault(process.name(), set())
        heard.update(c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN)
    assert at.pop("etcd") == set()
    assert set().union(*at.values()) == {"127.0.0.1"}
    alone.finishes(a)


AS_NOBODY = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""


def test_an_old_etcd_is_warned_of_once_on_a_machine(clusters: MakeCluster, tmp_path: Path) -> None:
    said = []
    for _ in range(2):
        cluster = clusters(None)
        (a,) = cluster.start("a", slots=1, env={"XDG_STATE_HOME": str(tmp_path / "state")})
        cluster.world(1)
        cluster.finishes(a)
        said.append([line["why"] for line in a.find("etcd.old")])
    fault = fault_of(version_of(find_etcd()))
    assert said == [[fault] if fault else [], []]


def test_a_standalone_run_goes_on_when_its_etcd_is_killed(alone: Cluster) -> None:
    (a,) = alone.start("a", slots=2)
    world = alone.world(2)
    pid = etcd_of(alone)
    os.kill(pid, signal.SIGKILL)
    alone.until_said(a, "etcd.restarted")
    assert etcd_of(alone) != pid
    alone.goes_on(world)
    # The agent is in control again: a worker that dies is replaced.
    world.players[0].tell("exit", code=5)
    second = alone.world(2, after=world)
    assert (second.round, second.restarts) == (world.round + 1, 1)
    alone.finishes(a)


def test_nothing_is_left_when_its_agent_is_killed(alone: Cluster) -> None:
    (a,) = alone.start("a", slots=2)
    world = alone.world(2)
    etcd = os.pidfd_open(etcd_of(alone))
    orphan = alone.orphan_of(world.players[1])
    a.kill()
    alone.until_gone([*world.players, orphan])
    await_end(etcd, "its etcd")
    os.close(etcd)
    assert alone.job not in alone.command("ls").out


def test_ctrl_c_drains_it_and_its_etcd_is_there_until_the_end(alone: Cluster) -> None:
    (a,) = alone.start("a", slots=2)
    alone.world(2)
    # Send the signal to the whole process group, as a terminal does.
    os.killpg(os.getpgid(a.pid), signal.SIGINT)
    assert a.end() == 130
    assert not a.find("etcd.restarted")


def test_an_agent_that_is_stopped_or_starved_for_longer_than_a_lease_costs_its_workers_nothing(
    alone: Cluster,
) -> None:
    alone.pace["--node-ttl"] = "2"
    (a,) = alone.start("a", slots=2)
    world = alone.world(2)
    a.signal(signal.SIGSTOP)
    last = max(p.last_at for p in world.players)
    alone.until(lambda: all(p.last_at > last + 6 for p in world.players), "workers outlive three leases")
    a.signal(signal.SIGCONT)
    alone.goes_on(world)
    world.players[0].tell("exit", code=5)  # the agent is in control: this worker is replaced
    second = alone.world(2, after=world)
    assert (second.round, second.restarts) == (world.round + 1, 1)
    assert not a.find("workers.hung") and not a.find("lease.lost")
    assert [e["cause"] for e in a.find("round.closing")] == ["worker_failed"]
    alone.finishes(a)
