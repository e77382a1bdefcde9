"""What each program of ``workers/`` does when each fault occurs, and what its technique costs."""

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
from typing import TypeVar

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
WORKERS = 2  # of the comparison with DistributedDataParallel; the programs in units have one unit then
TORCHRUN_S = 600.0  # for a program under torchrun


def techniques(names: Sequence[str], faults: Sequence[str], *, torchrun: bool = False) -> Iterator[str]:
    """Yield the rows of a table in Markdown, each as soon as it is known. A cell has the quality on held-out
    data, and the time from the fault to the next step of a later world. ``torchrun``: the last column is of
    the same script under torchrun, where a worker is killed. Raises AssertionError for a program that misses
    its quality."""
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


def costs(names: Sequence[str], turns: int) -> Iterator[str]:
    """Yield the rows of a table in Markdown: of each program the samples that two workers handle in a second,
    their ratio to those of the same model with DistributedDataParallel, and the time from a worker's death to
    the next step of a later world. Each is the median of so many turns. In a turn each program trains, and
    then loses a worker; a program in units trains with one unit, and loses a worker of two in another run."""
    programs = [program for program in PROGRAMS if not names or program.name in names]
    beside = {program.beside for program in programs}
    paced = [program for program in PROGRAMS if program in programs or program.name in beside]
    paces: dict[str, list[float]] = {program.name: [] for program in paced}
    recoveries: dict[str, list[float]] = {program.name: [] for program in paced}
    etcd = Etcd()
    try:
        for _ in range(turns):
            for program in paced:
                pace, recovery_s = _pace_and_recovery(etcd.url, program)
                paces[program.name].append(pace)
                recoveries[program.name].append(recovery_s)
    finally:
        etcd.close()
    yield "| program | samples/s | against DDP | worker killed, until the next step |"
    yield "|---|---|---|---|"
    for program in programs:
        pace = median(paces[program.name])
        ratio = pace / median(paces[program.beside])
        recovery = median(recoveries[program.name])
        yield f"| {program.name}.py | {pace:,.0f} | {ratio:.2f} | {recovery:.2f} s |"


def samples_per_s(etcd: str | None, program: Program) -> tuple[float, list[str]]:
    """Return how many samples two workers handle in a second, and the lines that the program printed."""
    program = replace(program, workers=min(program.workers, WORKERS))

    def train(cluster: Cluster) -> tuple[float, list[str]]:
        (agent,) = start(cluster, program, "mark", "mark")
        end(program, agent)
        return _pace(cluster, program), agent.out

    return _in_cluster(etcd, train)


def _pace_and_recovery(etcd: str, program: Program) -> tuple[float, float]:
    """Return how many samples two workers handle in a second, and the seconds from a worker's death to the
    next step of a later world."""

    def lose_a_worker(cluster: Cluster) -> tuple[float, float]:
        end(program, *start(cluster, program, "mark", "kill"))
        died, over = (cluster.folder / f"{steps_until(program, 1)}{which}" for which in ("", "-over"))
        return _pace(cluster, program), _noted_at(over) - _noted_at(died)

    pace, recovery_s = _in_cluster(etcd, lose_a_worker)
    if program.workers > WORKERS:
        pace, _ = samples_per_s(etcd, program)
    return pace, recovery_s


def _pace(cluster: Cluster, program: Program) -> float:
    """Return the samples a second between the first two faults, of which the first only is noted."""
    began, ended = (_noted_at(cluster.folder / str(steps_until(program, n))) for n in (0, 1))
    return program.samples * (steps_until(program, 1) - steps_until(program, 0)) / (ended - began)


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
        cluster = Cluster(folder, etcd)
        environment = {k: v for k, v in cluster.environment().items() if not k.startswith("E2E_")}
        cluster.close(check=False)
        ran = subprocess.run(
            [
                *(
                    str(Path(sys.executable).with_name("torchrun")),
                    f"--log-dir={folder}/logs",
                    "--standalone",
                ),
                *("--max-restarts=3", f"--nproc-per-node={program.workers}", ACCIDENT),
                *(f"kill:{program.rank}:{program.after}", str(folder), *program.argv(folder)),
            ],
            env=environment | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            capture_output=True,
            text=True,
            timeout=TORCHRUN_S,
            check=False,
        )
        if ran.returncode:
            return "failed"
        took = [_seconds(folder, program.after)]
    return _cell(program.require_quality(ran.stdout.splitlines()), took)


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
    """Return the time from the fault after so many steps to the next step of a later world, if both came."""
    begun, over = folder / str(steps), folder / f"{steps}-over"
    if not (begun.exists() and over.exists()):
        return ""
    return f"{_noted_at(over) - _noted_at(begun):.2f} s"


def _noted_at(file: Path) -> float:
    """Return the time that an accident noted."""
    return float(file.read_text().split()[0])
