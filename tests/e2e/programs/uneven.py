"""Trains with plain DistributedDataParallel; while FOLDER/slow is there, the rank that is named takes so
many times as long for its own part of a step: uneven.py RANK TIMES FOLDER. Ends once FOLDER/end is there."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

SLEEP_S = 0.1

slow, times, folder = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo")
slot = int(os.environ["LOCAL_RANK"]) if dist.get_world_size() == 3 else -1
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    ends = torch.tensor([float((folder / "end").exists())])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    if ends.item():
        break
    time.sleep(SLEEP_S * (times if slot == slow and (folder / "slow").exists() else 1.0))
    loss = model(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
