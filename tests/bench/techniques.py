"""What each program of ``workers/`` does at each fault, and what its technique costs."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

from tests.e2e.conftest import Etcd
from tests.e2e.harness import Cluster
from tests.workers.programs import (
    ACCIDENT,
    FAULTS,
    PROGRAMS,
    Program,
    applies,
    end,
    start,
    steps_until,
)

T = TypeVar("T")
# the workers of the comparison with DistributedDataParallel; programs in units have one unit then
WORKERS = 2
TORCHRUN_S = 600.0  # the time limit of a program under torchrun
README = Path(__file__).parents[2] / "workers" / "README.md"
# the columns of the page's tables that this command prints
CPU = {"torchrun": "CPU of a step, torchrun", "`elasticd run`": "CPU of a step"}
COSTS = {"next step after": "worker killed, until the next step", "samples/s against DDP": "against DDP"}


def techniques(names: Sequence[str], faults: Sequence[str], *, torchrun: bool = False) -> Iterator[str]:
    """Yield the rows of a table in Markdown, each as soon as it is known. A cell has the quality on held-out
    data, and the time from the fault to the next step of a later world. ``torchrun``: the last column is that
    of the same script under torchrun, where a worker is killed. Raises AssertionError for a program that
    misses its quality."""
    faults = faults or [*FAULTS]
    titles = ["program", *faults, *(["worker killed, torchrun"] if torchrun else [])]
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    etcd = Etcd()
    try:
        for program in PROGRAMS:
            if not names or program.name in names:
                cells = [_met(etcd.url, program, fault) for fault in faults]
                if torchrun:
                    cells.append(_killed_under_torchrun(etcd.url, program))
                yield f"| {_title(program)} | {' | '.join(cells)} |"
    finally:
        etcd.close()


def _met(etcd: str, program: Program, fault: str) -> str:
    if not applies(fault, program):
        return "has one worker"

    def meet(cluster: Cluster) -> str:
        quality = FAULTS[fault](cluster, program)
        took = [_seconds(cluster.folder, steps) for steps in (program.after, 2 * program.after)]
        return _cell(quality, took)

    return _in_cluster(etcd, meet)


class Pace(NamedTuple):
    """The samples that two workers handle in a second, and the CPU time of a worker for a step."""

    samples_per_s: float
    cpu_ms: float


def costs(names: Sequence[str], turns: int, *, torchrun: bool = False) -> Iterator[str]:
    """Yield the rows of a table in Markdown, one for each program. A row has the samples that two workers
    handle in a second; their ratio to those of the same model with DistributedDataParallel; the CPU time of a
    step in a worker, and with ``torchrun`` also that under torchrun; and the time from a worker's death to
    the next step of a later world. Each figure is the median of so many turns. In a turn each program trains,
    and then loses a worker. A program in units trains with one unit, and loses a worker of two units in
    another run."""
    programs = [program for program in PROGRAMS if not names or program.name in names]
    beside = {program.beside for program in programs}
    paced = [program for program in PROGRAMS if program in programs or program.name in beside]
    paces: dict[str, list[Pace]] = {program.name: [] for program in paced}
    beside_cpu: dict[str, list[float]] = {program.name: [] for program in paced}
    recoveries: dict[str, list[float]] = {program.name: [] for program in paced}
    etcd = Etcd()
    try:
        for _ in range(turns):
            for program in paced:
                pace, recovery_s = _pace_and_recovery(etcd.url, program)
                paces[program.name].append(pace)
                recoveries[program.name].append(recovery_s)
                if torchrun and program in programs:
                    beside_cpu[program.name].append(_cpu_ms_under_torchrun(etcd.url, program))
    finally:
        etcd.close()
    titles = ["program", "samples/s", "against DDP", "worker killed, until the next step", "CPU of a step"]
    titles += ["CPU of a step, torchrun"] if torchrun else []
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for program in programs:
        pace, beside_it = (_samples_per_s(paces[name]) for name in (program.name, program.beside))
        cpu = [median(each.cpu_ms for each in paces[program.name])]
        cpu += [median(beside_cpu[program.name])] if torchrun else []
        cells = [f"{pace:,.0f}", f"{pace / beside_it:.2f}", f"{median(recoveries[program.name]):.2f} s"]
        cells += [f"{ms:.1f} ms" for ms in cpu]
        yield f"| {program.name}.py | {' | '.join(cells)} |"


def _samples_per_s(paces: Sequence[Pace]) -> float:
    return median(pace.samples_per_s for pace in paces)


def undisturbed(etcd: str | None, program: Program) -> tuple[Pace, list[str]]:
    """Return the pace of two workers, and the lines that the program printed."""
    program = replace(program, workers=min(program.workers, WORKERS))

    def train(cluster: Cluster) -> tuple[Pace, list[str]]:
        (agent,) = start(cluster, program, "mark", "mark")
        end(program, agent)
        return _pace(cluster.folder, program), agent.out

    return _in_cluster(etcd, train)


def _pace_and_recovery(etcd: str, program: Program) -> tuple[Pace, float]:
    """Return the pace of two workers, and the seconds from a worker's death to the next step of a later
    world."""

    def lose_a_worker(cluster: Cluster) -> tuple[Pace, float]:
        end(program, *start(cluster, program, "mark", "kill"))
        died, over = (cluster.folder / f"{steps_until(program, 1)}{which}" for which in ("", "-over"))
        return _pace(cluster.folder, program), _noted_at(over) - _noted_at(died)

    pace, recovery_s = _in_cluster(etcd, lose_a_worker)
    if program.workers > WORKERS:
        pace, _ = undisturbed(etcd, program)
    return pace, recovery_s


def _pace(folder: Path, program: Program) -> Pace:
    """Return the pace between the first two accidents. The first one is only noted."""
    began, ended = (folder / str(steps_until(program, n)) for n in (0, 1))
    steps = steps_until(program, 1) - steps_until(program, 0)
    took, cpu_s = _noted_at(ended) - _noted_at(began), _cpu_s(ended) - _cpu_s(began)
    return Pace(program.samples * steps / took, 1000 * cpu_s / steps)


def _in_cluster(etcd: str | None, act: Callable[[Cluster], T]) -> T:
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder), etcd)
        try:
            return act(cluster)
        finally:
            cluster.close(check=False)


def _killed_under_torchrun(etcd: str, program: Program) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ran = _under_torchrun(etcd, program, folder, f"kill:{program.rank}:{program.after}")
        if ran.returncode:
            return "failed"
        took = [_seconds(folder, program.after)]
    return _cell(program.require_quality(ran.stdout.splitlines()), took)


def _cpu_ms_under_torchrun(etcd: str, program: Program) -> float:
    """Return the CPU time of a step in a worker of two. Raises CalledProcessError."""
    program = replace(program, workers=min(program.workers, WORKERS))
    marks = ",".join(f"mark:{program.rank}:{steps_until(program, n)}" for n in (0, 1))
    with tempfile.TemporaryDirectory() as folder:
        _under_torchrun(etcd, program, Path(folder), marks).check_returncode()
        return _pace(Path(folder), program).cpu_ms


def _under_torchrun(
    etcd: str, program: Program, folder: Path, accidents: str
) -> subprocess.CompletedProcess[str]:
    """Run the program under torchrun to its end, with these accidents."""
    cluster = Cluster(folder, etcd)
    environment = {k: v for k, v in cluster.environment().items() if not k.startswith("E2E_")}
    cluster.close(check=False)
    torchrun = [str(Path(sys.executable).with_name("torchrun")), f"--log-dir={folder}/logs", "--standalone"]
    return subprocess.run(
        [
            *(*torchrun, "--max-restarts=3", f"--nproc-per-node={program.workers}", ACCIDENT),
            *(accidents, str(folder), *program.argv(folder)),
        ],
        env=environment | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=TORCHRUN_S,
        check=False,
    )


def _title(program: Program) -> str:
    """Return the first cell of a program's row."""
    title = f"{program.name}.py"
    if program.unit > 1:
        title += f", {program.workers // program.unit} x {program.unit} workers"
    return title if program.loss == math.inf else f"{title} (loss)"


def _cell(quality: str, took: Sequence[str]) -> str:
    """Return the cell of a table. ``quality``: the line with which a program ends."""
    found = re.search(r"accuracy ([\d.]+)%|loss.* ([\d.]+)", quality)
    assert found is not None, quality
    return ", ".join([f"{found[1]} %" if found[1] else found[2], *filter(None, took)])


def _seconds(folder: Path, steps: int) -> str:
    """Return the seconds from the fault after so many steps to the next step of a later world, if both
    happened."""
    begun, over = folder / str(steps), folder / f"{steps}-over"
    if not (begun.exists() and over.exists()):
        return ""
    return f"{_noted_at(over) - _noted_at(begun):.2f} s"


def _noted_at(file: Path) -> float:
    """Return the time that an accident noted."""
    return float(file.read_text().split()[0])


def _cpu_s(file: Path) -> float:
    """Return the CPU time of the worker until an accident."""
    return float(file.read_text().split()[2])
