"""What becomes of each program of ``workers/`` when it meets each fault, and what its technique costs."""

from __future__ import annotations

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
    killed,
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
                yield f"| {program.name}.py | {' | '.join(cells)} |"
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
    the next step of a later world. Each is the median of so many turns; a turn runs each program once."""
    programs = [program for program in PROGRAMS if not names or program.name in names]
    beside = {program.beside for program in programs}
    paced = [program for program in PROGRAMS if program in programs or program.name in beside]
    paces: dict[str, list[float]] = {program.name: [] for program in paced}
    recoveries: dict[str, list[float]] = {program.name: [] for program in programs}
    etcd = Etcd()
    try:
        for _ in range(turns):
            for program in paced:
                paces[program.name].append(samples_per_s(etcd.url, program)[0])
            for program in programs:
                recoveries[program.name].append(_recovery_s(etcd.url, program))
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
        began, ended = (_noted_at(cluster.folder / str(steps_until(program, n))) for n in (0, 1))
        samples = program.samples * (steps_until(program, 1) - steps_until(program, 0))
        return samples / (ended - began), agent.out

    return _in_cluster(etcd, train)


def _recovery_s(etcd: str, program: Program) -> float:
    def lose_a_worker(cluster: Cluster) -> float:
        killed(cluster, program)
        died, over = (cluster.folder / f"{program.after}{which}" for which in ("", "-over"))
        return _noted_at(over) - _noted_at(died)

    return _in_cluster(etcd, lose_a_worker)


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


def _cell(quality: str, took: Sequence[str]) -> str:
    """Return the cell of a table. ``quality``: the line with which a program ends."""
    found = quality.partition("held-out")[2].strip(" :").replace("balanced accuracy ", "")
    return ", ".join([found.partition(", loss")[0], *filter(None, took)])


def _seconds(folder: Path, steps: int) -> str:
    """Return the time from the fault after so many steps to the next step of a later world, if both came."""
    begun, over = folder / str(steps), folder / f"{steps}-over"
    if not (begun.exists() and over.exists()):
        return ""
    return f"{_noted_at(over) - _noted_at(begun):.2f} s"


def _noted_at(file: Path) -> float:
    """Return the time that an accident noted."""
    return float(file.read_text().split()[0])
