"""A worker that keeps its process. One worker dies. In the world after that a survivor never makes a first
step. Usage: stuck.py FILE; the file exists once a worker has died."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from elasticd import worker

dead = Path(sys.argv[1])
ranks: list[int] = []  # the steps in each world
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


@worker.run
def train(state: worker.State) -> None:
    ranks.append(worker.rank())
    if state.step and ranks[0] == 1 and dead.exists():
        dead.unlink()
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # stuck
    for step in state.steps(60):
        optimizer.zero_grad()
        state.model(torch.ones(8, 4)).square().mean().backward()
        optimizer.step()
        state.commit()
        time.sleep(0.02)
        if step == 20 and ranks[0] == 2 and worker.world_size() == 3:
            dead.touch()
            os.kill(os.getpid(), signal.SIGKILL)


train(worker.State(model=model, optimizer=optimizer))
