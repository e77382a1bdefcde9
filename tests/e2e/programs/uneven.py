"""Trains with plain DistributedDataParallel or FSDP2, with one slow rank. Usage: uneven.py ddp|busy|gpu|fsdp2
RANK TIMES FOLDER

While there is a FOLDER/slow, the rank takes TIMES as long for its own part of the forward and backward pass.
This part is sleep, or with "busy" computing. With "gpu" the parameters claim to be on a GPU, whose simulated
clock answers two steps later. The script ends once there is a FOLDER/end. It prints the process of each rank,
and a line for each step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

FORWARD_S, LAYERS = 0.01, 4  # of one layer; the backward pass takes twice as long

how, slow, times, folder = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo")
slot = int(os.environ["LOCAL_RANK"]) if dist.get_world_size() == 3 else -1
pace = 1.0  # how many times longer this step takes
print(f"rank {dist.get_rank()} is process {os.getpid()}", flush=True)


def work(s: float) -> None:
    if how == "busy":
        end = time.thread_time() + s
        while time.thread_time() < end:
            pass
    else:
        time.sleep(s)


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        work(pace * FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        work(pace * 2 * FORWARD_S)
        return grad


class OnGpu(torch.nn.Parameter):
    is_cuda = True


class Event:
    newest = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.at_s = time.monotonic()
        Event.newest += 1
        self.number = Event.newest

    def query(self) -> bool:
        return Event.newest >= self.number + 4

    def elapsed_time(self, end: Event) -> float:
        assert end.query()
        return 1000 * (end.at_s - self.at_s)


class Layer(torch.nn.Linear):
    def forward(self, x):
        return Work.apply(super().forward(x))


model = torch.nn.Sequential(*(Layer(16, 16) for _ in range(LAYERS)))
if how == "fsdp2":
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
else:
    if how == "gpu":
        torch.cuda.Event, torch.cuda.current_stream = Event, lambda device: device
        torch.cuda.is_initialized, torch.cuda.is_current_stream_capturing = lambda: True, lambda: False
        for layer in model:
            layer.weight = OnGpu(layer.weight.detach())
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
    if dist.get_rank() == 0:
        print("a step", flush=True)
dist.destroy_process_group()
