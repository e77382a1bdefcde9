"""A worker that keeps its process from round to round. Once, some steps after a checkpoint, one rank alone
has a loss that is NaN. Usage: astray.py FOLDER."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from elasticd import worker

folder = Path(sys.argv[1])
STEPS, SAVED_EVERY, WRONG_AT, STEP_S = 25, 10, 17, 0.02

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
checkpoints = worker.Checkpoints(folder / "run", when=str(SAVED_EVERY))


@worker.run
def train(state: worker.State) -> None:
    with (folder / "began").open("a") as note:
        note.write(f"{os.getpid()} {worker.rank()} {state.step}\n")
    for step in state.steps(STEPS):
        loss = state.model(torch.ones(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wrong = step == WRONG_AT and worker.rank() == 1 and not (folder / "wrong").exists()
        if wrong:
            checkpoints.wait(60.0)
            (folder / "wrong").touch()
        state.commit(loss=loss * float("nan") if wrong else loss)
        time.sleep(STEP_S)
    (folder / f"loss-{worker.rank()}").write_text(f"{loss.item()}")


train(worker.State(model=model, optimizer=optimizer, checkpoints=checkpoints))
