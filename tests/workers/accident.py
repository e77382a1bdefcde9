"""Runs a program of ``workers/`` in a worker that may have accidents, each once in a job.

argv: accidents, with commas; a folder, in which they are noted; the program and its arguments. An accident is
KIND:RANK:STEPS: the worker of that rank has the accident after so many steps of its optimizers. The kinds are
"kill"; "stop"; "wait", which lasts until the folder has a file named "go-STEPS"; and "mark", which is only
noted.

Files in the folder: "STEPS" holds the time of the accident, its round, and the CPU time of the worker;
"STEPS-over" the time of the first step in a later round. Times are of the monotonic clock, which all
processes share.
"""

from __future__ import annotations

import itertools
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

SLICE_S = 0.02  # seconds between two looks at the folder and the world

accidents = [accident.split(":") for accident in sys.argv[1].split(",")]
folder, program, arguments = Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
made = itertools.count(1)


def note(name: str, text: str) -> bool:
    """Write a file that no worker has written yet. Return whether this worker did."""
    unfinished = folder / f"{name}.{os.getpid()}"
    unfinished.write_text(text)
    try:
        os.link(unfinished, folder / name)
    except FileExistsError:
        return False
    finally:
        unfinished.unlink()
    return True


def noted(round: str) -> str:
    return f"{time.monotonic()} {round} {time.process_time()}"


def after_step(*_: Any) -> None:
    number, rank = next(made), os.environ["RANK"]
    round = os.environ.get("ELASTICD_ROUND") or os.environ["TORCHELASTIC_RESTART_COUNT"]  # of torchrun
    for kind, whose, steps in accidents:
        had = folder / steps
        if had.exists():
            if had.read_text().split()[1] != round:
                note(f"{steps}-over", str(time.monotonic()))
            elif kind == "wait":  # train slowly, since the world is about to change
                time.sleep(SLICE_S)
        elif number == int(steps) and rank == whose and note(steps, noted(round)):
            if kind == "wait":
                while not (folder / f"go-{steps}").exists():
                    time.sleep(SLICE_S)
            elif kind != "mark":
                os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])


register_optimizer_step_post_hook(after_step)
sys.argv = [program, *arguments]
sys.path[0] = str(Path(program).parent)
runpy.run_path(program, run_name="__main__")
