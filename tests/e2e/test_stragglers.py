"""A worker that is slower than its peers, in real processes: the steps of all workers take equally long."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticd.core.straggler import PERIODS
from tests.e2e.harness import Agent, Cluster

PROGRAM = str(Path(__file__).parent / "programs" / "uneven.py")
CONTROL_GROUPS = Path("/sys/fs/cgroup/cpu")  # control groups of version 1

Burden = Callable[..., None]


@pytest.fixture
def burden() -> Iterator[Burden]:
    """Keep the given processors, or any processors, busy with so many processes."""
    made: list[subprocess.Popen[bytes]] = []

    def start(count: int, processors: set[int] | None = None) -> None:
        for _ in range(count):
            made.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            os.sched_setaffinity(made[-1].pid, processors or os.sched_getaffinity(0))

    yield start
    for process in made:
        process.kill()
        process.wait()


@pytest.fixture
def group() -> Iterator[Path]:
    """Make a control group for processes that end before the group is removed."""
    made = Path(tempfile.mkdtemp(prefix="elasticd-", dir=CONTROL_GROUPS))
    yield made
    made.rmdir()


def process_of(rank: int, *agents: Agent) -> int:
    told = (re.search(rf"rank {rank} is process (\d+)", line) for a in agents for line in a.out)
    return next((int(found[1]) for found in told if found), 0)


def compare(cluster: Cluster, *agents: Agent, periods: int) -> None:
    """Wait until all agents have reported so many more periods. The workers report each step."""

    def told() -> int:
        told = [cluster.told(agent.name) for agent in agents]
        return min(one.paces.number if one is not None and one.paces is not None else 0 for one in told)

    begun = cluster.until(told, "the first period has passed")
    cluster.until(lambda: told() >= begun + periods, f"{periods} periods pass", 1200.0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "gpu", "fsdp2"])
def test_the_rank_that_is_a_fifth_slower_is_named_and_its_slot_left_out_without_charge(
    clusters: Callable[[str | None], Cluster], tmp_path: Path, how: str
) -> None:
    standalone = clusters(None)
    standalone.limits = (2, 3)
    standalone.policy["straggler_window_s"] = 8
    (tmp_path / "slow").touch()
    (a,) = standalone.start(
        "a",
        slots=3,
        options=("--stragglers=drain",),
        program=(PROGRAM, how, "1", "1.2", str(tmp_path)),
    )
    standalone.until(lambda: a.find("round.formed", cause="slot_drained"), "it goes on without", 180.0)
    (named,) = a.find("worker.straggling")
    assert (named["slot"], named["rank"]) == (1, 1) and 1.1 <= named["ratio"] < 1.5
    (drained,) = a.find("slot.drained")
    assert drained["slot"] == 1
    assert a.find("round.formed", cause="slot_drained")[0]["world_size"] == 2
    (tmp_path / "end").touch()
    assert a.end() == 0, a.said()
    assert not a.find("failure.charged")
    report = standalone.command("report", standalone.job, etcd=False)
    assert "Stragglers and bad slots: 1" in report.out and "longer for a step than its peers" in report.out


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("beside", ["all of them", "one of them"])
def test_of_workers_starved_by_other_processes_none_is_named_but_a_slow_one(
    cluster: Cluster, burden: Burden, tmp_path: Path, beside: str
) -> None:
    processors = sorted(os.sched_getaffinity(0))
    if beside == "one of them" and len(processors) < 2:
        pytest.skip("it takes two processors to starve one worker alone")
    cluster.limits, cluster.pace["--node-ttl"] = (3, 3), "60"
    cluster.policy["straggler_window_s"] = 6
    program = (PROGRAM, "busy", "1", "1.3", str(tmp_path))
    a, b = (cluster.start(name, slots=slots, program=program)[0] for name, slots in (("a", 2), ("b", 1)))
    compare(cluster, a, b, periods=1)
    if beside == "one of them":
        for rank, its in enumerate((processors[:1], processors[1:], processors[1:])):
            os.sched_setaffinity(process_of(rank, a, b), its)
        burden(20, set(processors[:1]))
    else:
        burden(20)
    compare(cluster, a, b, periods=2 * PERIODS)
    assert not a.find("worker.straggling") and not b.find("worker.straggling")
    (tmp_path / "slow").touch()
    named = cluster.until_anyone_said("worker.straggling")
    assert (named["node"], named["slot"]) == ("a", 1) and 1.15 <= named["ratio"] < 1.5
    (tmp_path / "end").touch()
    assert (a.end(), b.end()) == (0, 0), a.said()
    assert len(a.find("worker.straggling") + b.find("worker.straggling")) == 1


@pytest.mark.slow
@pytest.mark.skipif(
    not os.access(CONTROL_GROUPS / "cpu.cfs_quota_us", os.F_OK) or os.geteuid() != 0,
    reason="to set a quota takes root and control groups of version 1",
)
def test_a_worker_that_its_node_s_quota_holds_up_is_named(
    group: Path, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.limits, cluster.pace["--node-ttl"] = (3, 3), "60"
    cluster.policy["straggler_window_s"] = 6
    program = (PROGRAM, "busy", "1", "1.0", str(tmp_path))
    (a,) = cluster.start("a", slots=2, program=program)
    (b,) = cluster.start("b", slots=1, program=program)
    (group / "cgroup.procs").write_text(str(b.pid))  # before the worker has started others
    compare(cluster, a, b, periods=1)
    (group / "cpu.cfs_quota_us").write_text("10000")  # of 100,000: a tenth of a processor
    named = cluster.until_anyone_said("worker.straggling")
    assert (named["node"], named["slot"]) == ("b", 0)
    (group / "cpu.cfs_quota_us").write_text("-1")
    (tmp_path / "end").touch()
    assert (a.end(), b.end()) == (0, 0), a.said()
