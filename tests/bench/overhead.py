"""Steady state: step time under elasticd against the same processes started by hand."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from tests.bench import launch
from tests.bench.launch import Launched
from tests.bench.steps import Steps

WARM_UP_STEPS = 200


def step_times(launcher: Callable[[int, Path, Path], Launched], workers: int, count: int) -> list[float]:
    """Seconds per step of rank 0, once imports, the first steps and the zygote are behind it."""
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
    """A B A B, and the median of the ratios of each pair, since the machine drifts."""

    def hand(workers: int, steps: Path, log: Path) -> Launched:
        return launch.by_hand(workers, steps, log, {})

    lines, ratios, peer_ratios = [], [], []
    for n in range(pairs):
        floor = median(step_times(hand, workers, count))
        ours = median(step_times(launch.elasticd_alone, workers, count))
        theirs = median(step_times(launch.torchrun_alone, workers, count))
        ratios.append(ours / floor)
        peer_ratios.append(theirs / floor)
        lines.append(
            f"  pair {n + 1}: by hand {floor * 1e3:.2f} ms, elasticd {ours * 1e3:.2f} ms "
            f"({ratios[-1]:.4f}x), torchrun {theirs * 1e3:.2f} ms ({peer_ratios[-1]:.4f}x)"
        )
    return "\n".join(
        [
            f"step time of {workers} workers in steady state (medians of {count} steps)",
            *lines,
            f"  median of the ratios: elasticd {median(ratios):.4f}x, torchrun {median(peer_ratios):.4f}x",
        ]
    )
