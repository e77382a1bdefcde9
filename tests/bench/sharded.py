"""A sharded model (FSDP2) that keeps its processes: what a loss costs, and what the copies cost."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from elasticd.worker.sharding.moves import guardians, plan_moves
from elasticd.worker.sharding.spans import CommitPoint, HeldShard, Span, Spans
from tests.bench import launch, report
from tests.bench.floor import floor
from tests.bench.launch import Launched
from tests.bench.recovery import SETTLE_S, SURVIVORS, Kill, kills_in_place, worker_kills
from tests.bench.steps import Steps

JOB = Path(__file__).with_name("job_fsdp.py")
JOB_IN_PLACE = Path(__file__).with_name("job_fsdp_in_place.py")
WIDTH = int(os.environ.get("BENCH_WIDTH", "700"))  # as job.py has it, which opens a file when imported
LAYERS = [(WIDTH, WIDTH), (WIDTH, 1)] * 4
STATE_BYTES = 3 * 4  # of an element: the parameter and two moments of AdamW, in single precision
FLOOR = "floor: abort, next group, move the bytes"
WARM_UP_STEPS = 40
BLOCK = 10  # steps that are timed as one, so that each block has as many commits
EVERY = (1, 10)


class NoFigure(RuntimeError):
    """A row has no time: what was to be measured did not happen."""


def recovery(workers: int, kills: int) -> str:
    """Kill one worker of a sharded model, and return the table of the times to the next step."""
    rows: dict[str, list[Kill]] = {}

    def torchrun(workers: int, steps: Path, log: Path) -> Launched:
        saves = log.with_name("checkpoints")
        saves.mkdir(exist_ok=True)
        return launch.torchrun_alone(
            workers, steps, log, job=(JOB,), env={"PYTHONPATH": launch.ROOT, "BENCH_CHECKPOINTS": str(saves)}
        )

    survivors, full = kills_in_place(workers, kills, spares=0, job=JOB_IN_PLACE)
    rows[SURVIVORS] = survivors
    rows["elasticd in place, full size again"] = full
    rows["torchrun, DCP from disk, full size"] = worker_kills(torchrun, workers, kills, SETTLE_S)
    rows[FLOOR] = [Kill(took) for took in floor(workers, kills, moved_bytes(workers))]
    times = {name: [kill.took for kill in row] for name, row in rows.items()}
    require_figures(times)
    title = f"kill -9 of one of {workers} workers, to the next step (one node, gloo, FSDP2, redundancy=1)"
    return report.table(title, times, FLOOR)


def require_figures(rows: Mapping[str, Sequence[float | None]]) -> None:
    """Raise NoFigure if a row has no time."""
    for name, times in rows.items():
        if not any(took is not None for took in times):
            raise NoFigure(f"there is no time of {name!r}: no step came after the kill")


def moved_bytes(workers: int) -> dict[tuple[int, int], int]:
    """Return the bytes that must go from one survivor to another after the loss of the last rank, by sender
    and receiver."""
    before, after = _laid_out(workers), _laid_out(workers - 1)
    guards = guardians([""] * workers, 1)
    at = CommitPoint(1, 1, 0)
    held = [
        [HeldShard(at, before[owner]) for owner in range(workers) if owner == rank or rank in guards[owner]]
        for rank in range(workers - 1)
    ]
    found: dict[tuple[int, int], int] = {}
    for move in plan_moves(held, at, after):
        if move.sender != move.receiver:
            pair = move.sender, move.receiver
            found[pair] = found.get(pair, 0) + move.span.size * STATE_BYTES
    return found


def _laid_out(workers: int) -> list[Spans]:
    """Return the spans of each rank, as FSDP2 cuts rows."""
    spans: list[list[Span]] = [[] for _ in range(workers)]
    for rows, row in LAYERS:
        each = -(-rows // workers)
        for rank, its in enumerate(spans):
            its.append(Span(min(rank * each, rows) * row, min((rank + 1) * each, rows) * row))
    return [tuple(its) for its in spans]


# ---------------------------------------------------------------- in steady state


def redundancy(workers: int, turns: int, count: int) -> Iterator[str]:
    """Yield the step times with copies and without, beside plain FSDP2. All are measured in each turn, as
    the machine drifts."""

    def plain(workers: int, steps: Path, log: Path) -> Launched:
        return launch.torchrun_alone(workers, steps, log, job=(JOB,), env={"PYTHONPATH": launch.ROOT})

    launchers: dict[str, Callable[[int, Path, Path], Launched]] = {
        f"redundancy={copies}, commit every {every}": partial(_in_place, copies=copies, every=every)
        for copies in (0, 1, 2)
        for every in EVERY
    }
    ratios: dict[str, list[float]] = {name: [] for name in launchers}
    yield f"step time of {workers} workers (one node, gloo, FSDP2; {count} steps a turn)"
    for turn in range(turns):
        base = step_time(plain, workers, count)
        yield f"  turn {turn + 1}: {'plain FSDP2 under torchrun':<32} {base * 1e3:8.2f} ms"
        for name, launcher in launchers.items():
            took = step_time(launcher, workers, count)
            ratios[name].append(took / base)
            yield f"  turn {turn + 1}: {name:<32} {took * 1e3:8.2f} ms {took / base:8.4f}x"
    yield "  medians of the ratios"
    for name, of in ratios.items():
        yield f"  {name:<40} {median(of):8.4f}x"


def _in_place(workers: int, steps: Path, log: Path, *, copies: int, every: int) -> Launched:
    env = {"BENCH_REDUNDANCY": str(copies), "BENCH_EVERY": str(every)}
    return launch.elasticd_in_place(workers, steps, log, spares=0, job=JOB_IN_PLACE, env=env)


def step_time(
    launcher: Callable[[int, Path, Path], Launched], workers: int, count: int, within_s: float = 300.0
) -> float:
    """Return the seconds of a step of rank 0: the median of blocks, each with as many commits. Raises
    NoFigure."""
    last = WARM_UP_STEPS + count
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(Path(folder, "steps"))
        launched = launcher(workers, steps.path, Path(folder, "log"))
        try:
            reached = steps.first(lambda s: s.rank == 0 and s.world == workers and s.step >= last, within_s)
            if reached is None:
                raise NoFigure(f"step {last} was not made: {Path(folder, 'log').read_text()[-2000:]}")
            times = [s.at for s in steps.made if s.rank == 0 and WARM_UP_STEPS <= s.step <= last]
        finally:
            launched.stop()
            steps.close()
    return median((b - a) / BLOCK for a, b in itertools.pairwise(times[::BLOCK]))
