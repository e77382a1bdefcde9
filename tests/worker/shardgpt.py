"""The small GPT of workers/gpt.py in FSDP2 or HSDP, with elasticd.worker. Each step's loss and gradients are
those of one global batch, whatever the number of workers, but for rounding."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # parts of DTensors are found with it
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from elasticd import worker
from tests.worker.jobs import begin

BATCH, CONTEXT = 12, 8
PROGRAM = Path(__file__).parents[2] / "workers/gpt.py"


def _program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpt_of_workers", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpt = _program()
SHAPE = gpt.Shape(layers=2, heads=2, width=12, context=CONTEXT, vocabulary=31)


def shard(model: Any, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def work(address: str, folder: str, name: str, news: str, steps: int, redundancy: int, unit: int) -> None:
    """A whole script. ``news``: the socket that is told of each committed step, and of the outcome."""
    begin(address, folder, name)
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.connect("\0" + news)
    torch.manual_seed(5)
    model = gpt.GPT(SHAPE).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = worker.State(model=model, optimizer=optimizer, shard=shard, redundancy=redundancy, unit=unit)

    @worker.run
    def run(state: worker.State) -> None:
        for step in state.steps(steps):
            loss = learn(state, step)
            nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
            state.optimizer.step()
            state.optimizer.zero_grad()
            told.send(json.dumps([name, "step", step, loss]).encode())
            state.commit()
        weights = [p.full_tensor().sum().item() for p in state.model.parameters()]
        told.send(json.dumps([name, "outcome", steps, weights]).encode())

    run(state)


def learn(state: worker.State, step: int) -> float:
    """Compute the gradients of a step. Return the loss of its global batch."""
    size = worker.world_size()
    text = torch.randint(0, 31, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(step))
    mine = text[worker.rank() :: size]
    logits = state.model(mine[:, :-1]) if len(mine) else state.model(text[:1, :-1])[:0]
    targets = mine[:, 1:].flatten()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum") / (BATCH * CONTEXT)
    (loss * size).backward()  # FSDP divides gradients by the number of workers
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item()
