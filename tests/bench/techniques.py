"""What becomes of each program of ``workers/`` when it meets each fault."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.e2e.conftest import Etcd
from tests.e2e.harness import Cluster
from tests.workers.programs import ACCIDENT, FAULTS, PROGRAMS, Program, applies

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
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder), etcd)
        try:
            quality = FAULTS[fault](cluster, program)
            took = [_seconds(cluster.folder, steps) for steps in (program.after, 2 * program.after)]
        finally:
            cluster.close(check=False)
    return _cell(quality, took)


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
    return f"{float(over.read_text()) - float(begun.read_text().split()[0]):.2f} s"
