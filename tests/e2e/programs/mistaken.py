"""Trains. Rank 1 alone makes the mistakes that the arguments name."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group(
    "gloo", timeout=timedelta(seconds=float(os.environ.get("MISTAKEN_TIMEOUT_S", "1800")))
)
rank, world = dist.get_rank(), dist.get_world_size()


def makes(mistake: str) -> bool:
    return rank == 1 and mistake in sys.argv


torch.manual_seed(1 if makes("seed") else 0)

inputs = torch.arange(96.0).reshape(48, 2)
if makes("fewer samples"):
    inputs = inputs[:40]
data = TensorDataset(inputs)
seed = 1 if makes("sampler") else 0
sampler = DistributedSampler(data, seed=seed) if "same data" not in sys.argv else None
loader = DataLoader(data, batch_size=4 if sampler else 8, sampler=sampler)

model = DistributedDataParallel(torch.nn.Linear(2, 1))
if makes("weights"):
    with torch.no_grad():
        model.module.bias.add_(1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

for (batch,) in loader:  # LOADER
    model(batch).mean().backward()
    optimizer.step()
    optimizer.zero_grad()

values = torch.ones(10, 3)
if makes("order"):
    dist.all_reduce(values)  # ORDER OF 1
    dist.broadcast(values, 0)
else:
    dist.broadcast(values, 0)  # ORDER OF 0
    dist.all_reduce(values)
dist.all_reduce(values.double() if makes("type") else values)  # TYPE
dist.all_reduce(values[:5] if makes("shape") else values)  # SHAPE
if makes("fails"):
    raise ValueError("no such file")  # FAILS
if makes("sleeps"):
    time.sleep(3600)
if not makes("barrier"):
    dist.barrier()  # BARRIER
dist.destroy_process_group()
