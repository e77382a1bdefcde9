"""From the kill of a worker, or the loss of a node, to the next step."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from tests.bench import launch, parts, report
from tests.bench.floor import floor
from tests.bench.launch import Launched
from tests.bench.steps import StepMade, Steps
from tests.etcd.cluster import EtcdOnPorts

START_TIMEOUT_S = 300.0  # on two cores 32 workers import torch one after the other
NEXT_STEP_S_MAX = 180.0
WARM_UP_STEPS = 20
SURVIVORS = "elasticd in place, survivors go on"
SPARE = "elasticd in place with a spare, full size"
BESIDE_MB = 300  # what a worker may need beside its megabytes
SETTLE_S = 8.0  # the time between kills in place: the spare is replaced, and the zygote is ready


@dataclass(frozen=True, slots=True)
class Kill:
    """Seconds from a ``kill -9`` of one worker to a step; None if no step followed. ``parts``: the same
    seconds by what happened, as far as that is known."""

    took: float | None
    parts: Mapping[str, float] = field(default_factory=dict)


def worker_kills(
    launcher: Callable[[int, Path, Path], Launched], workers: int, kills: int, settle_s: float = 0.0
) -> list[Kill]:
    """Measure each kill until the first step of the new world. ``settle_s``: the least time between two
    kills."""
    took: list[Kill] = []
    with _job(lambda steps, log: launcher(workers, steps, log)) as (steps, log):
        for old, killed_at, before in _kill_each(steps, workers, kills, settle_s):
            step = steps.first(lambda s, old=old: s.pid not in old, NEXT_STEP_S_MAX, before)  # type: ignore[misc]
            if step is None or not _warm(steps, len(steps.made)):
                took.append(Kill(None))
                break
            new = {s.pid for s in steps.made[before:]} - old
            said = [
                *parts.decided(parts.events(log), killed_at, wall_s()),
                *parts.begun(steps.marks, new),
            ]
            took.append(Kill(step.at - killed_at, parts.lengths(killed_at, said, step)))
    return took


def kills_in_place(
    workers: int, kills: int, spares: int, job: Path = launch.JOB_IN_PLACE
) -> tuple[list[Kill], list[Kill]]:
    """Measure each kill of a job on one node, as ``kills_with_survivors`` does."""

    def launcher(workers: int, steps: Path, log: Path) -> Launched:
        return launch.elasticd_in_place(workers, steps, log, spares=spares, job=job)

    return kills_with_survivors(launcher, workers, kills, spares)


def kills_with_survivors(
    launcher: Callable[[int, Path, Path], Launched], workers: int, kills: int, spares: int
) -> tuple[list[Kill], list[Kill]]:
    """Measure each kill until the first step of the survivors, and until that of a world of the old size.
    With a spare these are the same step."""
    survivors: list[Kill] = []
    full: list[Kill] = []
    with _job(lambda steps, log: launcher(workers, steps, log)) as (steps, log):
        for old, killed_at, before in _kill_each(steps, workers, kills, SETTLE_S):
            again = steps.first(
                lambda s, old=old: s.world == workers and s.pid not in old,  # type: ignore[misc]
                NEXT_STEP_S_MAX,
                before,
            )
            if again is None:
                full.append(Kill(None))
                break
            _warm(steps, len(steps.made))
            said = parts.grown(parts.events(log), steps.marks, killed_at, wall_s()) if not spares else []
            full.append(Kill(again.at - killed_at, parts.lengths(killed_at, said, again) if said else {}))
            step = next(s for s in steps.made[before:] if s.world < workers or s.pid not in old)
            survivors.append(Kill(step.at - killed_at, _in_place(log, killed_at, step)))
    return survivors, full


@contextmanager
def _job(launcher: Callable[[Path, Path], Launched]) -> Iterator[tuple[Steps, Path]]:
    """Start a job. Return its steps and its log once the job trains steadily."""
    with tempfile.TemporaryDirectory() as folder:
        steps, log = Steps(Path(folder, "steps")), Path(folder, "log")
        launched = launcher(steps.path, log)
        try:
            if not _warm(steps, 0):
                raise RuntimeError(f"the job did not start: {log.read_text()[-2000:]}")
            yield steps, log
        finally:
            launched.stop()
            steps.close()


def _kill_each(
    steps: Steps, workers: int, kills: int, settle_s: float
) -> Iterator[tuple[set[int], float, int]]:
    """Kill one worker of the world after the other, each of another rank. Yield the pids of the world, the
    time, and the number of steps made."""
    for n in range(kills):
        time.sleep(settle_s)
        steps.read()
        pids = {s.rank: s.pid for s in steps.made[-4 * workers :]}
        killed_at = time.monotonic()
        os.kill(pids[n % workers], signal.SIGKILL)
        yield set(pids.values()), killed_at, len(steps.made)


def _in_place(log: Path, killed_at: float, step: StepMade) -> Mapping[str, float]:
    said, offset_s = parts.events(log), wall_s()
    decided = parts.decided(said, killed_at, offset_s)
    formed = [e for e in said if e["event"] == "round.formed" and e["at"] - offset_s >= killed_at]
    joined = parts.joined(said, formed[0]["round"], offset_s) if formed else []
    return parts.lengths(killed_at, [*decided, *joined], step)


def wall_s() -> float:
    """Return how far the wall clock is ahead of the clock of the steps."""
    return time.time() - time.monotonic()


def _warm(steps: Steps, since: int) -> bool:
    """Wait until the present world trains steadily."""
    first = steps.first(lambda s: s.step >= WARM_UP_STEPS, START_TIMEOUT_S, since)
    return first is not None


def node_loss(launcher: Callable[[Path, Path], Launched], lose: int, timeout_s: float) -> float | None:
    """Return the seconds from the kill of an agent and its worker until the next step of the others."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(Path(folder, "steps"))
        launched = launcher(steps.path, Path(folder, "log"))
        try:
            nodes = len(launched.agents)
            started = steps.first(lambda s: s.world == nodes and s.step >= WARM_UP_STEPS, START_TIMEOUT_S)
            if started is None:
                raise RuntimeError(f"the job did not start: {Path(folder, 'log').read_text()[-2000:]}")
            before = len(steps.made)
            old = {s.pid for s in steps.made}
            agent = psutil.Process(launched.agents[lose].pid)
            family = [agent, *agent.children(recursive=True)]
            killed_at = time.monotonic()
            for process in family:
                process.kill()
            next_step = steps.first(lambda s: s.pid not in old, timeout_s, before)
            return next_step.at - killed_at if next_step else None
        finally:
            launched.stop()
            steps.close()


ALONE = "torch alone: abort a group, build the next"
FLOOR = "floor: told at once, build the next group"


def recovery(worlds: Sequence[int], kills: int, megabytes: Sequence[int]) -> Iterator[str]:
    """Yield the tables of a killed worker on one node, for each number of workers and each size of a worker.
    Then yield how the times grow with these."""
    measured: dict[str, Mapping[str, list[Kill]]] = {}
    for workers in worlds:
        for size in megabytes:
            os.environ["BENCH_MEGABYTES"] = str(size)
            spare = _fit(workers + 1, size)
            rows = measured[f"{workers} x {size} MB"] = _recovery(workers, kills, spare=spare)
            left_out = "" if spare else f"\n  ({SPARE} is left out: the memory is too small for one more)"
            title = (
                f"kill -9 of one of {workers} workers of {size} MB, to the next step (one node, gloo, DDP)"
            )
            yield tables(title, rows, SURVIVORS) + left_out
    if len(measured) > 1:
        names = dict.fromkeys(name for rows in measured.values() for name in rows)
        medians = {
            name: [_median([kill.took for kill in rows.get(name, [])]) for rows in measured.values()]
            for name in names
        }
        yield report.growth("how the medians grow, times the first", [*measured], medians)


def _fit(workers: int, megabytes: int) -> bool:
    """Whether so many workers of this size fit into the machine's memory."""
    return workers * (megabytes + BESIDE_MB) << 20 < psutil.virtual_memory().available


def _median(times: Sequence[float | None]) -> float | None:
    have = [took for took in times if took is not None]
    return median(have) if have else None


def _recovery(workers: int, kills: int, *, spare: bool) -> Mapping[str, list[Kill]]:
    """Measure in the order A B A B, since the machine's speed changes."""
    half = (kills + 1) // 2
    rows: dict[str, list[Kill]] = {}

    def add(name: str, took: list[Kill]) -> None:
        rows.setdefault(name, []).extend(took)

    def tuned(workers: int, steps: Path, log: Path) -> Launched:
        return launch.torchrun_alone(workers, steps, log, monitor_s=0.01)

    for _ in range(2):
        add("torchrun", worker_kills(launch.torchrun_alone, workers, half))
        add("torchrun, looking every 10 ms", worker_kills(tuned, workers, half))
        add("elasticd, script as it is", worker_kills(launch.elasticd_alone, workers, half, SETTLE_S))
        survivors, full = kills_in_place(workers, half, spares=0)
        add(SURVIVORS, survivors)
        add("elasticd in place, full size again", full)
        if spare:
            add(SPARE, kills_in_place(workers, half, spares=1)[0])
        add(ALONE, [Kill(took) for took in floor(workers, half)])
        add(FLOOR, [Kill(took) for took in floor(workers, half, told=True)])
    return rows


def tables(title: str, rows: Mapping[str, Sequence[Kill]], reference: str) -> str:
    """Return the times of the kills, with their ratios to the reference's, and what they were spent on."""
    times = {name: [kill.took for kill in row] for name, row in rows.items()}
    known = {name: [kill.parts for kill in row if kill.parts] for name, row in rows.items()}
    return "\n".join(
        [
            report.table(title, times, reference),
            "what it was spent on (medians, ms)",
            *(parts.line(name, row) for name, row in known.items() if row),
        ]
    )


def node_losses(tries: int, with_defaults: bool) -> str:
    """Kill one of three nodes, the agent and the worker. Then kill the node that came first."""
    server = EtcdOnPorts()
    etcd = f"http://{server.start().endpoints[0]}"
    rows: dict[str, list[float | None]] = {}

    def ours(steps: Path, log: Path) -> Launched:
        return launch.elasticd_nodes(3, 2, etcd, f"loss-{uuid.uuid4().hex[:6]}", steps, log)

    def theirs(conf: str) -> Callable[[Path, Path], Launched]:
        def launcher(steps: Path, log: Path) -> Launched:
            return launch.torchrun_nodes(3, 2, uuid.uuid4().hex[:6], steps, log, conf)

        return launcher

    tuned = "last_call_timeout=1"
    try:
        for _ in range(tries):
            rows.setdefault("elasticd (lease of 5 s), last node", []).append(node_loss(ours, 2, 60))
            rows.setdefault("torchrun, last call 1 s, last node", []).append(node_loss(theirs(tuned), 2, 90))
            rows.setdefault("elasticd (lease of 5 s), first node", []).append(node_loss(ours, 0, 60))
        rows["torchrun, last call 1 s, first node"] = [node_loss(theirs(tuned), 0, 90)]
        if with_defaults:
            rows["torchrun, defaults, last node"] = [node_loss(theirs(""), 2, 120)]
    finally:
        server.stop()
    title = "loss of one node of three (agent and worker killed), to the next step of the others"
    return report.table(title, rows, "elasticd (lease of 5 s), last node")
