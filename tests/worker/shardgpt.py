"""The small GPT of workers/gpt.py in FSDP2 or HSDP, with elasticd.worker. Each step's loss and gradients are
those of one global batch, whatever the number of workers: within rounding, and in consistent mode to the bit.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # importing this module also finds parts of DTensors
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from elasticd import worker
from elasticd.checkpoint.client import resuming
from elasticd.checkpoint.client.tensors import full_of
from elasticd.data.auditnotes import FOLDER, VARIABLE
from elasticd.worker.steps import Step
from elasticd.worker.world import connecting
from tests.worker.jobs import begin
from tests.worker.shardjob import copy_from
from tests.worker.step_samples import StepSamples

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
    shard_blocks(model, mesh)
    fully_shard(model, mesh=mesh)


def shard_blocks(model: Any, mesh: DeviceMesh) -> None:
    """Shard the blocks only: the embedding and the norm are replicated."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)


@functools.cache
def text_of(step: int) -> torch.Tensor:
    return torch.randint(0, 31, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(step))


def work(
    address: str,
    folder: str,
    name: str,
    news: str,
    steps: int,
    redundancy: int,
    unit: int,
    *,
    saver: str = "",
    virtual_ranks: int = 0,
    consistent: bool = False,
    whole: bool = False,
    overlap: bool = False,
    blocks_only: bool = False,
    bare: bool = False,
    late: bool = False,
) -> None:
    """Run the whole script. ``news``: the socket that gets each committed step, the outcome, and each read
    from disk. ``saver``: commits are saved, in its memory and on disk. ``virtual_ranks``: 0, or the number of
    virtual ranks if the samples come from worker.Data and are noted for an audit. ``consistent``: in
    consistent mode. ``whole``: each worker has the whole model. ``blocks_only``: only the blocks are sharded.
    ``bare``: the model is on the meta device at first. ``late``: two workers are connected when they first
    talk."""
    begin(address, folder, name, saver)
    if late:
        connecting.MOST_AT_ONCE = 1
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.connect("\0" + news)
    options: dict[str, Any] = {}
    if saver:
        tell_of_reads(lambda: told.send(json.dumps([name, "read", 0, 0]).encode()))
        options["checkpoints"] = f"{folder}/checkpoints"
    if virtual_ranks:
        os.environ[VARIABLE] = str(Path(folder) / FOLDER)
        cut = {"global_batch": BATCH, "virtual_ranks": virtual_ranks}
        options["data"] = worker.Data(
            StepSamples(steps, BATCH, text_of), shuffle=False, consistent=consistent, **cut
        )
    torch.manual_seed(5)
    model = gpt.GPT(SHAPE).double()
    if bare:
        options["init"] = functools.partial(copy_from, model)
        with torch.device("meta"):
            model = gpt.GPT(SHAPE).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if not whole:
        options |= {
            "shard": shard_blocks if blocks_only else shard,
            "redundancy": redundancy,
            "overlap": overlap,
            "unit": unit,
        }
    state = worker.State(model=model, optimizer=optimizer, **options)

    @worker.run
    def run(state: worker.State) -> None:
        for begun in state.steps(steps):
            step = begun if isinstance(begun, int) else begun.number
            loss = learn(state, begun) if isinstance(begun, int) else learn_of_data(state, begun)
            clip(state.model, 1.0, apart=blocks_only)
            state.optimizer.step()
            state.optimizer.zero_grad()
            told.send(json.dumps([name, "step", step, loss]).encode())
            state.commit()
        weights = [outcome(full_of(p.detach()), exact=consistent) for p in state.model.parameters()]
        told.send(json.dumps([name, "outcome", steps, weights]).encode())

    run(state)


def clip(model: Any, norm_max: float, *, apart: bool) -> None:
    """Clip the gradients. ``apart``: those of the blocks and the others apart, after taking one norm."""
    if not apart:
        nn.utils.clip_grad_norm_(model.parameters(), norm_max)
        return
    named = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    of_blocks = [p for name, p in named if name.startswith("blocks.")]
    kinds = [of_blocks, [p for name, p in named if not name.startswith("blocks.")]]
    norms = [full_of(nn.utils.get_total_norm([p.grad for p in its])) for its in kinds]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for its in kinds:
        nn.utils.clip_grads_with_norm_(its, norm_max, norm)


def outcome(weights: torch.Tensor, *, exact: bool) -> float | str:
    if exact:
        return hashlib.sha256(weights.contiguous().numpy().tobytes()).hexdigest()
    return weights.sum().item()


def learn(state: worker.State, step: int) -> float:
    """Compute the gradients of a step. Return the loss of its global batch."""
    size, text = worker.world_size(), text_of(step)
    mine = text[worker.rank() :: size]
    logits = state.model(mine[:, :-1]) if len(mine) else state.model(text[:1, :-1])[:0]
    targets = mine[:, 1:].flatten()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum") / (BATCH * CONTEXT)
    (loss * size).backward()  # FSDP divides gradients by the number of workers
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item()


def learn_of_data(state: worker.State, step: Step) -> float:
    """Compute the gradients of a step from this worker's batches of worker.Data. Return the loss of the
    global batch."""
    total = torch.zeros((), dtype=torch.float64)
    for text in step:
        logits = state.model(text[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        total += loss.detach() * step.weight
        step.backward(loss)
    if step.loss is not None:  # in consistent mode
        return step.loss.item()
    dist.all_reduce(total)
    return total.item()


def tell_of_reads(tell: Callable[[], object]) -> None:
    """Call ``tell`` whenever this worker reads a checkpoint from disk."""
    read = resuming.fill

    def fill(*args: Any, **options: Any) -> None:
        tell()
        read(*args, **options)

    resuming.fill = fill
