"""How long a job makes no step when a worker joins and when one leaves: in place, and with torchrun."""

from __future__ import annotations

import signal
import tempfile
import uuid
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

from tests.bench import launch, report
from tests.bench.launch import Launched
from tests.bench.recovery import START_TIMEOUT_S, WARM_UP_STEPS
from tests.bench.steps import StepMade, Steps
from tests.etcd.cluster import EtcdOnPorts

BOUND_S = 120.0
GREW, SHRANK = "a worker more", "a worker less"
LATER_STEPS = 40  # steps of the new world to skip, until the zygote and others have ended their work


def changes(
    launcher: Callable[[Path, Path], Launched], before: int, tries: int
) -> dict[str, list[float | None]]:
    """Return the seconds without a step, beyond the usual time of a step, when a node with one worker
    joins and when it is asked to leave. ``before``: the world size without this node."""
    took: dict[str, list[float | None]] = {GREW: [], SHRANK: []}
    with tempfile.TemporaryDirectory() as folder:
        steps, log = Steps(Path(folder, "steps")), Path(folder, "log")
        launched = launcher(steps.path, log)
        try:
            launched.start(0)
            if not _well_under_way(steps, before, START_TIMEOUT_S):
                raise RuntimeError(f"the job did not start: {log.read_text()[-2000:]}")
            for _ in range(tries):
                since = len(steps.made)
                other = launched.start(1)
                grew = _well_under_way(steps, before + 1, BOUND_S)
                took[GREW].append(_lost(steps.made[since - 4 * before :]) if grew else None)
                since = len(steps.made)
                other.send_signal(signal.SIGTERM)
                shrank = _well_under_way(steps, before, BOUND_S)
                took[SHRANK].append(_lost(steps.made[since - 4 * before :]) if shrank else None)
                other.wait()
                if not (grew and shrank):
                    break
            return took
        finally:
            launched.stop()
            steps.close()


def _well_under_way(steps: Steps, world: int, timeout_s: float) -> bool:
    since = len(steps.made)
    first = steps.first(lambda s: s.world == world, timeout_s, since)
    if first is None:
        return False
    later = max(WARM_UP_STEPS, first.step + LATER_STEPS)
    return steps.first(lambda s: s.world == world and s.step >= later, timeout_s, since) is not None


def _lost(made: list[StepMade]) -> float:
    """Return the longest time between two steps, less the usual time of a step."""
    gaps = [b.at - a.at for a, b in pairwise(sorted((s for s in made if s.rank == 0), key=lambda s: s.at))]
    return max(gaps) - median(gaps)


def resize(workers: int, tries: int) -> str:
    """Let a job on two nodes grow by one worker, up to ``workers``, and shrink again."""
    server = EtcdOnPorts()
    etcd = f"http://{server.start().endpoints[0]}"
    slots = (workers - 1, 1)

    def ours(steps: Path, log: Path) -> Launched:
        return launch.elasticd_grown(slots, etcd, f"resize-{uuid.uuid4().hex[:6]}", steps, log)

    def theirs(steps: Path, log: Path) -> Launched:
        return launch.torchrun_grown(slots, steps, log)

    try:
        mine, other = changes(ours, workers - 1, tries), changes(theirs, workers - 1, tries)
    finally:
        server.stop()
    rows = {f"elasticd in place, {what}": took for what, took in mine.items()}
    rows |= {f"torchrun (last call 1 s), {what}": took for what, took in other.items()}
    title = f"{workers - 1} workers and one that comes and goes on another node, time without a step"
    return report.table(title, rows, f"elasticd in place, {GREW}")
