"""The job of job.py, changed so that its workers keep their process: see elasticd.worker."""

from __future__ import annotations

import os

import torch
from torch import nn

from elasticd import worker
from tests.bench.job import BATCH, ON_GPU, STEPS, WIDTH, device, note


@worker.run
def train(state: worker.State, batch: torch.Tensor) -> None:
    place = f"{worker.rank()} {worker.world_size()} {os.getpid()}"
    for step in state.steps(STEPS):
        state.optimizer.zero_grad()
        state.model(batch).square().mean().backward()
        state.optimizer.step()
        returned = False
        try:
            if ON_GPU:
                torch.cuda.synchronize()
            state.commit()
            returned = True
        finally:
            # the step is committed, even if the world ends with this commit
            if returned or state.step > step:
                note(place, step)


def main() -> None:
    on = device()
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers).to(on)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(worker.State(model=model, optimizer=optimizer), torch.randn(BATCH, WIDTH, device=on))


if __name__ == "__main__":
    main()
