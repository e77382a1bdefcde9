"""Trains with DDP until a file called "crash" turns up, and crashes; after that, trains a little and ends."""

import gc
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    told = torch.zeros(1)
    while True:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        told.fill_(float(attempt > 0 or os.path.exists("crash")))
        dist.all_reduce(told, dist.ReduceOp.MIN)
        if told.item():
            break
        time.sleep(0.01)
    print(f"rank {rank} attempt {attempt} {'forked' if gc.get_freeze_count() > 1000 else 'fresh'}")
    if attempt == 0:
        sys.exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
