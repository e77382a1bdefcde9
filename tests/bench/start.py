"""What a start costs: from the command to the first step of all workers. Also a kill a second later, and a
kill once the job has trained for some time, beside the minimum of a restart (see ``forked``)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.bench import launch, report
from tests.bench.forked import TRAINS_S
from tests.bench.launch import Launched
from tests.bench.recovery import START_TIMEOUT_S
from tests.bench.steps import Steps

HERE = Path(__file__).parent
NOTING = HERE / "noting"  # the scripts stay as their users have them, so sitecustomize notes their steps
PAUSES_S = (TRAINS_S, 10.0)  # from the first step of a world to the kill of a worker
KILL_TIMEOUT_S = 180.0
MINIMUM_TIMEOUT_S = 300.0

Launcher = Callable[[int, Path, Path, Sequence[object]], Launched]


@dataclass(frozen=True, slots=True)
class Start:
    """``took_s``: from the command until each worker has made a step. ``cpu_s``: the CPU time of all
    processes until then, without etcd, which has used ``etcd_cpu_s``. ``again_s``: from the ``kill -9`` of a
    worker to the first step of the next world, for each kill."""

    took_s: float
    cpu_s: float
    etcd_cpu_s: float
    again_s: tuple[float, ...]


def _env(log: Path) -> Mapping[str, str]:
    return {"PYTHONPATH": str(NOTING), "XDG_STATE_HOME": str(log.parent)}


def elasticd(workers: int, steps: Path, log: Path, job: Sequence[object]) -> Launched:
    return launch.elasticd_alone(workers, steps, log, job=job, env=_env(log))


def torchrun(workers: int, steps: Path, log: Path, job: Sequence[object]) -> Launched:
    return launch.torchrun_alone(workers, steps, log, job=job, env=_env(log))


def start_once(launcher: Launcher, workers: int, job: Sequence[object]) -> Start:
    """Measure one start. Raises RuntimeError if a figure is missing."""
    with tempfile.TemporaryDirectory() as folder:
        steps, log = Steps(Path(folder, "steps")), Path(folder, "log")
        began = time.monotonic()
        launched = launcher(workers, steps.path, log, job)
        try:
            ranks: set[int] = set()

            def all_there(rank: int) -> bool:
                ranks.add(rank)
                return len(ranks) == workers

            last = steps.first(lambda s: all_there(s.rank), START_TIMEOUT_S)
            if last is None:
                raise RuntimeError(f"{len(ranks)} of {workers} workers start: {log.read_text()[-2000:]}")
            cpu_s, etcd_cpu_s = cpu_of_tree(launched.agents[0].pid)
            again_s = tuple(_kill_after(pause, workers, steps, log) for pause in PAUSES_S)
            return Start(last.at - began, cpu_s, etcd_cpu_s, again_s)
        finally:
            launched.stop()
            steps.close()


def _kill_after(pause_s: float, workers: int, steps: Steps, log: Path) -> float:
    """Kill the worker of the last rank, and return the seconds to the first step of the next world."""
    time.sleep(pause_s)
    steps.read()
    old, before = {s.rank: s.pid for s in steps.made}, len(steps.made)
    killed_at = time.monotonic()
    os.kill(old[workers - 1], signal.SIGKILL)
    again = steps.first(lambda s: s.pid not in old.values(), KILL_TIMEOUT_S, before)
    if again is None:
        raise RuntimeError(f"no step follows the kill: {log.read_text()[-2000:]}")
    return again.at - killed_at


def minimum(workers: int, tries: int, job: Sequence[object]) -> list[float]:
    """Return the seconds that workers take to their first step if they are forked from a process with all
    their modules. Raises RuntimeError if they do not start, and subprocess.TimeoutExpired."""
    with tempfile.TemporaryDirectory() as folder:
        steps, log, figures = (Path(folder, name) for name in ("steps", "log", "figures"))
        argv = [sys.executable, "-m", "tests.bench.forked", figures, workers, tries, *job]
        path = f"{NOTING}{os.pathsep}{launch.ROOT}"
        own = {**_env(log), "PYTHONPATH": path, "ELASTICD_JOB_NAME": "minimum"}
        process = launch.spawn(argv, steps, log, own)
        try:
            process.wait(MINIMUM_TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode:
            raise RuntimeError(f"the workers could not be forked: {log.read_text()[-2000:]}")
        return [float(line) for line in figures.read_text().split()]


def cpu_of_tree(pid: int) -> tuple[float, float]:
    """Return the CPU seconds, of user and system, that the process and its descendants have used, also those
    that have ended: first without etcd, then of etcd."""
    used = {False: 0.0, True: 0.0}
    agent = psutil.Process(pid)
    for process in (agent, *agent.children(recursive=True)):
        # the process has ended, and its parent counts its time
        with contextlib.suppress(psutil.NoSuchProcess):
            used[process.name() == "etcd"] += sum(process.cpu_times()[:4])
    return used[False], used[True]


JOBS: Mapping[str, Sequence[object]] = {
    "an empty script": [HERE / "job_empty.py"],
    "the GPT of the README": [Path(launch.ROOT, "workers", "train_gpt.py"), "--steps", 1_000_000],
    "transformers": [HERE / "job_transformers.py"],
}


def start(sizes: Sequence[int], pairs: int, only: Sequence[str] = ()) -> Iterator[str]:
    """Yield the tables of torchrun and elasticd in turn. ``only``: the scripts whose names begin so."""
    for name, job in JOBS.items():
        if only and not name.startswith(tuple(only)):
            continue
        if name == "transformers" and importlib.util.find_spec(name) is None:
            yield f"{name}: left out, not installed here"
            continue
        for workers in sizes:
            yield _compared(name, job, workers, pairs)


def _compared(name: str, job: Sequence[object], workers: int, pairs: int) -> str:
    theirs, ours, least_s = [], [], []
    for _ in range(pairs):
        theirs.append(start_once(torchrun, workers, job))
        ours.append(start_once(elasticd, workers, job))
        least_s += minimum(workers, len(PAUSES_S), job)
    what = f"{name}, {workers} worker{'s' * (workers > 1)}"
    both = {"torchrun": theirs, "elasticd": ours}
    cpu: dict[str, Sequence[float | None]] = {row: [s.cpu_s for s in starts] for row, starts in both.items()}
    cpu["elasticd's etcd, beside it"] = [s.etcd_cpu_s for s in ours]
    return "\n".join(
        [
            report.table(
                f"{what}: from the command to the first step of all",
                {row: [s.took_s for s in starts] for row, starts in both.items()},
                "torchrun",
            ),
            report.table(f"{what}: CPU until then", cpu, "torchrun"),
            *[
                report.table(
                    f"{what}: kill -9 of one after {pause:g} s of steps, to the next step",
                    {
                        **{row: [s.again_s[n] for s in starts] for row, starts in both.items()},
                        "the minimum: forked with all modules": least_s,
                    },
                    "torchrun",
                )
                for n, pause in enumerate(PAUSES_S)
            ],
        ]
    )
