"""Trains ten steps, saves each one, and fails once at step 6: usage: checkpointed.py FOLDER."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from elasticd import worker

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
checkpoints = worker.Checkpoints(folder / "run", last=2)
step = checkpoints.load(state) or 0
with open(folder / f"began-{dist.get_rank()}", "a") as file:
    file.write(f"{step} {checkpoints.tier or 'nowhere'}\n")
while step < 10:
    torch.manual_seed(step)
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    checkpoints.save(state, step)
    # the saver finishes the last checkpoint after this process has ended
    assert step == 10 or checkpoints.wait(60.0)
    if step == 6 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(3)
if checkpoints.failed:
    sys.exit(f"a checkpoint failed: {checkpoints.last_error}")
