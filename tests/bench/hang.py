"""From SIGSTOP of a worker to its death, which says that it was noticed, and on to the next step."""

from __future__ import annotations

import os
import select
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench import launch, report
from tests.bench.launch import Launched
from tests.bench.recovery import START_TIMEOUT_S, WARM_UP_STEPS
from tests.bench.steps import Steps


def stops(
    launcher: Callable[[int, Path, Path], Launched], workers: int, times: int, bound_s: float
) -> tuple[list[float | None], list[float | None]]:
    """Seconds from each SIGSTOP to the end of the stopped process, and to the first step of the new
    world; None where that was not within the bound, which ends the series."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(Path(folder, "steps"))
        launched = launcher(workers, steps.path, Path(folder, "log"))
        noticed: list[float | None] = []
        stepped: list[float | None] = []
        since = 0
        try:
            for n in range(times):
                if steps.first(lambda s: s.step >= WARM_UP_STEPS, START_TIMEOUT_S, since) is None:
                    raise RuntimeError(f"the job does not train: {Path(folder, 'log').read_text()[-2000:]}")
                since = len(steps.made)
                pids = {s.rank: s.pid for s in steps.made[-4 * workers :]}
                old = set(pids.values())
                stopped = pids[n % workers]
                pidfd = os.pidfd_open(stopped)
                stopped_at = time.monotonic()
                os.kill(stopped, signal.SIGSTOP)
                ended = bool(select.select([pidfd], [], [], bound_s)[0])
                noticed.append(time.monotonic() - stopped_at if ended else None)
                os.close(pidfd)
                left_s = max(1.0, bound_s - (time.monotonic() - stopped_at))
                made = steps.first(lambda s, old=old: s.pid not in old, left_s, since) if ended else None  # type: ignore[misc]
                stepped.append(made.at - stopped_at if made else None)
                if made is None:
                    os.kill(stopped, signal.SIGCONT)
                    break
                since = len(steps.made)
            return noticed, stepped
        finally:
            launched.stop()
            steps.close()


def hangs(workers: int, times: int, bound_s: float) -> str:
    """One node; what nobody set: all limits are the defaults of either."""
    noticed, stepped = stops(launch.elasticd_alone, workers, times, bound_s)
    theirs_noticed, theirs = stops(launch.torchrun_alone, workers, 1, bound_s)
    title = (
        f"SIGSTOP of one of {workers} workers (one node, gloo, DDP; torchrun given up after {bound_s:g} s)"
    )
    rows = {
        "elasticd, noticed and killed": noticed,
        "elasticd, to the next step at full size": stepped,
        "torchrun, noticed and killed": theirs_noticed,
        "torchrun, to the next step at full size": theirs,
    }
    return report.table(title, rows, "elasticd, to the next step at full size")
