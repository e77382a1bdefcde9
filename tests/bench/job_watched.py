"""The job of job.py or, if BENCH_LIBRARY is 1, of job_in_place.py. Each SIGUSR1 takes out what watches it
within its own process, or puts that back in: BENCH_WATCHED of "hook" (the heartbeat's, of the optimizer),
"commit" (of the library), or "all". It marks what calls of these took since, the median in nanoseconds."""

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

WATCHED = os.environ.get("BENCH_WATCHED", "all")


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
for key, call in hooks.items():
    hooks[key] = Timed("hook", call)
taken_out: dict[int, Any] = {}
commit = Timed("commit", worker.State.commit)
out = False


def put_commit(call: Callable[..., Any]) -> None:
    def method(state: worker.State) -> None:
        call(state)

    worker.State.commit = method  # type: ignore[method-assign, assignment]


def switch(*_: object) -> None:
    global out  # noqa: PLW0603  # of one process
    out = not out
    for timed in (commit, *hooks.values()):
        timed.mark()
    if WATCHED in ("hook", "all"):
        if out:
            taken_out.update(hooks)
            hooks.clear()
        else:
            hooks.update(taken_out)
    if WATCHED in ("commit", "all"):
        put_commit((lambda state: None) if out else commit)


if __name__ == "__main__":
    put_commit(commit)
    signal.signal(signal.SIGUSR1, switch)
    (job_in_place if os.environ.get("BENCH_LIBRARY") == "1" else job).main()
