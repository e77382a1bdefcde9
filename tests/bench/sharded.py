"""A sharded model (FSDP2) that keeps its processes: what a loss costs, and what the copies cost."""

from __future__ import annotations

import copy
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist

from elasticd.worker.sharding.held import CommitPoint, HeldShard
from elasticd.worker.sharding.moves import MovePlan, guardians
from elasticd.worker.sharding.parts import Cut, Shapes, parts_of_ranks
from elasticd.worker.world.round_mesh import RoundMesh
from tests.bench import launch, parts, report
from tests.bench.floor import floor
from tests.bench.launch import Launched
from tests.bench.recovery import SETTLE_S, SURVIVORS, Kill, kills_in_place, worker_kills
from tests.bench.steps import Steps

JOB = Path(__file__).with_name("job_fsdp.py")
JOB_IN_PLACE = Path(__file__).with_name("job_fsdp_in_place.py")
WIDTH = int(os.environ.get("BENCH_WIDTH", "700"))  # as in job.py, which opens a file when it is imported
LAYERS = [(WIDTH, WIDTH), (WIDTH, 1)] * 4
SHAPES = Shapes(*zip(*LAYERS, strict=True))
STATE_BYTES = 3 * 4  # bytes of an element: the parameter and two moments of AdamW, in single precision
FLOOR = "floor: abort, next group, move the bytes"
FLOOR_WITH_STEP = "floor: the same, lay the model out, a step"
WARM_UP_STEPS = 40
BLOCK = 10  # steps that are timed together, so that each block has as many commits
EVERY = (1, 10)


class NoFigure(RuntimeError):
    """A row has no time, since the event to be measured did not happen."""


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
    moved = moved_bytes(workers)
    rows[FLOOR_WITH_STEP] = [Kill(took) for took in floor(workers, kills, moved, plain_steps)]
    rows[FLOOR] = [Kill(took) for took in floor(workers, kills, moved)]
    times = {name: [kill.took for kill in row] for name, row in rows.items()}
    require_figures(times)
    title = f"kill -9 of one of {workers} workers, to the next step (one node, gloo, FSDP2, redundancy=1)"
    spent = [parts.line(name, [kill.parts for kill in row]) for name, row in rows.items() if row[0].parts]
    table = report.table(title, times, FLOOR)
    return "\n".join([table, "what it was spent on (medians, ms)", *spent])


def plain_steps() -> Callable[[], None]:
    """Return a function that lays the model of the job out for the present world, and makes a step."""
    os.environ.setdefault("BENCH_STEPS", os.devnull)  # job_fsdp opens the file when it is imported
    torch.set_num_threads(1)
    from tests.bench.job_fsdp import BATCH, build, shard

    model, batch = build().to("meta"), torch.randn(BATCH, WIDTH)

    def step() -> None:
        mine, mesh, size = copy.deepcopy(model), RoundMesh(), dist.get_world_size()
        shard(mine, mesh.make(size, (size,), ("all",)))
        mine.to_empty(device="cpu")
        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-4)
        mine(batch).square().mean().backward()
        optimizer.step()
        mesh.forget()

    return step


def require_figures(rows: Mapping[str, Sequence[float | None]]) -> None:
    """Raise NoFigure if a row has no time."""
    for name, times in rows.items():
        if not any(took is not None for took in times):
            raise NoFigure(f"there is no time of {name!r}: no step came after the kill")


def moved_bytes(workers: int) -> dict[tuple[int, int], int]:
    """Return the bytes that must go from one survivor to another after the loss of the last rank, by sender
    and receiver."""
    before, after = (parts_of_ranks(Cut(ranks), ranks) for ranks in (workers, workers - 1))
    guards = guardians([""] * workers, 1)
    at = CommitPoint(1, 1, 0)
    held = [
        [HeldShard(at, before[owner]) for owner in range(workers) if owner == rank or rank in guards[owner]]
        for rank in range(workers - 1)
    ]
    plan = MovePlan(SHAPES, held, at, after)
    found: dict[tuple[int, int], int] = {}
    for rank in range(workers - 1):
        for move in plan.of_rank(rank):
            if move.sender != move.receiver == rank:
                pair = move.sender, move.receiver
                found[pair] = found.get(pair, 0) + move.span.size * STATE_BYTES
    return found


# ---------------------------------------------------------------- in steady state


class Way(NamedTuple):
    """How copies are made: ``copies`` of each shard, at every commit or only ``every`` so many steps.
    ``overlap``: they are sent while the next steps run."""

    copies: int
    every: int
    overlap: bool = False

    @property
    def name(self) -> str:
        return f"redundancy={self.copies}, commit every {self.every}" + ", overlap" * self.overlap


class StepCost(NamedTuple):
    """The cost of a step in seconds: the time on rank 0, and the CPU time of all workers."""

    step_s: float
    cpu_s: float


def redundancy(workers: int, turns: int, count: int, numbers: Sequence[int], rows: int) -> Iterator[str]:
    """Yield what a step costs with these numbers of copies, beside plain FSDP2. ``rows``: of the batch of a
    worker.

    The machine's speed changes. So plain FSDP2 is measured before and after every two ways, and these are
    compared with the mean of its two times. Every second turn is in the opposite order.
    """
    ways = [Way(copies, every) for copies in numbers for every in EVERY]
    ways += [Way(copies, 1, overlap=True) for copies in numbers if copies]
    ratios: dict[Way, list[StepCost]] = {way: [] for way in ways}
    batch = {"BENCH_BATCH": str(rows)}
    plainly, in_place = partial(_plain, batch=batch), partial(_in_place, batch=batch)
    where = "one node, gloo, FSDP2"
    yield f"a step of {workers} workers with {rows} rows each ({where}; {count} steps each time)"
    for turn in range(turns):
        order = ways if turn % 2 == 0 else ways[::-1]
        before = cost(plainly, workers, count)
        for pair in _pairs(order):
            costs = [cost(partial(in_place, way=way), workers, count) for way in pair]
            after = cost(plainly, workers, count)
            plain = StepCost(*(fmean(of) for of in zip(before, after, strict=True)))
            yield f"  turn {turn + 1}: {_said(plain, 'plain FSDP2 under torchrun')}"
            for way, took in zip(pair, costs, strict=True):
                ratio = StepCost(took.step_s / plain.step_s, took.cpu_s / plain.cpu_s)
                ratios[way].append(ratio)
                compared = f"{ratio.step_s:7.3f}x {ratio.cpu_s:7.3f}x"
                yield f"  turn {turn + 1}: {_said(took, way.name)} {compared}"
            before = after
    yield "  medians of the ratios (with the least and the most), and what a commit copies and sends"
    for way, of in ratios.items():
        times, cpus = ([*each] for each in zip(*of, strict=True))
        sent = sent_bytes(workers, way.copies) / 1e6
        yield (
            f"  {way.name:<39} time {_spread(times)}, CPU {_spread(cpus)}; "
            f"{copied_bytes() / 1e6:.1f} MB copied, {sent:.1f} MB sent"
        )


def _said(of: StepCost, name: str) -> str:
    return f"{name:<39} {of.step_s * 1e3:8.2f} ms {of.cpu_s * 1e3:8.2f} ms of CPU"


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.3f}x ({min(ratios):.3f} to {max(ratios):.3f})"


def copied_bytes() -> int:
    """Return the bytes that all workers together copy at a commit."""
    return sum(rows * row for rows, row in LAYERS) * STATE_BYTES


def sent_bytes(workers: int, copies: int) -> int:
    """Return the bytes that all workers together send at a commit."""
    ranks, guards = parts_of_ranks(Cut(workers), workers), guardians([""] * workers, copies)
    sizes = [sum(span.size for span in SHAPES.spans(its)) * STATE_BYTES for its in ranks]
    return sum(size * len(its) for size, its in zip(sizes, guards, strict=True))


def _pairs(ways: Sequence[Way]) -> list[Sequence[Way]]:
    """Return the ways in pairs; the last may be alone."""
    return [ways[first : first + 2] for first in range(0, len(ways), 2)]


def _plain(workers: int, steps: Path, log: Path, *, batch: Mapping[str, str]) -> Launched:
    env = {"PYTHONPATH": launch.ROOT, **batch}
    return launch.torchrun_alone(workers, steps, log, job=(JOB,), env=env)


def _in_place(workers: int, steps: Path, log: Path, *, way: Way, batch: Mapping[str, str]) -> Launched:
    env = {"BENCH_REDUNDANCY": str(way.copies), "BENCH_EVERY": str(way.every), **batch}
    env["BENCH_OVERLAP"] = str(int(way.overlap))
    return launch.elasticd_in_place(workers, steps, log, spares=0, job=JOB_IN_PLACE, env=env)


def cost(
    launcher: Callable[[int, Path, Path], Launched], workers: int, count: int, within_s: float = 300.0
) -> StepCost:
    """Return what a step costs. The time is the median of blocks, each with as many commits. Raises
    NoFigure."""
    last = WARM_UP_STEPS + count
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(Path(folder, "steps"))
        launched = launcher(workers, steps.path, Path(folder, "log"))

        def reach(step: int) -> tuple[int, float]:
            """Wait for the step. Return the last step, and the processor time of the workers so far."""
            there = steps.first(lambda s: s.rank == 0 and s.world == workers and s.step >= step, within_s)
            if there is None:
                raise NoFigure(f"step {last} was not made: {Path(folder, 'log').read_text()[-2000:]}")
            pids = {made.pid for made in steps.made if made.world == workers}
            spent = [psutil.Process(pid).cpu_times() for pid in pids]
            return max(s.step for s in steps.made), sum(times.user + times.system for times in spent)

        try:
            (begun, at_first), (ended, at_last) = reach(WARM_UP_STEPS), reach(last)
            times = [s.at for s in steps.made if s.rank == 0 and WARM_UP_STEPS <= s.step <= last]
        finally:
            launched.stop()
            steps.close()
    block_s = median((b - a) / BLOCK for a, b in itertools.pairwise(times[::BLOCK]))
    return StepCost(block_s, (at_last - at_first) / (ended - begun))
