"""In consistent mode a sharded model ends with the bits of a model that each worker holds whole."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint  # importing this module also finds parts of DTensors
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from elasticd import worker
from elasticd.worker.gradients import whole_norms
from elasticd.worker.gradients.owned_sums import owned
from elasticd.worker.gradients.whole_norms import shard_lengths
from elasticd.worker.sharding.parts import Span
from tests.worker.worlds import in_world, take_steps

SAMPLES, BATCH, VIRTUAL_RANKS = 37, 17, 5  # the last batch reaches three of five virtual ranks


class Part(nn.Module):
    """A module with rows that no world divides evenly, normalization over the batch, dropout, and a layer
    that only some virtual ranks use."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.up = nn.Linear(7, 11)
        self.seldom = nn.Linear(7, 7)
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
        x = x + self.seldom(x) if int(1000 * x.sum()) % 2 else x
        return x + self.down(self.drop(torch.tanh(self.norm(up))).view(*x.shape[:2], -1))


class Aside(nn.Module):
    """A module whose input needs no gradient, with a parameter that only some virtual ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 7)
        self.seldom = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * self.seldom if int(1000 * x.sum()) % 2 else self.up(x)


class Stack(nn.Module):
    """A model with parameters that two layers share, a frozen layer, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.blocks = nn.ModuleList(Part(recomputes) for recomputes in (False, True, False, False))
        self.aside = Aside()
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.never = nn.Linear(2, 2)
        self.inner = nn.Linear(7, 7, bias=False)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, x = x, self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.tied(torch.tanh(self.inner(self.frozen(x + self.aside(samples)))))


def shard(model: Stack, mesh: DeviceMesh) -> None:
    for block in (*model.blocks, model.aside):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def shard_offloaded(model: Stack, mesh: DeviceMesh) -> None:
    offloaded = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for block in (*model.blocks, model.aside):
        fully_shard(block, **offloaded)
    fully_shard(model, **offloaded)


def trained(accumulate: int = 1, shard: Any = None, unit: int = 1) -> str:
    """Return a digest of all results of the training, and of what each step returns."""
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
    )
    options: dict[str, Any] = {"shard": shard, "unit": unit} if shard is not None else {}
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


def in_modes(accumulate: int = 1, *units: int) -> list[str]:
    """Return the results in DDP, in FSDP2, and in HSDP with these units."""
    return [trained(accumulate), *(trained(accumulate, shard, unit) for unit in (1, *units))]


def test_one_digest_comes_out_of_ddp_and_fsdp2(tmp_path: Path) -> None:
    first, second = in_world(2, tmp_path, in_modes)
    assert first == second == [first[0]] * 2


@pytest.mark.slow
def test_one_digest_comes_out_of_parameters_that_are_offloaded_to_the_cpu(tmp_path: Path) -> None:
    [whole] = in_world(1, tmp_path, trained)
    for world in (2, 3):
        assert in_world(world, tmp_path, trained, 1, shard_offloaded) == [whole] * world


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_digest_comes_out_of_ddp_and_fsdp2_and_hsdp_in_a_world_of_any_size(
    tmp_path: Path, accumulate: int
) -> None:
    [whole] = in_world(1, tmp_path, trained, accumulate)
    for world, units in ((1, ()), (2, (2,)), (3, ()), (4, (2,)), (6, (2, 3))):
        for found in in_world(world, tmp_path, in_modes, accumulate, *units):
            assert found == [whole] * len(found), world


class Chain(nn.Module):
    """A model of layers that share a bias. Each layer is sharded by itself, and the bias is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
        for layer in self.layers:
            layer.bias = self.layers[0].bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def shard(self, mesh: DeviceMesh) -> None:
        for part in (*self.layers, self):
            fully_shard(part, mesh=mesh, ignored_params={self.layers[0].bias})


def with_a_shared_bias() -> list[str]:
    """Return the results in DDP and in FSDP2."""
    found = []
    for options in ({}, {"shard": Chain.shard}):
        torch.manual_seed(3)
        model = Chain()
        samples = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))
        data = worker.Data(samples, global_batch=BATCH, virtual_ranks=VIRTUAL_RANKS, consistent=True)
        state = worker.State(
            model=model, optimizer=torch.optim.AdamW(model.parameters()), data=data, said=[], **options
        )

        @worker.run
        def run(state: worker.State) -> str:
            take_steps(state)
            return digest(state)

        found.append(run(state))
    return found


def test_one_digest_comes_out_if_sharded_modules_share_a_parameter_that_is_left_out(tmp_path: Path) -> None:
    first, second = in_world(2, tmp_path, with_a_shared_bias)
    assert first == second == [first[0]] * 2


def gradients(refused: bool) -> tuple[float, float, str]:
    """Return three things: the gradient of a step of two parts in bfloat16; the gradient of the script's own
    backward pass after the run function; and the error if the script makes such a pass during a step."""
    model = nn.Linear(1, 1, bias=False)
    samples = torch.tensor([[1.0], [2.0**-10]])
    options: dict[str, Any] = {"virtual_ranks": 1, "accumulate": 2, "shuffle": False, "consistent": True}
    data = worker.Data(samples, global_batch=2, **options)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    state = worker.State(
        model, optimizer, data=data, shard=lambda model, mesh: fully_shard(model, mesh=mesh, mp_policy=policy)
    )

    @worker.run
    def run(state: worker.State) -> tuple[float, str]:
        said = ""
        for step in state.steps():
            for batch in step:
                step.backward(state.model(batch).mean())
            gradient = full(state.model.weight.grad).item()
            if refused:
                with pytest.raises(RuntimeError) as refusal:
                    state.model(batch).mean().backward()
                said = str(refusal.value)
                break
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.commit()
        return gradient, said

    gradient, said = run(state)
    if not refused:
        state.model(torch.ones(1, 1)).mean().backward()
    own = state.model.weight.grad
    return gradient, 0.0 if own is None else full(own).item(), said


def taken_whole() -> list[bool]:
    """Return, for each placement of a tensor on the mesh, whether its norm is taken whole."""
    mesh = init_device_mesh("cpu", (1,))
    end = whole_norms.take_whole(mesh)
    tensors = [distribute_tensor(torch.ones(2, 2), mesh, [how]) for how in (Shard(0), Shard(1), Replicate())]
    found = [whole_norms._mesh_of([tensor]) is mesh for tensor in tensors]
    end()
    return [*found, whole_norms._mesh_of(tensors[:1]) is mesh]


def of_one_worker() -> list[Any]:
    return [gradients(refused=False), gradients(refused=True), taken_whole()]


def test_gradients_are_added_up_in_the_type_of_the_parameters_and_come_from_step_backward_alone(
    tmp_path: Path,
) -> None:
    [(after, during, whole)] = in_world(1, tmp_path, of_one_worker)
    assert after == (0.5 + 2.0**-11, 1.0, ""), "bfloat16 has no such number"
    assert during[2].startswith("a gradient was computed outside of step.backward(loss)")
    assert whole == [True, False, False, False], "only what is sharded as fully_shard does, while it lasts"


@pytest.mark.parametrize(
    ("spans", "pieces"),
    [
        ([(0, 4), (4, 7)], [(0, 4), (4, 7)]),
        ([(0, 4), (4, 4)], [(0, 4), (4, 4)]),
        ([(0, 4), (4, 9), (0, 4), (4, 9)], [(0, 2), (4, 6), (2, 4), (6, 9)]),
        ([(0, 5)] * 3, [(0, 1), (1, 3), (3, 5)]),
    ],
)
def test_workers_own_what_they_have_and_replicas_share_it_out(
    spans: list[tuple[int, int]], pieces: list[tuple[int, int]]
) -> None:
    assert owned([(Span(*span),) for span in spans]) == [(Span(*piece),) for piece in pieces]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shards_are_as_long_as_torch_cuts_them(rows: int, size: int) -> None:
    chunks = [chunk.numel() for chunk in torch.zeros(rows, 3).chunk(size)]
    assert shard_lengths((rows, 3), size) == chunks + [0] * (size - len(chunks))


@pytest.mark.parametrize(
    ("optimizer", "dtype", "options", "match"),
    [
        (
            torch.optim.Adafactor,
            torch.float32,
            {},
            "optimizer is of Adafactor, whose step computes with whole",
        ),
        (torch.optim.LBFGS, torch.float32, {}, "optimizer is of LBFGS"),
        (torch.optim.AdamW, torch.float32, {"fused": True}, "AdamW with fused=True, which on CPUs rounds by"),
        (
            torch.optim.SGD,
            torch.bfloat16,
            {},
            "first.weight is in torch.bfloat16, in which optimizers on CPUs",
        ),
    ],
)
def test_what_rounds_by_the_layout_is_refused_in_a_sentence(
    optimizer: Any, dtype: torch.dtype, options: dict[str, Any], match: str
) -> None:
    model = Stack().to(dtype)
    data = worker.Data([0, 1], global_batch=2, virtual_ranks=2, consistent=True)
    with pytest.raises(TypeError, match=match):
        worker.State(model, optimizer(model.parameters(), lr=0.1, **options), data=data, shard=shard)
