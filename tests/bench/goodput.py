"""Useful steps while a worker is killed every so often, of those that are made undisturbed."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.bench import launch
from tests.bench.launch import Launched
from tests.bench.recovery import START_TIMEOUT_S, WARM_UP_STEPS
from tests.bench.steps import Steps

Launcher = Callable[[Path, Path], Launched]


@dataclass(frozen=True, slots=True)
class Kept:
    """Steps made in windows of a run: undisturbed ones, and as many in which a worker was killed."""

    calm: list[int]
    under_fire: list[int]

    def __str__(self) -> str:
        shares = [fire / calm for fire, calm in zip(self.under_fire, self.calm, strict=True)]
        steps = (
            f"{sum(self.under_fire)} of {sum(self.calm)} steps, pairs {min(shares):.1%} to {max(shares):.1%}"
        )
        return f"{median(shares):7.1%}  ({steps})"


def _kept(launcher: Launcher, workers: int, pairs: int, every_s: float) -> Kept:
    """Each window of ``every_s`` seconds that begins with a kill has an undisturbed one of that run beside
    it, before it and after it in turns: machines change their speed by more than a kill costs. The job
    saves nothing, so that what is lost is the time without steps alone."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(Path(folder, "steps"))
        launched = launcher(steps.path, Path(folder, "log"))
        try:
            if steps.first(lambda s: s.step >= WARM_UP_STEPS, START_TIMEOUT_S) is None:
                raise RuntimeError(f"the job did not start: {Path(folder, 'log').read_text()[-2000:]}")
            kept = Kept([], [])
            began, kills = time.monotonic(), 0
            for window in range(2 * pairs):
                fire = window % 4 in (1, 2)
                if fire:
                    steps.read()
                    newest = {s.rank: s.pid for s in steps.made[-4 * workers :]}
                    os.kill(newest[kills % len(newest)], signal.SIGKILL)
                    kills += 1
                ends = began + every_s
                time.sleep(max(0.0, ends - time.monotonic()))
                steps.read()
                # Of rank 0, which there is one of in every world.
                made = sum(s.rank == 0 and began <= s.at < ends for s in steps.made)
                (kept.under_fire if fire else kept.calm).append(made)
                began = ends
            return kept
        finally:
            launched.stop()
            steps.close()


def goodput(workers: int, lasts_s: float, every_s: float, torchrun: bool) -> str:
    """Each launcher in turn, for ``lasts_s`` seconds under fire and as long undisturbed."""
    rows: dict[str, Launcher] = {
        "elasticd in place, with a spare": lambda s, log: launch.elasticd_in_place(workers, 1, s, log),
        "elasticd in place": lambda s, log: launch.elasticd_in_place(workers, 0, s, log),
        "elasticd, script as it is": lambda s, log: launch.elasticd_alone(workers, s, log),
    }
    if torchrun:
        rows["torchrun"] = lambda s, log: launch.torchrun_alone(workers, s, log)
    pairs = max(1, round(lasts_s / every_s))
    lines = [
        f"a worker of {workers} killed every {every_s:g} s, {pairs} times: steps of an undisturbed run's"
    ]
    for name, launcher in rows.items():
        lines.append(f"  {name:<34} {_kept(launcher, workers, pairs, every_s)}")
    return "\n".join(lines)
