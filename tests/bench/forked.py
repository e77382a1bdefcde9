"""The minimum of a restart: from the fork of a script's workers, by a process that has imported all their
modules, to their first step. No agent runs, and no death is noticed.

``python -m tests.bench.forked FIGURES WORKERS TRIES SCRIPT [ARGUMENT]...`` writes the seconds of each try to
the file FIGURES.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from tests.bench.steps import Steps
from tests.ports import free_port

TRAINS_S = 1.0  # from the first step of a world to its end
TIMEOUT_S = 180.0


def main() -> None:
    figures, workers, tries, *job = sys.argv[1:]
    took_s = []
    steps = Steps(Path(os.environ["BENCH_STEPS"]))
    sys.path[0] = os.path.dirname(os.path.abspath(job[0]))
    import_as_the_script_does(job, steps)
    with world(int(workers), job, steps):
        time.sleep(TRAINS_S)  # saves what a restart continues from
    for _ in range(int(tries)):
        began = time.monotonic()
        with world(int(workers), job, steps) as first_step_at:
            took_s.append(first_step_at - began)
            time.sleep(TRAINS_S)
    Path(figures).write_text("\n".join(map(str, took_s)))


def import_as_the_script_does(job: Sequence[str], steps: Steps) -> None:
    """Import the modules that a worker has imported when it has made a step."""
    reads, writes = os.pipe()

    def tell(*_: object) -> None:
        with os.fdopen(writes, "w") as pipe:
            pipe.write("\n".join(sys.modules))
        os._exit(0)

    os.environ["MASTER_PORT"] = str(free_port())
    pid = fork_worker(0, 1, job, tell)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        names = pipe.read().split("\n")
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("the script makes no step")
    for name in names:
        # the worker's own module, or one that another module makes
        with contextlib.suppress(ImportError, KeyError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def world(workers: int, job: Sequence[str], steps: Steps) -> Iterator[float]:
    """Fork a world of workers, and yield the time of their first step. Kill them in the end."""
    os.environ["MASTER_PORT"] = str(free_port())
    steps.read()
    before = len(steps.made)
    pids = [fork_worker(rank, workers, job) for rank in range(workers)]
    try:
        first = steps.first(lambda _: True, TIMEOUT_S, before)
        if first is None:
            raise RuntimeError("no worker makes a step")
        yield first.at
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def fork_worker(
    rank: int, workers: int, job: Sequence[str], at_step: Callable[..., None] | None = None
) -> int:
    """Fork a process that runs the script as a worker. ``at_step`` is called after each step, which is
    otherwise noted. Return the process's id."""
    if pid := os.fork():
        return pid
    try:
        run_as_worker(rank, workers, job, at_step)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def run_as_worker(
    rank: int, workers: int, job: Sequence[str], at_step: Callable[..., None] | None
) -> NoReturn:
    import sitecustomize  # that of the folder ``noting``

    optimizers = importlib.import_module("torch.optim.optimizer")

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    size = {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers)}
    os.environ.update(size, RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", MASTER_ADDR="127.0.0.1")
    if at_step is None:
        sitecustomize._note_steps(optimizers)
    else:
        optimizers.register_optimizer_step_post_hook(at_step)
    sys.argv = [*job]
    runpy.run_path(job[0], run_name="__main__")
    raise RuntimeError("the script has ended")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
