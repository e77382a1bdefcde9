"""Useful steps with a worker killed every so often, of those that an undisturbed run makes."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench import launch
from tests.bench.launch import Launched
from tests.bench.recovery import START_TIMEOUT_S, WARM_UP_STEPS
from tests.bench.steps import Steps

Launcher = Callable[[Path, Path], Launched]


def _kept(launcher: Launcher, workers: int, lasts_s: float, every_s: float | None) -> int:
    """Steps that were made and never made again, within so many seconds; the job saves nothing, so
    that what is counted as lost is the time without steps alone."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(Path(folder, "steps"))
        launched = launcher(steps.path, Path(folder, "log"))
        try:
            if steps.first(lambda s: s.step >= WARM_UP_STEPS, START_TIMEOUT_S) is None:
                raise RuntimeError(f"the job did not start: {Path(folder, 'log').read_text()[-2000:]}")
            began, kills = time.monotonic(), 0
            while (left_s := began + lasts_s - time.monotonic()) > 0:
                time.sleep(min(left_s, every_s or left_s))
                steps.read()
                if every_s and time.monotonic() < began + lasts_s:
                    newest = {s.rank: s.pid for s in steps.made[-4 * workers :]}
                    os.kill(newest[kills % len(newest)], signal.SIGKILL)
                    kills += 1
            steps.read()
            # Of rank 0, which there is one of in every world.
            return sum(s.rank == 0 and began <= s.at < began + lasts_s for s in steps.made)
        finally:
            launched.stop()
            steps.close()


def goodput(workers: int, lasts_s: float, every_s: float, torchrun: bool) -> str:
    """Each launcher undisturbed and under kills, one after the other."""
    rows: dict[str, Launcher] = {
        "elasticd in place, with a spare": lambda s, log: launch.elasticd_in_place(workers, 1, s, log),
        "elasticd in place": lambda s, log: launch.elasticd_in_place(workers, 0, s, log),
        "elasticd, script as it is": lambda s, log: launch.elasticd_alone(workers, s, log),
    }
    if torchrun:
        rows["torchrun"] = lambda s, log: launch.torchrun_alone(workers, s, log)
    lines = [
        f"a worker of {workers} killed every {every_s:g} s for {lasts_s:g} s: steps of an undisturbed run's"
    ]
    for name, launcher in rows.items():
        calm = _kept(launcher, workers, lasts_s, None)
        under_fire = _kept(launcher, workers, lasts_s, every_s)
        lines.append(f"  {name:<34} {under_fire / calm:7.1%}  ({under_fire} of {calm})")
    return "\n".join(lines)
