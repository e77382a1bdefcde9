"""From the kill of a worker, or the loss of a node, to the next step."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

from elasticd.etcd.embedded import Embedded
from tests.bench import launch, report
from tests.bench.floor import floor
from tests.bench.launch import Launched
from tests.bench.steps import Steps

START_TIMEOUT_S = 120.0
WARM_UP_STEPS = 20
SURVIVORS = "elasticd in place, survivors go on"
SETTLE_S = 8.0  # between kills in place: the spare is replaced, and the process to fork it from is there


def worker_kills(
    launcher: Callable[[int, Path, Path], Launched], workers: int, kills: int
) -> list[float | None]:
    """Seconds from ``kill -9`` of one worker to the first step of the new world, each time."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(Path(folder, "steps"))
        launched = launcher(workers, steps.path, Path(folder, "log"))
        took: list[float | None] = []
        try:
            if not _warm(steps, 0):
                raise RuntimeError(f"the job did not start: {Path(folder, 'log').read_text()[-2000:]}")
            for n in range(kills):
                before = len(steps.made)
                pids = {s.rank: s.pid for s in steps.made[-4 * workers :]}
                killed_at = time.monotonic()
                os.kill(pids[n % workers], signal.SIGKILL)
                old = set(pids.values())
                next_step = steps.first(lambda s, old=old: s.pid not in old, 60.0, before)  # type: ignore[misc]
                took.append(next_step.at - killed_at if next_step else None)
                if next_step is None or not _warm(steps, len(steps.made)):
                    break
            return took
        finally:
            launched.stop()
            steps.close()


def kills_in_place(workers: int, kills: int, spares: int) -> tuple[list[float | None], list[float | None]]:
    """Seconds from ``kill -9`` of one worker to the first step of the survivors, and of a world that is
    as large as before, each time. With a spare the two are one."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(Path(folder, "steps"))
        launched = launch.elasticd_in_place(workers, spares, steps.path, Path(folder, "log"))
        survivors: list[float | None] = []
        full: list[float | None] = []
        try:
            if not _warm(steps, 0):
                raise RuntimeError(f"the job did not start: {Path(folder, 'log').read_text()[-2000:]}")
            for n in range(kills):
                time.sleep(SETTLE_S)
                steps.read()
                before = len(steps.made)
                pids = {s.rank: s.pid for s in steps.made[-4 * workers :]}
                killed_at = time.monotonic()
                os.kill(pids[n % workers], signal.SIGKILL)
                old = set(pids.values())
                again = steps.first(
                    lambda s, old=old: s.world == workers and s.pid not in old,  # type: ignore[misc]
                    60.0,
                    before,
                )
                full.append(again.at - killed_at if again else None)
                smaller = [s for s in steps.made[before:] if s.world < workers or s.pid not in old]
                survivors.append(smaller[0].at - killed_at if smaller else None)
                if again is None:
                    break
            return survivors, full
        finally:
            launched.stop()
            steps.close()


def _warm(steps: Steps, since: int) -> bool:
    """Wait until the world at hand is well under way."""
    first = steps.first(lambda s: s.step >= WARM_UP_STEPS, START_TIMEOUT_S, since)
    return first is not None


def node_loss(launcher: Callable[[Path, Path], Launched], lose: int, timeout_s: float) -> float | None:
    """Seconds from the kill of an agent with its worker to the next step of the others."""
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


def recovery(workers: int, kills: int) -> str:
    """A worker killed on one node. Halves of the kills in the order A B A B, as machines are noisy."""
    half = (kills + 1) // 2
    rows: dict[str, list[float | None]] = {}

    def add(name: str, took: list[float | None]) -> None:
        rows.setdefault(name, []).extend(took)

    for _ in range(2):
        add("torchrun", worker_kills(launch.torchrun_alone, workers, half))
        add("elasticd, script as it is", worker_kills(launch.elasticd_alone, workers, half))
        survivors, full = kills_in_place(workers, half, spares=0)
        add(SURVIVORS, survivors)
        add("elasticd in place, full size again", full)
        add("elasticd in place with a spare, full size", kills_in_place(workers, half, spares=1)[1])
        add("floor: abort a group, build the next", floor(workers, half))
    title = f"kill -9 of one of {workers} workers, to the next step (one node, gloo, DDP)"
    return report.table(title, rows, SURVIVORS)


def node_losses(tries: int, with_defaults: bool) -> str:
    """A node of three killed, agent and worker; then the node that was the first."""
    server = Embedded()
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
