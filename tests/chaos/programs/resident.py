"""A training that keeps its processes with elasticd.worker, and writes a ledger. argv: "consistent" or
"plain".

The training ends when the test tells it to.
"""

import os
import sys
import time

import ledger
import torch
import torch.distributed as dist
from torch import nn

from elasticd import worker

SAMPLES, BATCH, VIRTUAL_RANKS = 205, 24, 8  # an epoch ends with a shorter batch
UNTIL = int(ledger.ALONE) if ledger.ALONE else None
torch.set_num_threads(1)
chance = torch.Generator().manual_seed(1)
inputs, wanted = torch.randn(SAMPLES, 12, generator=chance), torch.randn(SAMPLES, 4, generator=chance)


def all_stop():
    """Return whether the workers stop. All workers return the same."""
    told = torch.tensor([int(ledger.told_to_stop())])
    if dist.is_initialized():
        dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told.item())


@worker.run
def train(state):
    place = {
        "round": int(os.environ.get("ELASTICD_ROUND", "0")),
        "rank": worker.rank(),
        "world": worker.world_size(),
    }
    ledger.note("entered", step=state.step, **place)
    for step in state.steps(UNTIL):
        since = time.time()
        if all_stop():
            break
        ledger.fail_if_told(worker.rank())
        time.sleep(ledger.STEP_S)
        number, used = state.step, []
        for x, y, index in step:
            used += index.tolist()
            step.backward(nn.functional.mse_loss(state.model(x), y))
        state.optimizer.step()
        state.optimizer.zero_grad()
        found = ledger.digest([*model.state_dict().values()])
        ledger.note(
            "step",
            step=number + 1,
            epoch=step.epoch,
            samples=used,
            digest=found,
            since=since,
            **place,
        )
        try:
            state.commit()
        except worker.WorldChanged:
            ledger.note("committed", step=number + 1, **place)
            raise
        ledger.note("committed", step=number + 1, **place)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 4))
data = worker.Data(
    list(zip(inputs, wanted, range(SAMPLES), strict=True)),
    global_batch=BATCH,
    virtual_ranks=VIRTUAL_RANKS,
    consistent=sys.argv[1] == "consistent",
    seed=3,
    shuffle=True,
    epochs=None,
)
state = worker.State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), data=data)
train(state)
ledger.note("ended", step=state.step)
