"""Saves an FSDP2 model while the GPU is busy, trains on, and loads the checkpoint into another model. Usage:
sharded.py FOLDER. The program fails if anything differs from what was saved."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from elasticd.worker.checkpoints import Checkpoints

CYCLES = 4_000_000_000  # cycles of the GPU's clock: two seconds, far longer than a save takes


def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 8)).cuda()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    held = [optimizer.state[p][name] for p in model.parameters() for name in ("exp_avg", "exp_avg_sq")]
    return [tensor.full_tensor().clone() for tensor in [*model.parameters(), *held]]


torch.cuda.set_device(0)
dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
model, optimizer = made(1)
checkpoints = Checkpoints(sys.argv[1])
for number in (1, 2, 3):
    step(model, optimizer)
    assert checkpoints.save({"model": model, "optimizer": optimizer}, number) and checkpoints.wait(120)
expected = whole(model, optimizer)
torch.cuda.synchronize()
torch.cuda._sleep(CYCLES)
busy = torch.cuda.Event()
busy.record()
assert checkpoints.save({"model": model, "optimizer": optimizer}, 4)
assert not busy.query(), "the save has waited for the GPU"
step(model, optimizer)
assert checkpoints.wait(120) and not checkpoints.failed, checkpoints.last_error
assert not torch.equal(whole(model, optimizer)[0], expected[0])
model, optimizer = made(2)
step(model, optimizer)
assert checkpoints.load({"model": model, "optimizer": optimizer}) == 4
for found, was in zip(whole(model, optimizer), expected, strict=True):
    assert torch.equal(found, was)
checkpoints.close()
dist.destroy_process_group()
print("all as it was")
