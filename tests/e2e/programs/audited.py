"""A training on data, as its users would write it, for so many epochs, with so many processes that load, and
a rest of so many seconds after each step. With ``E2E_BREAK`` its dataset takes another sample than asked for.
"""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import Dataset

from elasticd import worker

SAMPLES, BATCH = 103, 16


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, x.sum().sin()

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if "E2E_BREAK" in os.environ and 0 in indices:
            indices[indices.index(0)] = 1
        return [self[index] for index in indices]


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())


@worker.run
def train(state: worker.State, seconds: float) -> None:
    print(f"entered {state.step} {worker.rank()}/{worker.world_size()} as {os.getpid()}", flush=True)
    for step in state.steps():
        for x, y in step:
            step.backward((state.model(x).squeeze(-1) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        state.commit()
        print(f"step {state.step}", flush=True)
        time.sleep(seconds)


epochs, workers, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
data = worker.Data(Points(), global_batch=BATCH, seed=4, epochs=epochs, num_workers=workers)
train(worker.State(model=model, optimizer=optimizer, data=data), seconds)
