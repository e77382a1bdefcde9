"""The steps made while a worker is killed now and then, as a share of the steps made without kills."""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, stdev

from tests.bench import launch
from tests.bench.launch import Launched
from tests.bench.recovery import START_TIMEOUT_S, WARM_UP_STEPS
from tests.bench.steps import Steps

Launcher = Callable[[Path, Path], Launched]


@dataclass(frozen=True, slots=True)
class Kept:
    """The steps made in each window of a run. In every second window a worker is killed, and the whole cost
    of the kill falls into this window."""

    calm: list[int]
    under_fire: list[int]

    @property
    def shares(self) -> list[float]:
        """Return for each kill the steps of its window and the next, as a share of two windows without a
        kill."""
        usual = [(before + after) / 2 for before, after in pairwise(self.calm)]
        return [(fire / steps + 1) / 2 for fire, steps in zip(self.under_fire, usual, strict=True)]

    def __str__(self) -> str:
        shares = self.shares
        kills, least, most = len(shares), min(shares), max(shares)
        error = stdev(shares) / math.sqrt(kills) if kills > 1 else math.nan
        return (
            f"{median(shares):7.1%}  (mean {mean(shares):.1%}, standard error {error:.1%}; "
            f"{kills} kills, {least:.1%} to {most:.1%})"
        )


class StillDown(Exception):
    """The job has not recovered from a kill when the next one is due."""


def _kept(launcher: Launcher, workers: int, kills: int, every_s: float) -> Kept:
    """Compare each kill with the undisturbed windows just before and after it, since the machine's speed
    changes by more than a kill costs. The job saves nothing, so only the time without steps is lost.

    Raises StillDown if the worker to be killed is gone since an earlier kill."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(Path(folder, "steps"))
        launched = launcher(steps.path, Path(folder, "log"))
        try:
            if steps.first(lambda s: s.step >= WARM_UP_STEPS, START_TIMEOUT_S) is None:
                raise RuntimeError(f"the job did not start: {Path(folder, 'log').read_text()[-2000:]}")
            kept = Kept([], [])
            began = time.monotonic()
            for window in range(2 * kills + 1):
                if fire := window % 2 == 1:
                    steps.read()
                    newest = {s.rank: s.pid for s in steps.made[-4 * workers :]}
                    try:
                        os.kill(newest[window // 2 % len(newest)], signal.SIGKILL)
                    except ProcessLookupError:
                        raise StillDown from None
                ends = began + every_s / 2
                time.sleep(max(0.0, ends - time.monotonic()))
                steps.read()
                # Steps of rank 0, which every world has.
                made = sum(s.rank == 0 and began <= s.at < ends for s in steps.made)
                (kept.under_fire if fire else kept.calm).append(made)
                began = ends
            return kept
        finally:
            launched.stop()
            steps.close()


def goodput(
    workers: int, lasts_s: float, every_s: float, torchrun: bool, only: Sequence[str] = ()
) -> Iterator[str]:
    """Yield a line for each launcher, which trains for ``lasts_s`` seconds. ``only``: those whose names begin
    so."""
    rows: dict[str, Launcher] = {
        "elasticd with a spare": lambda s, log: launch.elasticd_in_place(workers, s, log, spares=1),
        "elasticd in place": lambda s, log: launch.elasticd_in_place(workers, s, log, spares=0),
        "elasticd, script as it is": lambda s, log: launch.elasticd_alone(workers, s, log),
    }
    if torchrun:
        rows["torchrun"] = lambda s, log: launch.torchrun_alone(workers, s, log)
    kills = max(1, round(lasts_s / every_s))
    yield f"a worker of {workers} killed every {every_s:g} s: steps made, of an undisturbed run's"
    for name, launcher in rows.items():
        if only and not name.startswith(tuple(only)):
            continue
        try:
            share = str(_kept(launcher, workers, kills, every_s))
        except StillDown:
            share = f"is not back {every_s:g} s after a kill: measure with more seconds in --every"
        yield f"  {name:<34} {share}"
