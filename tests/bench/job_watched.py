"""The job of job.py or, if BENCH_LIBRARY is 1, of job_in_place.py. Each SIGUSR1 removes the heartbeat's hook
from the optimizer, or puts the hook back. The job marks the median time, in nanoseconds, of the hook's calls
and of the library's commits since the last signal. Commits are never left out: a step that is not committed
is another training."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from torch.optim import optimizer

from elasticd import worker
from tests.bench import job, job_in_place


class Timed:
    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self.name, self.call = name, call
        self.took_ns: list[int] = []

    def __call__(self, *args: Any) -> Any:
        began = time.perf_counter_ns()
        try:
            return self.call(*args)
        finally:
            self.took_ns.append(time.perf_counter_ns() - began)

    def mark(self) -> None:
        if self.took_ns:
            job.mark(f"{self.name}:{median(self.took_ns):.0f}")
            self.took_ns.clear()


hooks = optimizer._global_optimizer_post_hooks
# the library's own hooks are registered later
heartbeat = {key: Timed("hook", call) for key, call in hooks.items()}
hooks.update(heartbeat)
commit = Timed("commit", worker.State.commit)


def switch(*_: object) -> None:
    for timed in (commit, *heartbeat.values()):
        timed.mark()
    for key, call in heartbeat.items():
        if hooks.pop(key, None) is None:
            hooks[key] = call


def commit_of(state: worker.State) -> None:
    commit(state)


if __name__ == "__main__":
    worker.State.commit = commit_of  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, switch)
    (job_in_place if os.environ.get("BENCH_LIBRARY") == "1" else job).main()
