"""The time of a step under elasticd, compared with that of the same processes started by hand."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from tests.bench import launch
from tests.bench.launch import Launched
from tests.bench.steps import Steps

WARM_UP_STEPS = 200


def step_times(launcher: Callable[[int, Path, Path], Launched], workers: int, count: int) -> list[float]:
    """Return the seconds of each step of rank 0, without the first steps."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(Path(folder, "steps"))
        launched = launcher(workers, steps.path, Path(folder, "log"))
        try:
            if steps.first(lambda s: s.rank == 0 and s.step >= count + WARM_UP_STEPS, 300.0) is None:
                raise RuntimeError(f"too few steps: {Path(folder, 'log').read_text()[-2000:]}")
            times = [s.at for s in steps.made if s.rank == 0 and s.step >= WARM_UP_STEPS][: count + 1]
            return [b - a for a, b in itertools.pairwise(times)]
        finally:
            launched.stop()
            steps.close()


def overhead(workers: int, pairs: int, count: int) -> str:
    """Run by hand and with each launcher in turns, since the machine's speed changes. Return the median of
    the ratios."""

    def hand(workers: int, steps: Path, log: Path) -> Launched:
        return launch.by_hand(workers, steps, log, {})

    launchers = {
        "elasticd": launch.elasticd_alone,
        "elasticd in place": partial(launch.elasticd_in_place, spares=0),
        "torchrun": launch.torchrun_alone,
    }
    lines = [f"step time of {workers} workers in steady state (medians of {count} steps)"]
    ratios: dict[str, list[float]] = {name: [] for name in launchers}
    for n in range(pairs):
        floor = median(step_times(hand, workers, count))
        said = [f"by hand {floor * 1e3:.2f} ms"]
        for name, launcher in launchers.items():
            took = median(step_times(launcher, workers, count))
            ratios[name].append(took / floor)
            said.append(f"{name} {took * 1e3:.2f} ms ({took / floor:.4f}x)")
        lines.append(f"  turn {n + 1}: {', '.join(said)}")
    middle = ", ".join(f"{name} {median(of):.4f}x" for name, of in ratios.items())
    return "\n".join([*lines, f"  median of the ratios: {middle}"])
