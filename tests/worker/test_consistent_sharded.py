"""In consistent mode a sharded model ends with the bits of a model that each worker holds whole."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # parts of DTensors are found with it
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from elasticd import worker
from tests.worker.worlds import in_world

SAMPLES, BATCH, VIRTUAL_RANKS = 37, 17, 5  # the last batch reaches three of five virtual ranks


class Part(nn.Module):
    """Rows that no world divides, normalization over the batch, and dropout."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.up = nn.Linear(7, 11)
        self.norm = nn.BatchNorm1d(11)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(11, 7)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x).flatten(0, 1)
        return x + self.down(self.drop(torch.tanh(self.norm(up))).view(*x.shape[:2], -1))


class Stack(nn.Module):
    """Parameters that two layers share, one that is frozen, one that no sample uses, and one that only some
    virtual ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.blocks = nn.ModuleList(Part(recomputes) for recomputes in (False, True))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.never = nn.Linear(2, 2)
        self.seldom = nn.Linear(7, 7)
        self.inner = nn.Linear(7, 7, bias=False)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = self.tied(torch.tanh(self.inner(self.frozen(x))))
        return x + self.seldom(x) if bool(x.sum() > 0) else x


def shard(model: Stack, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def trained(accumulate: int = 1, **options: Any) -> str:
    """A digest of all that training leads to, and of what it says on its way."""
    torch.manual_seed(3)
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(SAMPLES, 4, 3, generator=generator)
    data = worker.Data(
        samples,
        global_batch=BATCH,
        virtual_ranks=VIRTUAL_RANKS,
        accumulate=accumulate,
        consistent=True,
        epochs=2,
    )
    state = worker.State(model=model, optimizer=optimizer, data=data, said=[], **options)

    @worker.run
    def run(state: worker.State) -> str:
        for step in state.steps():
            for batch in step:
                step.backward(state.model(batch).square().mean())
            norm = nn.utils.clip_grad_norm_(state.model.parameters(), 0.05)
            state.said += [step.loss.item(), float(full(norm)), torch.rand(1).item()]
            state.optimizer.step()
            if step.number != 1:  # the next step adds to the gradients
                state.optimizer.zero_grad()
            state.commit()
        return digest(state)

    return run(state)


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def digest(state: worker.State) -> str:
    model = state.model
    kept = [*model.parameters(), *model.buffers()]
    slots = [state.optimizer.state.get(parameter, {}) for parameter in model.parameters()]
    kept += [value for slot in slots for _, value in sorted(slot.items())]
    found = hashlib.sha256()
    for tensor in kept:
        found.update(full(tensor.detach()).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"{found.hexdigest()} {len(kept)} {state.said}"


def in_all_modes() -> list[str]:
    units = [1] if dist.get_world_size() % 2 else [1, 2]
    modes: list[dict[str, Any]] = [{}, *({"shard": shard, "unit": unit} for unit in units)]
    return [trained(1, **mode) for mode in modes] + [trained(2, **mode) for mode in modes]


@pytest.mark.parametrize("worlds", [(1, 2, 3), pytest.param((4, 6), marks=pytest.mark.slow)])
def test_one_digest_comes_out_of_ddp_and_fsdp2_and_hsdp_in_a_world_of_any_size(
    tmp_path: Path, worlds: tuple[int, ...]
) -> None:
    once, twice = in_world(1, tmp_path, alone)[0]
    assert once != twice
    for size in worlds:
        for found in in_world(size, tmp_path, in_all_modes):
            half = len(found) // 2
            assert found == [once] * half + [twice] * half, size


def alone() -> list[str]:
    return [trained(1), trained(2)]
