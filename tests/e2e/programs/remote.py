"""Trains ten steps, and saves them at the address that the agent was given. Usage: remote.py [fail]."""

import os
import sys

import torch
import torch.distributed as dist

from elasticd import worker

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 8))
state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
checkpoints = worker.Checkpoints(last=2)
step = checkpoints.load(state) or 0
print(f"began at {step}", flush=True)
while step < 10:
    torch.manual_seed(step)
    model(torch.randn(4, 64)).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    step += 1
    if checkpoints.save_if_due(state, step):
        print(f"saved {step}", flush=True)
        checkpoints.wait(60.0)
    if sys.argv[1:] == ["fail"] and step == 6 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(3)
