"""What becomes of each program of ``workers/`` when it meets each fault."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.e2e.conftest import Etcd
from tests.e2e.harness import Cluster
from tests.workers.programs import FAULTS, PROGRAMS, Program, applies


def techniques(names: Sequence[str], faults: Sequence[str]) -> Iterator[str]:
    """Yield the rows of a table in Markdown, each as soon as it is known. A cell has the quality on held-out
    data, and the time from the fault to the next step of a later world. Raises AssertionError for a program
    that misses its quality."""
    faults = faults or [*FAULTS]
    yield f"| program | {' | '.join(faults)} |"
    yield "|---" * (1 + len(faults)) + "|"
    etcd = Etcd()
    try:
        for program in PROGRAMS:
            if not names or program.name in names:
                cells = (_met(etcd.url, program, fault) for fault in faults)
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
    found = quality.partition("held-out")[2].strip(" :").replace("balanced accuracy ", "")
    return ", ".join([found.partition(", loss")[0], *filter(None, took)])


def _seconds(folder: Path, steps: int) -> str:
    """Return the time from the fault after so many steps to the next step of a later world, if both came."""
    begun, over = folder / str(steps), folder / f"{steps}-over"
    if not (begun.exists() and over.exists()):
        return ""
    return f"{float(over.read_text()) - float(begun.read_text().split()[0]):.2f} s"
