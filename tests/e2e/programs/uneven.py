"""Trains with plain DistributedDataParallel or FSDP2; while FOLDER/slow is there, the rank that is named
takes so many times as long for its own part of a step, in the forward and in the backward pass:
uneven.py ddp|fsdp2 RANK TIMES FOLDER. Ends once FOLDER/end is there."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

FORWARD_S, LAYERS = 0.01, 4  # of one layer; twice as long backward

how, slow, times, folder = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo")
slot = int(os.environ["LOCAL_RANK"]) if dist.get_world_size() == 3 else -1
pace = 1.0  # of this step


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(pace * FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(pace * 2 * FORWARD_S)
        return grad


class Layer(torch.nn.Linear):
    def forward(self, x):
        return Work.apply(super().forward(x))


model = torch.nn.Sequential(*(Layer(16, 16) for _ in range(LAYERS)))
if how == "fsdp2":
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
else:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
while True:
    ends = torch.tensor([float((folder / "end").exists())])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    if ends.item():
        break
    pace = times if slot == slow and (folder / "slow").exists() else 1.0
    loss = model(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
