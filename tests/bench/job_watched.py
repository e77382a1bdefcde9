"""The job of job.py or, if BENCH_LIBRARY is 1, of job_in_place.py. Each SIGUSR1 takes out what watches it
within its own process, or puts that back in: the optimizer hook, and the commits of the library."""

from __future__ import annotations

import os
import signal

from torch.optim import optimizer

from elasticd import worker
from tests.bench import job, job_in_place

hooks = optimizer._global_optimizer_post_hooks
taken_out: dict[int, object] = {}
commit = worker.State.commit


def switch(*_: object) -> None:
    if hooks:
        taken_out.update(hooks)
        hooks.clear()
        worker.State.commit = lambda state: None  # type: ignore[method-assign]
    else:
        hooks.update(taken_out)
        worker.State.commit = commit  # type: ignore[method-assign]


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, switch)
    (job_in_place if os.environ.get("BENCH_LIBRARY") == "1" else job).main()
