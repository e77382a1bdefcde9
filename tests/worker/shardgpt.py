"""The small GPT of workers/gpt.py in FSDP2 or HSDP, with elasticd.worker. Each step's loss and gradients are
those of one global batch, whatever the number of workers, but for rounding. In consistent mode they are the
same to the bit."""

from __future__ import annotations

import hashlib
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

BATCH, CONTEXT, VIRTUAL_RANKS = 12, 8, 6
CONSISTENT, WHOLE = "consistent", "whole"
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


def work(
    address: str, folder: str, name: str, news: str, steps: int, redundancy: int, unit: int, mode: str = ""
) -> None:
    """A whole script. ``news``: the socket that is told of each committed step, and of the outcome. ``mode``:
    "" without consistent mode, ``CONSISTENT``, or ``WHOLE``, which is that mode for a model that is not
    sharded."""
    begin(address, folder, name)
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.connect("\0" + news)
    torch.manual_seed(5)
    model = gpt.GPT(SHAPE)
    options: dict[str, Any] = {"shard": shard, "redundancy": redundancy, "unit": unit}
    if mode:
        text = torch.randint(0, 31, (steps * BATCH, CONTEXT + 1))
        data = worker.Data(text, global_batch=BATCH, virtual_ranks=VIRTUAL_RANKS, consistent=True)
        options = {"data": data} if mode == WHOLE else {**options, "data": data}
    else:
        model = model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = worker.State(model=model, optimizer=optimizer, **options)

    @worker.run
    def run(state: worker.State) -> None:
        for step in state.steps(steps):
            loss = learn_in_parts(state, step) if mode else learn(state, step)
            nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
            state.optimizer.step()
            state.optimizer.zero_grad()
            told.send(json.dumps([name, "step", step.number if mode else step, loss]).encode())
            state.commit()
        weights = [getattr(p, "full_tensor", lambda p=p: p)() for p in state.model.parameters()]
        found = [digest(p) if mode else p.sum().item() for p in weights]
        told.send(json.dumps([name, "outcome", steps, found]).encode())

    run(state)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def learn_in_parts(state: worker.State, step: Any) -> float:
    """Compute the gradients of a step of consistent mode. Return the loss of its global batch."""
    for text in step:
        logits = state.model(text[:, :-1])
        step.backward(nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()))
    loss: float = step.loss.item()
    return loss


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
