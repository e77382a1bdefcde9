"""The time from SIGSTOP of a worker to its death, when the hang was noticed, and to the next step."""

from __future__ import annotations

import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.bench import launch, report
from tests.bench.launch import Launched
from tests.bench.recovery import SETTLE_S, START_TIMEOUT_S, WARM_UP_STEPS
from tests.bench.steps import StepMade, Steps

IN_PLACE = "elasticd in place"


@dataclass(frozen=True, slots=True)
class Stop:
    """Seconds from a SIGSTOP to three events: the end of the stopped process; the next step of any later
    world; the first step of a world of the old size, with the replacement. None if the limit passed first."""

    noticed: float | None = None
    again: float | None = None
    full: float | None = None


def stops(
    launcher: Callable[[int, Path, Path], Launched],
    workers: int,
    times: int,
    bound_s: float,
    settle_s: float = 0.0,
) -> list[Stop]:
    """Stop one worker after the other, each of another rank. The series ends if a stop is not handled
    within the limit. ``settle_s``: how long each world trains first, at least."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(Path(folder, "steps"))
        launched = launcher(workers, steps.path, Path(folder, "log"))
        came: list[Stop] = []
        since = begins = 0
        try:
            for n in range(times):
                if not _warm(steps, workers, begins + WARM_UP_STEPS, since):
                    raise RuntimeError(f"the job does not train: {Path(folder, 'log').read_text()[-2000:]}")
                time.sleep(settle_s)
                steps.read()
                since = len(steps.made)
                pids = {s.rank: s.pid for s in steps.made[-4 * workers :] if s.world == workers}
                stop, full = _stop(steps, pids, pids[n % workers], workers, bound_s)
                came.append(stop)
                if full is None:
                    break
                since, begins = len(steps.made), full.step
            return came
        finally:
            launched.stop()
            steps.close()


def _warm(steps: Steps, workers: int, step: int, since: int) -> bool:
    """Wait until a world of that size has made some steps. Return the step."""
    return steps.first(lambda s: s.world == workers and s.step >= step, START_TIMEOUT_S, since) is not None


def _stop(
    steps: Steps, pids: Mapping[int, int], pid: int, workers: int, bound_s: float
) -> tuple[Stop, StepMade | None]:
    """Stop this process, and return what followed and the first step at full size."""
    since, old = len(steps.made), set(pids.values())
    pidfd = os.pidfd_open(pid)
    try:
        stopped_at = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        if not select.select([pidfd], [], [], bound_s)[0]:
            os.kill(pid, signal.SIGCONT)
            return Stop(), None
        noticed = time.monotonic() - stopped_at
    finally:
        os.close(pidfd)
    left_s = max(1.0, bound_s - noticed)
    full = steps.first(lambda s: s.world == workers and s.pid not in old, left_s, since)
    again = next((s for s in steps.made[since:] if s.world != workers or s.pid not in old), None)
    after = [made.at - stopped_at if made is not None else None for made in (again, full)]
    return Stop(noticed, *after), full


def hangs(workers: int, times: int, bound_s: float) -> str:
    """Measure on one node, with the default limits of elasticd and of torchrun."""
    title = (
        f"SIGSTOP of one of {workers} workers (one node, gloo, DDP; torchrun given up after {bound_s:g} s)"
    )
    rows = {}
    for name, launcher, of_each, settle_s in (
        ("elasticd", launch.elasticd_alone, times, 0.0),
        (IN_PLACE, partial(launch.elasticd_in_place, spares=0), times, SETTLE_S),
        ("torchrun", launch.torchrun_alone, 1, 0.0),
    ):
        came = stops(launcher, workers, of_each, bound_s, settle_s)
        rows[f"{name}, noticed and killed"] = [stop.noticed for stop in came]
        if name == IN_PLACE:
            rows[f"{name}, survivors go on"] = [stop.again for stop in came]
        rows[f"{name}, to the next step at full size"] = [stop.full for stop in came]
    return report.table(title, rows, "elasticd, to the next step at full size")
