"""A DDP training with the fault that its first argument names. The worker sleeps instead of computing, so
that other work on the machine matters little."""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FAULT = sys.argv[1]
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
WIDTH = 600 if FAULT == "communication" else 16
BATCH = 8 // WORLD if FAULT == "global_batch" else 4


class Samples(Dataset):
    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, index):
        if FAULT == "loader":
            time.sleep(0.01)
        return torch.ones(WIDTH)


def compute(step):
    match FAULT:
        case "small_batch" | "communication":
            return
        case "no_cpu":
            until = time.monotonic() + 0.02
            while time.monotonic() < until:
                pass
        case "slow_worker" if RANK == 1:
            time.sleep(0.06)
        case "uneven_work" if step % WORLD == RANK:
            time.sleep(0.06)
        case "slower_compute":
            time.sleep(0.02 * WORLD)
        case _:
            time.sleep(0.02)


layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1))
model = DistributedDataParallel(layers)
optimizer = torch.optim.SGD(layers.parameters(), lr=0.001)
more = torch.zeros(8 << 20)
for step, batch in enumerate(DataLoader(Samples(), BATCH)):
    compute(step)
    model(batch).sum().backward()
    if FAULT == "communication":
        dist.all_reduce(more)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
