"""In consistent mode a step is the same to the last bit in a world of any size."""

from __future__ import annotations

import copy
import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from elasticd.core.dealing import parts_of
from elasticd.worker import buckets, chance
from elasticd.worker.consistent import Consistent
from tests.worker.worlds import in_world

SEED = 11
BATCHES = [24, 24, 13, 3]  # the last is too short to reach all virtual ranks


class Odd(nn.Module):
    """Much of what could depend on who computes it: normalization over the batch, dropout, other random
    numbers, parameters that some samples do not use or nobody does, one that is used twice, other memory
    formats, other types, a large buffer that changes and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.3)
        self.tied = nn.Linear(6, 6)
        self.coarse = nn.Linear(6, 6).to(torch.bfloat16)
        self.seldom = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(1 << 17))
        self.register_buffer("table", torch.ones(1 << 17), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.relu(self.norm(self.conv(x)))).mean((2, 3))
        x = self.tied(self.tied(x)) * random.random() + np.random.rand()
        x = x + self.coarse(x.to(torch.bfloat16)).float() + self.frozen(x)
        if bool(x.sum() > 6 * len(x)):
            x = x + self.seldom(x)
        with torch.no_grad():
            self.queue[: len(x)] += x[:, 0]
            self.count += len(x)
        return (x * self.table[0] + self.queue.mean()).square().mean()


def made() -> tuple[Odd, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = Odd()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def samples_of(number: int) -> torch.Tensor:
    return torch.randn(BATCHES[number], 3, 5, 5, generator=torch.Generator().manual_seed(number))


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, *more: Any) -> str:
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [torch.zeros(1) if p.grad is None else p.grad for p in model.parameters()]
    tensors += [t for s in optimizer.state_dict()["state"].values() for t in s.values()]
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest() + repr(more)


def drawn() -> tuple[float, ...]:
    """What comes next."""
    return torch.rand(1).item(), random.random(), np.random.rand()


def trained(virtual_ranks: int, accumulate: int = 1) -> list[str]:
    """After each step, all there is."""
    buckets.FIRST_BYTES = buckets.BUCKET_BYTES = 300
    model, optimizer = made()
    rank, world = dist.get_rank(), dist.get_world_size()
    place = [0]
    reduction = Consistent([model], virtual_ranks, SEED, lambda: place)
    found = []
    for number, samples in enumerate(BATCHES):
        place[0] = number
        torch.rand(rank)  # whatever was drawn before
        x = samples_of(number)
        parts = parts_of(rank, world, samples=samples, virtual_ranks=virtual_ranks, accumulate=accumulate)
        for part in parts:
            with reduction.part(part):
                reduction.backward(model(x[part.samples.start : part.samples.stop]), part)
        reduction.finish(parts)
        assert reduction.loss is not None
        optimizer.step()
        found.append(digest(model, optimizer, reduction.loss.item(), drawn()))
        optimizer.zero_grad()
    reduction.close()
    return found


def trained_the_obvious_way(virtual_ranks: int, accumulate: int) -> list[str]:
    """One virtual rank after the other, each with a model of its own; then the tree, by recursion."""
    model, optimizer = made()
    trained = [p for p in model.parameters() if p.requires_grad]
    found = []
    for number, samples in enumerate(BATCHES):
        x = samples_of(number)
        gradients: list[list[torch.Tensor]] = []
        losses: list[torch.Tensor] = []
        used = [False] * len(trained)
        parts = parts_of(0, 1, samples=samples, virtual_ranks=virtual_ranks, accumulate=accumulate)
        for v in range(virtual_ranks):
            mine = [p for p in parts if p.virtual_rank == v]
            own = copy.deepcopy(model)
            loss = torch.zeros(())
            chance.draw_from(SEED, number, v)
            for i, part in enumerate(mine):
                one = own(x[part.samples.start : part.samples.stop]) * part.weight
                one.backward()
                loss = one.detach() if i == 0 else loss + one.detach()
            parameters = [p for p in own.parameters() if p.requires_grad]
            gradients.append([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
            used = [u or p.grad is not None for u, p in zip(used, parameters, strict=True)]
            losses.append(loss)
        for mine_, last in zip(model.buffers(), own.buffers(), strict=True):
            mine_.copy_(last)
        for i, parameter in enumerate(trained):
            parameter.grad = tree([g[i] for g in gradients]) if used[i] else None
        optimizer.step()
        chance.draw_from(SEED, number, -1)
        found.append(digest(model, optimizer, tree(losses).item(), drawn()))
        optimizer.zero_grad()
    return found


def tree(values: list[torch.Tensor]) -> torch.Tensor:
    if len(values) == 1:
        return values[0]
    half = 1
    while half * 2 < len(values):
        half *= 2
    return tree(values[:half]) + tree(values[half:])


@pytest.mark.parametrize(("virtual_ranks", "accumulate"), [(5, 1), (8, 2)])
def test_in_a_world_of_any_size_a_step_is_what_virtual_ranks_one_by_one_would_make_it(
    tmp_path: Path, virtual_ranks: int, accumulate: int
) -> None:
    [obvious] = in_world(1, tmp_path, trained_the_obvious_way, virtual_ranks, accumulate)
    assert len(set(obvious)) == len(BATCHES)
    for world in (1, 2, 3, 5, 6):
        for rank, found in enumerate(in_world(world, tmp_path, trained, virtual_ranks, accumulate)):
            assert found == obvious, f"worker {rank} of {world}"
