"""Trains on gloo. At each start a worker hangs in another way; at the last start the training ends well. The
words after a hash name the lines that the evidence must name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

STEPS = 30
WRONG_AT = 20
FAULTS = sys.argv[1].split(",")

dist.init_process_group("gloo")
rank = dist.get_rank()
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
fault = FAULTS[attempt] if attempt < len(FAULTS) else ""
guilty = rank == 1


class Numbers(Dataset):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if fault == "loading" and guilty and index == WRONG_AT:
            time.sleep(3600)  # loading
        return torch.ones(4)


def deadlock() -> None:
    """Let two threads wait for each other's lock."""
    first, second = threading.Lock(), threading.Lock()
    both = threading.Barrier(2)

    def other() -> None:
        with second:
            both.wait()
            first.acquire()

    threading.Thread(target=other, daemon=True).start()
    with first:
        both.wait()
        second.acquire()  # deadlock


def evaluate(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.ones(100, 100).sum()
    subprocess.run([sys.executable, "-S", "-c", f"import time; time.sleep({seconds})"], check=True)


def go_wrong() -> None:
    match fault:
        case "stopped" if guilty:
            os.kill(os.getpid(), signal.SIGSTOP)
        case "deadlock" if guilty:
            deadlock()
        case "mismatched" if guilty:
            dist.all_gather([torch.ones(1)] * dist.get_world_size(), torch.ones(1))  # mismatched
        case "evaluation" if rank == 0:
            evaluate(float(os.environ["EVALUATION_S"]))
    if not (fault == "missing" and guilty):
        dist.barrier()  # barrier


model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, batch in enumerate(DataLoader(Numbers())):
    optimizer.zero_grad()
    model(batch).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # all_reduce
    optimizer.step()
    time.sleep(0.02)
    if step == WRONG_AT:
        go_wrong()
print(f"rank {rank} finished", flush=True)
dist.destroy_process_group()
