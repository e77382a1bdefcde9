"""``elasticd run`` with scripts that use CUDA, and do not import elasticd. Two ranks are two nodes that share
the GPU, since a node offers no more slots than it has GPUs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import Agent, Cluster
from tests.e2e.test_scrape import eventually, scrape

PROGRAM = Path(__file__).parent / "programs" / "train.py"
ENV = {"PYTHONPATH": str(Path(__file__).parents[2])}


def trains(cluster: Cluster, *agents: Agent, steps: int = 5) -> None:
    """Wait until each rank has made so many further steps."""
    for agent in agents:
        cluster.until_said(agent, "agent.started")

    def made(agent: Agent) -> float:
        return scrape(agent)("worker_steps_total", slot=0) or 0.0

    goals = [(agent, made(agent) + steps) for agent in agents]
    eventually(lambda: all(made(agent) >= goal for agent, goal in goals))


def worker(folder: Path, *, other_than: int = 0) -> tuple[int, bool]:
    """Return the pid of rank 0, and whether the process was forked."""

    def told() -> tuple[int, bool] | None:
        path = folder / "pid-0"
        pid, forked = map(int, path.read_text().split()) if path.exists() else (other_than, 0)
        return None if pid == other_than else (pid, bool(forked))

    return eventually(told)  # type: ignore[return-value]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_worker_that_dies_is_forked_again_and_has_its_gpu(
    clusters: Callable[[str | None], Cluster], tmp_path: Path, backend: str
) -> None:
    alone = clusters(None)
    alone.limits = (1, 1)
    program = (str(PROGRAM), backend, str(tmp_path))
    (a,) = alone.start("a", options=("--max-restarts=5",), program=program, env=ENV)
    first, _ = worker(tmp_path)
    trains(alone, a)
    left_out = [(e["module"], e["why"]) for e in a.find("zygote.left_out")]
    assert not [m for m, _ in left_out if m.startswith("torch")], f"torch cannot be preloaded: {left_out}"
    alone.until_said(a, "zygote.ready")
    (zygote,) = (p for p in psutil.Process(a.pid).children(recursive=True) if p.name() == "elasticd-zygote")
    held = [os.readlink(f) for f in Path(f"/proc/{zygote.pid}/fd").iterdir()]
    assert not [path for path in held if "nvidia" in path], "it uses no GPU"
    os.kill(first, signal.SIGKILL)
    _, forked = worker(tmp_path, other_than=first)
    trains(alone, a)
    assert forked
    (tmp_path / "end").touch()
    assert a.end() == 0, a.said()


def test_the_gpu_of_a_slot_is_in_its_metrics(
    clusters: Callable[[str | None], Cluster], tmp_path: Path
) -> None:
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py, which elasticd's extra `gpu` installs")
    alone = clusters(None)
    alone.limits = (1, 1)
    (a,) = alone.start("a", program=(str(PROGRAM), "nccl", str(tmp_path)), env=ENV)
    trains(alone, a)
    eventually(lambda: (scrape(a)("gpu_utilization_ratio", slot=0) or 0) > 0)
    seen = scrape(a)
    used, there = seen("gpu_memory_used_bytes", slot=0) or 0, seen("gpu_memory_size_bytes", slot=0) or 0
    assert 1 << 28 < used < there, "a CUDA context alone has some hundred MiB"
    assert 10 < (seen("gpu_temperature_celsius", slot=0) or 0) < 110
    assert 10 < (seen("gpu_power_watts", slot=0) or 0) < 2000
    assert seen("gpu_throttled", slot=0, reason="hardware") in (0, 1)
    assert seen("slot_bad", slot=0) == 0
    (tmp_path / "end").touch()
    assert a.end() == 0, a.said()


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_rank_that_needs_a_fifth_more_of_its_gpu_is_named(
    cluster: Cluster, tmp_path: Path, backend: str
) -> None:
    cluster.limits = (2, 2)
    cluster.policy["straggler_window_s"] = 8
    a, b = cluster.start(
        "a",
        "b",
        options=("--stragglers=report",),
        program=(str(PROGRAM), backend, str(tmp_path), "1"),
        env=ENV,
    )
    trains(cluster, a, b, steps=150)
    assert not a.find("worker.straggling") + b.find("worker.straggling"), "they are alike"
    (tmp_path / "slow").touch()
    named = cluster.until_anyone_said("worker.straggling")
    assert named["rank"] == 1 and 1.1 <= named["ratio"] < 1.4
    (tmp_path / "end").touch()
    for agent in (a, b):
        assert agent.end() == 0, agent.said()
    assert {e["rank"] for agent in (a, b) for e in agent.find("worker.straggling")} == {1}


def test_waiting_workers_are_distinguished_from_the_late_one_on_the_gpu_and_the_recorder_has_the_sum(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.limits = (2, 2)
    cluster.policy["hang_floor_s"] = 0.1
    a, b = cluster.start(
        "a",
        "b",
        options=("--max-restarts=0",),
        program=(str(PROGRAM), "nccl", str(tmp_path), "-1", "1"),
        env=ENV,
    )
    hung = cluster.until_anyone_said("workers.hung")
    lines = PROGRAM.read_text().splitlines()
    (asleep,) = (n for n, line in enumerate(lines, 1) if line.endswith("# hangs"))
    assert hung["ranks"] == [1] and f"is in train.py:{asleep}" in hung["conclusion"]
    for agent in (a, b):
        assert agent.end() == 1, agent.said()
    recorded = json.loads((cluster.folder / hung["evidence"] / "flight-recorder-0.json").read_text())
    assert any("nccl" in call["profiling_name"] for call in recorded["entries"])


def test_the_doctor_uses_the_gpu_and_forms_a_group_of_one_on_it(cluster: Cluster) -> None:
    told = json.loads(cluster.command("doctor", "--json", etcd=False).out)
    found = [f for f in told["findings"] if f["check"] in ("GPUs", "torch")]
    about = {f["check"]: f for f in reversed(found)}  # the first: a second one may advise to install NVML
    assert {f["grade"] for f in about.values()} == {"fine"}, about
    assert about["GPUs"]["says"][0].isdigit() and "CUDA" in about["GPUs"]["says"]
    assert "with gloo and nccl" in about["torch"]["says"]
