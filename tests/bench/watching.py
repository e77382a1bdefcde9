"""What watching costs a step: the same processes, watched and not watched in turn.

Two launches of the same job differ by more than the cost that is measured. So one launch alternates. In
blocks that are not watched, the workers remove the optimizer's hook, which is the heartbeat, and the agent,
its etcd and its other services are stopped. In other blocks all continue, and /metrics is scraped every
second. In a second measurement only the hook is removed. Commits of the library are timed one by one;
``overhead`` compares launches.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import floor, sqrt
from pathlib import Path
from statistics import median
from typing import Self

import psutil

from tests.bench import launch
from tests.bench.steps import Steps
from tests.ports import free_port

SETTLING_STEPS = 3  # steps after a switch, which count for neither side
WARM_UP_STEPS = 20
START_TIMEOUT_S = 120.0
SCRAPE_S = 1.0


@dataclass(slots=True)
class Scraper:
    """Scrapes every second while it is entered."""

    url: str
    took_s: list[float] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._end.clear()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(SCRAPE_S):
            asked = time.perf_counter()
            with urllib.request.urlopen(self.url, timeout=10) as answer:
                answer.read()
            self.took_s.append(time.perf_counter() - asked)


@dataclass(frozen=True, slots=True)
class Watching:
    """``agent``: the agent is stopped and continued, too. Otherwise only the workers' hook is removed and put
    back."""

    name: str
    library: bool
    agent: bool = True


ALL = (
    Watching("script as it is", library=False),
    Watching("with elasticd.worker", library=True),
    Watching("its heartbeat alone", library=True, agent=False),
)


class Watched:
    """A job of so many workers under one agent."""

    def __init__(self, folder: Path, workers: int, what: Watching, width: int, batch: int) -> None:
        self._what = what
        port = free_port()
        env = {"PYTHONPATH": launch.ROOT, "BENCH_LIBRARY": str(int(what.library))}
        env |= {"BENCH_WIDTH": str(width), "BENCH_BATCH": str(batch)}
        argv = [launch.BIN / "elasticd", "run", "--min", workers, "--max", workers, "--slots", workers]
        # Long limits: no lease runs out and no hang is judged because the agent was stopped for a while.
        argv += ["--node-ttl", 600, "--hang-after", 3600, "--http", f"127.0.0.1:{port}", "--plain"]
        argv += [Path(__file__).with_name("job_watched.py")]
        self._log = folder / "log"
        self._rank_0 = 0
        self.steps = Steps(folder / "steps")
        self.launched = launch.Launched(
            [launch.spawn([str(a) for a in argv], self.steps.path, self._log, env)]
        )
        self.scraper = Scraper(f"http://127.0.0.1:{port}/metrics")
        self.workers: set[int] = set()

    def close(self) -> None:
        for process in self._watchers():
            process.send_signal(signal.SIGCONT)
        self.launched.stop()
        self.steps.close()

    def start(self) -> None:
        made = self.steps.first(lambda s: s.rank == 0 and s.step >= WARM_UP_STEPS, START_TIMEOUT_S)
        if made is None:
            raise RuntimeError(f"it does not train: {self._log.read_text()[-2000:]}")
        self.workers = {s.pid for s in self.steps.made}
        self._rank_0 = made.pid

    def _watchers(self) -> list[psutil.Process]:
        """Return the agent and its etcd, without the warden, which sleeps, and the workers below it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            agent = psutil.Process(self.launched.agents[0].pid)
            return [agent, *(child for child in agent.children() if child.name() != "elasticd-warden")]
        return []

    def switch(self, on: bool) -> None:
        for process in self._watchers() if self._what.agent else ():
            process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
        for pid in self.workers:
            os.kill(pid, signal.SIGUSR1)

    def cpu_s(self) -> tuple[float, float]:
        """Return the processor time of the agent and its services: the warden, and an etcd if the agent
        started one."""
        agent = psutil.Process(self.launched.agents[0].pid)
        agents, *others = [sum(p.cpu_times()[:2]) for p in (agent, *agent.children())]
        return agents, sum(others)

    def call_s(self, name: str) -> float:
        """Return the time of a call of "hook" or "commit", by the workers' own clock: the median of all
        blocks."""
        self.steps.read()
        took = [m.what.partition(":")[2] for m in self.steps.marks if m.what.startswith(f"{name}:")]
        return median(map(float, took)) / 1e9

    def block(self, count: int) -> float:
        """Return the average seconds of the next steps of the block."""
        self.steps.read()
        since = len(self.steps.made)
        begun: list[float] = []

        def last(made: object) -> bool:
            begun.append(made.at)  # type: ignore[attr-defined]
            return len(begun) > SETTLING_STEPS + count

        at = self.steps.first(lambda s: s.pid == self._rank_0 and last(s), START_TIMEOUT_S, since)
        if at is None:
            raise RuntimeError(f"it makes no steps any more: {self._log.read_text()[-2000:]}")
        return (begun[-1] - begun[SETTLING_STEPS]) / count


def median_within(drawn: Sequence[float]) -> tuple[float, float]:
    """Return the interval in which the median of the underlying distribution lies with a probability of 95 %,
    whatever the distribution: the number of values below it is that of heads in as many tosses of a coin
    (normal approximation)."""
    ranked, aside = sorted(drawn), 0.98 * sqrt(len(drawn))
    low = max(0, floor(len(ranked) / 2 - aside))
    return ranked[low], ranked[-1 - low]


def watching(workers: int, pairs: int, count: int, what: Watching, width: int, batch: int) -> str:
    """Measure in the order not watched, watched, watched, not watched, and so on, since the machine's speed
    changes. Return the median of the pairs, and the CPU time that the agent used by its own account."""
    with tempfile.TemporaryDirectory() as folder:
        job = Watched(Path(folder), workers, what, width, batch)
        try:
            job.start()
            ratios: list[float] = []
            plain_s: list[float] = []
            agent_s = others_s = watched_s = 0.0
            for n in range(pairs):
                took: dict[bool, float] = {}
                for on in (False, True) if n % 2 == 0 else (True, False):
                    if on:
                        before, began = job.cpu_s(), time.monotonic()
                        with job.scraper:
                            took[on] = job.block(count)
                        after = job.cpu_s()
                        agent_s += after[0] - before[0]
                        others_s += after[1] - before[1]
                        watched_s += time.monotonic() - began
                    else:
                        job.switch(False)
                        took[on] = job.block(count)
                        job.switch(True)
                ratios.append(took[True] / took[False] - 1)
                plain_s.append(took[False])
            scrapes = job.scraper.took_s
            calls_s = {name: job.call_s(name) for name in ("hook", "commit")[: 1 + what.library]}
        finally:
            job.close()
    low, high = median_within(ratios)
    said = [
        f"{median(ratios):+.2%} of a step of {median(plain_s) * 1e3:.1f} ms",
        f"by {pairs} pairs {low:+.2%} to {high:+.2%} (95 %)",
        *(f"a {name} {took * 1e6:.0f} us ({took / median(plain_s):.3%})" for name, took in calls_s.items()),
    ]
    if what.agent:
        said.append(f"the agent {agent_s / watched_s:.2%} of a core, its services {others_s / watched_s:.2%}")
        said += [f"a scrape {median(scrapes) * 1e3:.2f} ms"] if scrapes else []
    return f"  {what.name:<20} {'; '.join(said)}"
