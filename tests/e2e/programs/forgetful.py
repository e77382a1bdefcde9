"""Trains without snapshots, so each start begins from the first step. Usage: forgetful.py STEPS."""

import os
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for step in range(int(sys.argv[1])):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)  # give the agent time to look
    if first and step == 40 and dist.get_rank() == 1:
        os._exit(3)
dist.destroy_process_group()
