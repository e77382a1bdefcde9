"""A script in which each worker has a part of the model: a stage of a pipeline, or parts of matrices. Each
step's gradients are those of one global batch, so within rounding they are the same in a world of any number
of units."""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elasticd import worker
from elasticd.data.auditnotes import EVERY, FOLDER, VARIABLE
from elasticd.worker.steps import Step
from tests.worker.jobs import NOTHING, Accident, begin, commit, hear_of_leaving
from tests.worker.step_samples import StepSamples, noise

STEPS = 8
BATCH = 8
batch_of = functools.partial(noise, BATCH)
UNIT = 2


def whole() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def stage(model: nn.Sequential, unit: DeviceMesh) -> nn.Module:
    cut = {0: (0, 2), 1: (2, 3)}[unit.get_local_rank()]
    return nn.Sequential(OrderedDict((str(n), model[n]) for n in range(*cut)))


def rows_and_columns(model: nn.Sequential, unit: DeviceMesh) -> None:
    parallelize_module(model, unit, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def pipelined(state: worker.State, step: Step, inputs: torch.Tensor) -> None:
    """Compute the gradients stage by stage. ``inputs``: this unit's."""
    group = worker.mesh(UNIT)["unit"].get_group()
    if dist.get_rank(group) == 0:
        outputs = state.model(inputs)
        dist.send(outputs.detach(), group=group, group_dst=1)
        gradient = torch.empty_like(outputs)
        dist.recv(gradient, group=group, group_src=1)
        outputs.backward(gradient)
        step.computed()
    else:
        arrived = torch.empty(len(inputs), 6, dtype=inputs.dtype)
        dist.recv(arrived, group=group, group_src=0)
        loss = nn.functional.mse_loss(state.model(arrived.requires_grad_()), inputs)
        (loss * step.weight).backward()
        assert arrived.grad is not None
        dist.send(arrived.grad, group=group, group_dst=0)
        step.computed(loss)


def parallel(state: worker.State, step: Step, inputs: torch.Tensor) -> None:
    step.backward(nn.functional.mse_loss(state.model(inputs), inputs))


SPLITS: dict[str, Any] = {"pipeline": (stage, pipelined), "tensor": (rows_and_columns, parallel)}


def train(
    address: str, folder: str, name: str, accident: Accident = NOTHING, *, by: str = "pipeline"
) -> None:
    """Run the whole script. Two units share three virtual ranks, so one of them has a batch that does not
    count."""
    journal = begin(address, folder, name, "")
    os.environ |= {VARIABLE: str(Path(folder) / FOLDER), EVERY: "4"}
    split, gradients = SPLITS[by]
    model = whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    @worker.run
    def run(state: worker.State) -> None:
        mesh = worker.mesh(UNIT)
        replicas = mesh["replicate"]
        journal.write(entered=state.step, world=worker.world_size())
        for step in state.steps():
            accident("start", step.number)
            state.optimizer.zero_grad()
            for inputs in step:
                gradients(state, step, inputs)
            accident("backward", step.number)
            for parameter in state.model.parameters():
                gradient = parameter.grad
                part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                assert part is not None
                dist.all_reduce(part, group=replicas.get_group())
            accident("summed", step.number)
            state.optimizer.step()
            accident("stepped", step.number)
            commit(state, journal)
        journal.write(weights=weights(state.model), place=mesh["unit"].get_local_rank())

    data = worker.Data(
        StepSamples(STEPS, BATCH, batch_of), global_batch=BATCH, shuffle=False, virtual_ranks=3
    )
    run(worker.State(model=model, optimizer=optimizer, split=split, unit=UNIT, data=data))


def freeze(address: str, folder: str, name: str, accident: Accident = NOTHING) -> None:
    """Run a script that freezes all parameters at its second step, and trains one at the third that was
    frozen at the beginning."""
    hear_of_leaving()
    journal = begin(address, folder, name, "")
    model = whole()
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    @worker.run
    def run(state: worker.State) -> None:
        journal.write(
            entered=state.step, trained=[n for n, p in state.model.named_parameters() if p.requires_grad]
        )
        while state.step < 5:
            accident("start", state.step)
            if state.step == 1:
                state.model.requires_grad_(False)
            if state.step == 2 and "2.bias" in dict(state.model.named_parameters()):
                state.model[-1].bias.requires_grad_(True)
            state.commit()

    run(worker.State(model=model, optimizer=optimizer, split=stage, unit=UNIT))


def weights(model: nn.Module) -> dict[str, Any]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().tolist()
        for name, p in model.named_parameters()
    }


def undisturbed() -> dict[str, Any]:
    """Return the weights after all steps, without workers."""
    model = whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(STEPS):
        batch = batch_of(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()
    return weights(model)
