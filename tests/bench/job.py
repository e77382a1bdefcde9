"""The job that is measured: a DDP model of about two million parameters on gloo. With BENCH_DEVICE=cuda all
ranks share the machine's first GPU, and use NCCL.

Each rank appends a line per step to the file named by BENCH_STEPS: the time (CLOCK_MONOTONIC, which all
processes of a machine share), its rank, the world size, its pid and the step. Before its first step it writes
marks of its progress: the time, a word and its pid.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LOG = os.open(os.environ["BENCH_STEPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def mark(what: str) -> None:
    os.write(LOG, f"{time.monotonic():.6f} {what} {os.getpid()}\n".encode())


def note(place: str, step: int) -> None:
    """Write that a step was made. ``place``: the rank, the world size and the pid."""
    os.write(LOG, f"{time.monotonic():.6f} {place} {step}\n".encode())


mark("imported")
# The memory of a larger model. A worker without it has about 350 MB.
BALLAST = torch.ones(max(0, int(os.environ.get("BENCH_MEGABYTES", "350")) - 350) << 18)
WIDTH = int(os.environ.get("BENCH_WIDTH", "700"))
BATCH = int(os.environ.get("BENCH_BATCH", "64"))
STEPS = int(os.environ.get("BENCH_STEPS_MAX", "1000000"))
ON_GPU = os.environ.get("BENCH_DEVICE", "cpu") == "cuda"


def device() -> torch.device:
    """Return where the model belongs. Call it before NCCL is used."""
    if not ON_GPU:
        return torch.device("cpu")
    from tests.gpu.sharing import share_the_gpu

    share_the_gpu()
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def main() -> None:
    on = device()
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    if ON_GPU:
        dist.all_reduce(torch.zeros(1, device=on))  # NCCL connects the ranks only now
    mark("joined")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers).to(on))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(BATCH, WIDTH, device=on)
    mark("built")
    place = f"{rank} {world} {os.getpid()}"
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if ON_GPU:
            torch.cuda.synchronize()
        note(place, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
