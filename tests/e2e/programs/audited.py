"""A training on a dataset, as users would write it. The arguments: the epochs; the processes that load; the
seconds of rest after each step. A fourth argument is "grows" (the batch grows with the world) or "consistent"
(consistent mode).

With ``E2E_BREAK`` the dataset returns another sample than the one that was asked for. After ``E2E_DRIFT``
steps the losses are a little too large. ``E2E_SAMPLES`` is the length of the dataset.
"""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import Dataset

from elasticd import worker

SAMPLES, BATCH, RATE = int(os.environ.get("E2E_SAMPLES", "103")), 16, 0.001
MODES = {
    "": {"global_batch": BATCH},
    "grows": {"worker_batch": BATCH, "rate": "linear"},
    "consistent": {"global_batch": BATCH, "virtual_ranks": 4, "consistent": True},
}


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


class Telling(torch.optim.AdamW):
    def step(self, closure: None = None) -> None:
        print(f"rate {self.param_groups[0]['lr'] / RATE:.3f} in {worker.world_size()}", flush=True)
        super().step(closure)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = Telling(model.parameters(), lr=RATE)


@worker.run
def train(state: worker.State, seconds: float) -> None:
    print(f"entered {state.step} {worker.rank()}/{worker.world_size()} as {os.getpid()}", flush=True)
    for step in state.steps():
        for x, y in step:
            loss = (state.model(x).squeeze(-1) - y).square().mean()
            step.backward(loss * 1.0001 if state.step >= drift else loss)
        optimizer.step()
        optimizer.zero_grad()
        state.commit()
        print(f"step {state.step}", flush=True)
        time.sleep(seconds)


epochs, workers, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
drift = int(os.environ.get("E2E_DRIFT", "1000000"))
how = MODES[sys.argv[4] if len(sys.argv) > 4 else ""]
data = worker.Data(Points(), seed=4, epochs=epochs, num_workers=workers, **how)
train(worker.State(model=model, optimizer=optimizer, data=data), seconds)
