"""Trains with plain DistributedDataParallel on the one GPU that all ranks share, without elasticd's library.
Usage: train.py gloo|nccl FOLDER [SLOW] [HANGS]

FOLDER/pid-RANK gets the rank's pid, and 1 if the process was forked from a zygote, else 0. The program ends
once there is a FOLDER/end. While there is a FOLDER/slow, rank SLOW needs a fifth more of the GPU for its own
part of a step. Rank HANGS sleeps in its twenty-first step.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.gpu.sharing import share_the_gpu

CYCLES = 100_000_000  # cycles of the GPU's clock: some 50 ms forward, and as much backward
backend, folder = sys.argv[1], Path(sys.argv[2])
slow, hangs = (int(sys.argv[n]) if len(sys.argv) > n else -1 for n in (3, 4))

share_the_gpu()
torch.cuda.set_device(0)
dist.init_process_group(backend)
rank = dist.get_rank()
pace = 1.0  # how much longer this step takes


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        torch.cuda._sleep(int(pace * CYCLES))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        torch.cuda._sleep(int(pace * CYCLES))
        return grad


model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16)).cuda()
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
forked = int(gc.get_freeze_count() > 1000)
(folder / f"pid-{rank}.new").write_text(f"{os.getpid()} {forked}")
(folder / f"pid-{rank}.new").rename(folder / f"pid-{rank}")
for step in range(1_000_000):
    ends = torch.full((1,), float((folder / "end").exists()), device="cuda")  # does not wait for the GPU
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    if step % 8 == 0 and ends.item():  # only now and then, so that the program gets ahead of its GPU
        break
    if rank == hangs and step == 20:
        time.sleep(3600)  # hangs
    pace = 1.2 if rank == slow and (folder / "slow").exists() else 1.0
    # The work of the backward pass comes before all gradients, so a rank that is late with it is waited for.
    loss = Work.apply(wrapped(torch.randn(8, 16, device="cuda"))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.cuda.synchronize()
dist.destroy_process_group()
