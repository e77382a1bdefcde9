"""In consistent mode a step has the same bits in a world of any size."""

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
import torch.utils.checkpoint
from torch import nn

from elasticd import worker
from elasticd.data.dealing import parts_of
from elasticd.worker.gradients import buckets
from elasticd.worker.gradients.buckets import Bucket, Exchange
from elasticd.worker.gradients.consistent import Arithmetic, ConsistentReduction
from elasticd.worker.values import randomness
from tests.worker.worlds import in_world

SEED = 11
BATCHES = [24, 24, 13, 3]  # the last batch is too short for all virtual ranks


class Odd(nn.Module):
    """A model with much that could depend on which worker computes it: normalization over the batch, dropout,
    other random numbers, parameters that only some samples use or that none uses, a parameter that is used
    twice, other memory formats and types, and large buffers: one that changes, one that changes through
    ``.data``, and one that does not change."""

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
        self.register_buffer("codes", torch.zeros(1 << 17))
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
            self.codes.data[: len(x)] += x[:, 1]
            self.count += len(x)
        return (x * self.table[0] + self.queue.mean() + self.codes.mean()).square().mean()


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
    """Return the next random numbers."""
    return torch.rand(1).item(), random.random(), np.random.rand()


def trained(virtual_ranks: int, accumulate: int = 1) -> list[str]:
    """Return all values of the training after each step."""
    buckets.FIRST_BYTES = buckets.BUCKET_BYTES = 300
    model, optimizer = made()
    rank, world = dist.get_rank(), dist.get_world_size()
    place, own = [0], torch.Generator()
    reduction = ConsistentReduction([model], virtual_ranks, SEED, lambda: place, generators=[own])
    found = []
    for number, samples in enumerate(BATCHES):
        place[0] = number
        torch.rand(rank)  # the random numbers before must not matter
        x = samples_of(number)
        parts = parts_of(rank, world, samples=samples, virtual_ranks=virtual_ranks, accumulate=accumulate)
        for part in parts:
            with reduction.part(part):
                loss = model(x[part.samples.start : part.samples.stop])
                reduction.backward(loss * torch.rand((), generator=own), part)
        reduction.finish(parts)
        assert reduction.loss is not None
        optimizer.step()
        found.append(digest(model, optimizer, reduction.loss.item(), drawn()))
        optimizer.zero_grad()
    reduction.close()
    return found


def trained_the_obvious_way(virtual_ranks: int, accumulate: int) -> list[str]:
    """Train in the simplest way: one virtual rank after the other, each with a copy of the model. Then add
    the gradients up in the order of the tree, by recursion."""
    model, optimizer = made()
    generator = torch.Generator()
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
            randomness.seed_all(SEED, number, v, generators=[generator])
            for i, part in enumerate(mine):
                one = own(x[part.samples.start : part.samples.stop])
                one = one * torch.rand((), generator=generator) * part.weight
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
        randomness.seed_all(SEED, number, -1)
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


@pytest.mark.parametrize(("virtual_ranks", "accumulate", "worlds"), [(5, 1, (1, 2, 6)), (8, 2, (3, 5))])
def test_in_a_world_of_any_size_a_step_is_what_virtual_ranks_one_by_one_would_make_it(
    tmp_path: Path, virtual_ranks: int, accumulate: int, worlds: tuple[int, ...]
) -> None:
    [obvious] = in_world(1, tmp_path, trained_the_obvious_way, virtual_ranks, accumulate)
    assert len(set(obvious)) == len(BATCHES)
    for world in worlds:
        for rank, found in enumerate(in_world(world, tmp_path, trained, virtual_ranks, accumulate)):
            assert found == obvious, f"worker {rank} of {world}"


def a_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2))


def test_what_cannot_be_consistent_is_refused_in_a_sentence() -> None:
    def refused(match: str, model: nn.Module | None = None, **options: Any) -> None:
        data = worker.Data(list(range(8)), global_batch=4, virtual_ranks=2, consistent=True)
        with pytest.raises(TypeError, match=match):
            worker.State(model, data=data, **options)

    refused("SyncBatchNorm 1 adds up over the workers", nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
    refused("Embedding 0 has sparse gradients", nn.Sequential(nn.Embedding(4, 2, sparse=True)))
    refused("leave out wrap=", a_model(), wrap=None)
    refused("needs a model")
    with pytest.raises(TypeError, match="cannot be consistent: give Data global_batch"):
        worker.Data(list(range(8)), worker_batch=4, consistent=True)


def test_a_newcomer_uses_as_many_threads_or_refuses_to_compute_other_bits() -> None:
    before = torch.get_num_threads()
    arithmetic = Arithmetic(torch.device("cpu"))
    try:
        arithmetic.load_state_dict({**arithmetic.state_dict(), "threads": 3})
        assert torch.get_num_threads() == arithmetic.state_dict()["threads"] == 3
    finally:
        torch.set_num_threads(before)
    for other, match in (
        ({"cpu": "Z80"}, "the processor's instructions is .* here and Z80 where the training began"),
        ({"torch": "1.0"}, "install the same version everywhere"),
        ({"gpu": "Voodoo"}, "none here and Voodoo where"),
    ):
        with pytest.raises(ValueError, match=match):
            arithmetic.load_state_dict({**arithmetic.state_dict(), **other})


def test_a_gradient_that_comes_in_two_pieces_is_an_error_and_not_half_a_sum(tmp_path: Path) -> None:
    assert "use_reentrant=False" in in_world(1, tmp_path, torn_gradient)[0]


def torn_gradient() -> str:
    model = nn.Linear(3, 3)
    reduction = ConsistentReduction([model], 1, SEED, lambda: [0])

    def twice(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)
        return x.sum()

    [part] = parts_of(0, 1, samples=4, virtual_ranks=1)
    try:
        with reduction.part(part):
            reduction.backward(twice(torch.ones(4, 3, requires_grad=True)), part)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_steps_add_up_until_gradients_are_set_to_zero_and_parameters_may_be_frozen_meanwhile(
    tmp_path: Path,
) -> None:
    expected = in_world(1, tmp_path, accumulated)[0]
    assert in_world(3, tmp_path, accumulated) == [expected] * 3
    first, both, frozen = expected
    assert both == [[2 * v for v in gradient] for gradient in first]
    assert frozen[0] == [] and frozen[1] == first[1]


def accumulated() -> list[list[list[float]]]:
    """Return the gradients of a step, of the same step made twice, and of the step with one parameter
    frozen."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    reduction = ConsistentReduction([model], 4, SEED, lambda: [0])
    x = torch.randn(8, 3)
    found = []

    def step() -> None:
        parts = parts_of(dist.get_rank(), dist.get_world_size(), samples=8, virtual_ranks=4)
        for part in parts:
            with reduction.part(part):
                reduction.backward(model(x[part.samples.start : part.samples.stop]).square().mean(), part)
        reduction.finish(parts)
        found.append([[] if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()])

    step()
    step()
    model.zero_grad()
    model.weight.requires_grad_(False)
    step()
    return found


def test_a_virtual_rank_without_a_gradient_adds_zeros_to_the_sum() -> None:
    """A worker that did not add the zeros would keep a negative zero that other workers do not have."""
    bucket = Bucket([0], [torch.zeros(2)], Exchange([range(2)], 0, 2))
    bucket.add([torch.tensor([-0.0, 1.0])])
    bucket.add([None])
    bucket.hand_in(torch.empty(0))
    bucket.add_up()
    bucket.gather()
    assert bucket.sums[0].tolist() == [0.0, 1.0]
    assert not bucket.sums[0].signbit().any()
