"""What the workers of tests/gpu/test_in_place.py run: a small model on the GPU that all of them share. Its
steps are the same in a world of one and of two. The workers write down what they do."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from elasticd import worker
from elasticd.checkpoint.client.tensors import full_of
from elasticd.worker.world.group import device
from tests.gpu.sharing import share_the_gpu
from tests.worker.jobs import Gate, Journal, begin, commit

STEPS = 12


def model_and_optimizer(on: str = "cuda") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)).to(on)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def shard(model: Any, mesh: DeviceMesh) -> None:
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)


def use_gloo() -> None:
    """Let gloo carry what is on the GPU too, in all groups to come."""
    init = dist.init_process_group
    dist.init_process_group = lambda _, **options: init("gloo", **options)


def alone(_address: str, folder: str) -> None:
    """Train without an agent, in a world of one."""
    work("", folder, "alone")


def alone_consistently(_address: str, folder: str) -> None:
    work_consistently("", folder, "alone")


def work(
    address: str,
    folder: str,
    name: str,
    dies_at: int = -1,
    waits_at: int = -1,
    *,
    gloo: bool = False,
    built_on: str = "cuda",
    **options: Any,
) -> None:
    """Train. Each rank computes the same gradients, whose mean is exact. ``waits_at``: where the worker waits
    once for the test. ``gloo``: without NCCL. ``built_on``: where the script makes the model. All other
    options go to State."""
    share_the_gpu()
    if gloo:
        use_gloo()
    begin(address, folder, name)
    journal = Journal(folder, name)
    assert device().index == 0, "a worker asks before LOCAL_RANK is its rank in a world"
    model, optimizer = model_and_optimizer(built_on)
    there = torch.ones(1, device="cuda")  # as long as the CUDA context lives

    @worker.run
    def train(state: worker.State) -> None:
        nonlocal waits_at
        group = dist.group.WORLD
        backend = group._get_backend(torch.device("cuda")) if group else None
        journal.write(entered=state.step, world=worker.world_size(), backend=type(backend).__name__)
        for step in state.steps(STEPS):
            batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).cuda()
            loss = state.model(batch).square().mean()
            if step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == waits_at:
                waits_at = -1
                Gate(Path(folder, "gate")).wait()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            worker.report(loss=loss)
            commit(state, journal)
            journal.write(losses=[step, loss.item()])
        journal.write(outcome=weights(state.model))

    train(worker.State(model=model, optimizer=optimizer, **options))
    journal.write(pid=os.getpid(), there=there.item())


def work_consistently(address: str, folder: str, name: str) -> None:
    """Train in consistent mode: four virtual ranks, dealt to however many workers there are."""
    share_the_gpu()
    begin(address, folder, name)
    torch.cuda.set_device(0)
    model, optimizer = model_and_optimizer()
    samples = [(torch.randn(8, generator=torch.Generator().manual_seed(n)),) for n in range(64)]
    data = worker.Data(samples, global_batch=8, virtual_ranks=4, seed=3, consistent=True)

    @worker.run
    def train(state: worker.State) -> None:
        for step in state.steps():
            for (x,) in step:
                step.backward(state.model(x.cuda()).square().mean())
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.commit()

    train(worker.State(model=model, optimizer=optimizer, data=data))
    Journal(folder, name).write(outcome=weights(model))


def weights(model: nn.Module) -> list[Any]:
    """Return all values of the parameters. All workers of a world call it together."""
    whole = [full_of(parameter.detach()) for parameter in model.parameters()]
    return [parameter.double().flatten().tolist() for parameter in whole]
