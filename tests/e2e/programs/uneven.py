"""Trains with plain DistributedDataParallel; the rank that is named takes so many times as long for its
own part of a step: usage: uneven.py RANK TIMES FILE. Ends once the file is there."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

SLEEP_S = 0.1

slow, times, until = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo")
slot = int(os.environ["LOCAL_RANK"]) if dist.get_world_size() == 3 else -1
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    ends = torch.tensor([float(os.path.exists(until))])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    if ends.item():
        break
    time.sleep(SLEEP_S * (times if slot == slow else 1.0))
    loss = model(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
