"""Makes steps and checkpoints, dies once between two checkpoints, and then has losses that are NaN.

Usage: diverging.py FOLDER [TIMES]. After so many losses that are NaN the training goes on to its end; by
default it never does.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elasticd import worker

folder = Path(sys.argv[1])
times = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
STEP_S, SAVE_EVERY, DIES_AFTER, DIVERGES_AT, STEPS = 0.03, 10, 35, 50, 60

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
checkpoints = worker.Checkpoints(folder / "run")
state = {"model": model, "optimizer": optimizer}
step = checkpoints.load(state) or 0
with (folder / "began").open("a") as note:
    note.write(f"{step}\n")
lives = len((folder / "began").read_text().split())
while step < STEPS:
    loss = model(torch.ones(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    with (folder / "steps").open("a") as log:
        log.write(f"{os.getpid()} {step} {time.time()}\n")
    wrong = step >= DIVERGES_AT and lives < 2 + times  # the worker has died before
    worker.report(loss=loss * float("nan") if wrong else loss, samples=8, pace=1 / STEP_S)
    time.sleep(STEP_S)
    if step % SAVE_EVERY == 0:
        checkpoints.save(state, step)
        checkpoints.wait()
    if step == DIES_AFTER and not (folder / "died").exists():
        (folder / "died").touch()
        os._exit(9)
