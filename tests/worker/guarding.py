"""Scripts with unusual steps: several modules, several optimizers, closures, parameters that the script
changes itself."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elasticd import worker
from tests.worker.jobs import NOTHING, Accident, begin, commit, hear_of_leaving

SGD = partial(torch.optim.SGD, lr=0.05)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.05)
SOFT_ADAM = partial(torch.optim.Adam, lr=0.05, eps=1e-3)  # small gradients, so small steps


def batch_of(step: int) -> torch.Tensor:
    """Return the batch of a step. It is the same in each worker, so that sums are the same in a world of any
    size."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def linear(seed: int, wide: int = 6, out: int = 6) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(wide, out)


def state_of(
    optimizer: Callable[..., Any] = ADAM, model: nn.Module | None = None, **more: Any
) -> worker.State:
    """Return the State of a model, by default of a linear one."""
    model = model or linear(1)
    return worker.State(model=model, optimizer=optimizer(model.parameters()), **more)


def own(state: worker.State, name: str = "model") -> list[nn.Parameter]:
    """Return the parameters of a module, which need not be wrapped for that."""
    return list(state._contents.modules[name].parameters())


def follow(state: worker.State, name: str) -> None:
    """Move a module's parameters towards the model's."""
    for mine, other in zip(own(state, name), own(state), strict=True):
        mine.data.mul_(0.9).add_(other.data, alpha=0.1)


class Script:
    """A kind of script. ``make`` returns the State. ``step`` makes one step, and calls ``at`` at certain
    points."""

    def make(self) -> worker.State:
        return state_of()

    def step(self, state: worker.State, batch: Any, at: Callable[[str], None]) -> None:
        state.optimizer.zero_grad()
        loss = self.loss(state, batch)
        at("forward")
        loss.backward()
        state.optimizer.step()

    def loss(self, state: worker.State, batch: torch.Tensor) -> torch.Tensor:
        return state.model(batch).square().mean()


class TwoModules(Script):
    """Two modules, with other data in each worker."""

    def make(self) -> worker.State:
        model, head = linear(1), linear(2, 6, 1)
        return worker.State(model=model, head=head, optimizer=ADAM([*model.parameters(), *head.parameters()]))

    def loss(self, state: worker.State, batch: torch.Tensor) -> torch.Tensor:
        return self.head(state)(state.model(batch + worker.rank()).tanh()).square().mean()

    def head(self, state: worker.State) -> nn.Module:
        return state.head


class Apart(TwoModules):
    """Calls its own head, not the wrapped one."""

    def head(self, state: worker.State) -> nn.Module:
        return state._contents.modules["head"]


class Adversaries(Script):
    """A GAN: the first optimizer steps before the sums of the second one."""

    def make(self) -> worker.State:
        critic = linear(2, 6, 1)
        return state_of(critic=critic, second=ADAM(critic.parameters()))

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        state.second.zero_grad()
        (state.critic(batch) - state.critic(state.model(batch).detach())).square().mean().backward()
        state.second.step()
        at("between")
        state.optimizer.zero_grad()
        state.critic(state.model(batch)).square().mean().backward()
        state.optimizer.step()


class Skipping(Adversaries):
    """Skips what is left of a step if something fails in it, and commits."""

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        with contextlib.suppress(Exception):
            super().step(state, batch, at)


class Closure(Script):
    """The whole step is in a closure, as with Lightning's automatic optimization."""

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        def closure() -> torch.Tensor:
            state.optimizer.zero_grad()
            loss = self.loss(state, batch)
            at("forward")
            loss.backward()
            return loss

        state.optimizer.step(closure)


class Lbfgs(Closure):
    """The optimizer calls the closure several times. The accident happens in the second call."""

    def make(self) -> worker.State:
        return state_of(partial(torch.optim.LBFGS, lr=0.05, max_iter=3))

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        calls = 0

        def at_second(point: str) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                at(point)

        super().step(state, batch, at_second)


class Momentum(Script):
    """MoCo: a second encoder follows the first before each forward pass."""

    def make(self) -> worker.State:
        return state_of(SGD, keys=linear(1).requires_grad_(False))

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        follow(state, "keys")
        super().step(state, batch, at)

    def loss(self, state: worker.State, batch: torch.Tensor) -> torch.Tensor:
        return (state.model(batch) - state.keys(batch)).square().mean() + super().loss(state, batch)


class Swapped(Closure):
    """Swaps other weights in for an evaluation between commits. The accident happens in the evaluation."""

    def make(self) -> worker.State:
        return state_of(undo=True)

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        weights = [p.data for p in own(state)]
        for p in own(state):
            p.data = p.data * 0.5
        at("forward")
        dist.all_reduce(torch.zeros(1))
        for p, data in zip(own(state), weights, strict=True):
            p.data = data
        super().step(state, batch, lambda _: None)


class Averages(Closure):
    """At every other step swaps exponential averages in for an evaluation; the weights are in a copy
    meanwhile. The accident happens in the evaluation."""

    def make(self) -> worker.State:
        return state_of(MOMENTUM, averages=linear(1).requires_grad_(False))

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        mine, averages = own(state), own(state, "averages")
        if state.step % 2:
            copies = [p.data.clone() for p in mine]
            self.swap_in(mine, averages)
            with torch.no_grad():
                loss = state.model(batch).mean()
            at("forward")
            dist.all_reduce(loss)
            self.swap_in(mine, copies)
        super().step(state, batch, lambda _: None)
        with torch.no_grad():
            torch._foreach_lerp_(averages, mine, 0.25)

    def swap_in(self, parameters: list[Any], values: list[Any]) -> None:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data.copy_(value)


class Sharp(Script):
    """Sharpness-aware: gradients are computed at the nearby weights with the largest loss. The model has
    these weights when the accident happens."""

    def make(self) -> worker.State:
        return state_of(MOMENTUM)

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        self.loss(state, batch).backward()
        away = [0.05 * p.grad / p.grad.norm() for p in own(state)]
        with torch.no_grad():
            torch._foreach_add_(own(state), away)
        state.optimizer.zero_grad()
        loss = self.loss(state, batch)
        at("forward")
        loss.backward()
        with torch.no_grad():
            torch._foreach_sub_(own(state), away)
        state.optimizer.step()
        state.optimizer.zero_grad()


class Scaled(Script):
    """Gradients are unscaled, and clipped by a norm that all workers compute together. The accident happens
    there."""

    def make(self) -> worker.State:
        return state_of(MOMENTUM, scaler=torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3))

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        state.optimizer.zero_grad()
        state.scaler.scale(self.loss(state, batch)).backward()
        state.scaler.unscale_(state.optimizer)
        gradients = [p.grad for p in own(state)]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        at("forward")
        dist.all_reduce(norm, dist.ReduceOp.MAX)
        torch._foreach_mul_(gradients, float(0.5 / norm.clamp(min=0.5)))
        state.scaler.step(state.optimizer)
        state.scaler.update()


def frozen_below() -> nn.Sequential:
    model = nn.Sequential(linear(1), nn.Tanh(), linear(2))
    model[0].requires_grad_(False)
    return model


def unfreeze(state: worker.State) -> None:
    """Train the first layer from the fourth step on."""
    state._contents.modules["model"][0].requires_grad_(state.step >= 3)


class Unfrozen(Script):
    """The first layer is trained from the fourth step on. Each worker has its own part of a batch, so that
    gradients which are not added up would differ."""

    def make(self) -> worker.State:
        return state_of(SOFT_ADAM, frozen_below())

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        unfreeze(state)
        super().step(state, batch, at)

    def loss(self, state: worker.State, batch: torch.Tensor) -> torch.Tensor:
        mine = self.model(state)(batch[worker.rank() :: worker.world_size()])
        return mine.square().sum() / len(batch) * worker.world_size()

    def model(self, state: worker.State) -> Any:
        return state.model


class MomentumUnfrozen(Unfrozen):
    """A second model follows the first before each forward pass. Its first layer starts to change late."""

    def make(self) -> worker.State:
        model = frozen_below()
        return state_of(SOFT_ADAM, model, keys=copy.deepcopy(model).requires_grad_(False))

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        follow(state, "keys")
        super().step(state, batch, at)


class Stale(Unfrozen):
    """Calls the model by an earlier wrapper."""

    def model(self, state: worker.State) -> Any:
        self.first = getattr(self, "first", None) or state.model
        return self.first


class Beginning(Script):
    """A second optimizer starts at the fourth step, after a checkpoint, and steps before the first one's
    sums. No copy can undo its first step, so survivors go back to the checkpoint."""

    def make(self) -> worker.State:
        late = linear(2).requires_grad_(False)
        return state_of(MOMENTUM, late=late, second=SOFT_ADAM(late.parameters()), undo=False)

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        if state.step >= 3:
            state._committed.saves.checkpoints.wait()  # type: ignore[union-attr]
            state._contents.modules["late"].requires_grad_(True)
            state.second.zero_grad()
            state.late(batch).square().mean().backward()
            state.second.step()
        super().step(state, batch, at)


class Embedded(Script):
    """An embedding with sparse gradients. Copies of the weights would be much larger than the gradients."""

    def make(self) -> worker.State:
        torch.manual_seed(1)
        return state_of(partial(torch.optim.SparseAdam, lr=0.05), nn.EmbeddingBag(40, 6, sparse=True))

    def loss(self, state: worker.State, batch: torch.Tensor) -> torch.Tensor:
        return super().loss(state, (batch.abs() * 20).long() % 40)


class WithData(Script):
    """Each step is one of ``worker.Data``."""

    samples, virtual_ranks = 64, 6

    def make(self) -> worker.State:
        return state_of(SGD, nn.Sequential(linear(1), nn.BatchNorm1d(6)), data=self.data())

    def data(self) -> worker.Data:
        samples = [torch.full((6,), n / 9) for n in range(self.samples)]
        return worker.Data(samples, global_batch=12, virtual_ranks=self.virtual_ranks, shuffle=False)

    def step(self, state: worker.State, batch: Any, at: Callable[[str], None]) -> None:
        for x in batch:
            loss = self.loss(state, x)
            at("forward")
            batch.backward(loss)
        state.optimizer.step()
        state.optimizer.zero_grad()


class UnfrozenParts(WithData):
    """The first layer is trained from the fourth step on. One of three workers has two parts of a batch."""

    samples, virtual_ranks = 96, 4

    def make(self) -> worker.State:
        return state_of(SOFT_ADAM, frozen_below(), data=self.data())

    def step(self, state: worker.State, batch: Any, at: Callable[[str], None]) -> None:
        unfreeze(state)
        super().step(state, batch, at)


class UnfrozenIdle(UnfrozenParts):
    """One of three workers has no part of a batch."""

    virtual_ranks = 2


class SeveralModels(WithData):
    """The script calls one model before the one that State was given first, and never calls another. One of
    three workers has no part of a batch."""

    samples, virtual_ranks = 96, 2

    def make(self) -> worker.State:
        modules = {"model": linear(1), "encoder": linear(2), "idle": linear(3)}
        optimizer = MOMENTUM([p for module in modules.values() for p in module.parameters()])
        return worker.State(**modules, optimizer=optimizer, data=self.data())

    def loss(self, state: worker.State, batch: torch.Tensor) -> torch.Tensor:
        return super().loss(state, state.encoder(batch).tanh())


class LoneSample(WithData):
    """The last batch of the epoch leaves a virtual rank one sample."""

    samples = 12 * 6 + 7


class Accumulated(Script):
    """Commits after each backward pass, and steps after each fourth."""

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        self.loss(state, batch).backward()
        if state.step % 4 == 3:
            state.optimizer.step()
            state.optimizer.zero_grad()


class Extra(Closure):
    """A module with an extra state."""

    def make(self) -> worker.State:
        return state_of(model=Counting())


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = self.linear(x) * (1 + self.calls)
        return y

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Codebook(Closure):
    """A module with a large buffer that changes through ``.data``."""

    def make(self) -> worker.State:
        return state_of(model=Codes())


class Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(1)
        self.codes: torch.Tensor
        self.register_buffer("codes", torch.ones(70_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.codes.data.add_(1.0)
        y: torch.Tensor = self.linear(x) * self.codes[0]
        return y


STEPS = 8


def guarded(
    address: str,
    folder: str,
    name: str,
    accident: Accident = NOTHING,
    *,
    kind: type[Script],
    **environment: str,
) -> None:
    """Run a whole script of that kind."""
    journal = begin(address, folder, name)
    hear_of_leaving()
    os.environ.update(environment)
    script = kind()
    state = script.make()

    @worker.run
    def run(state: worker.State) -> None:
        journal.write(entered=state.step)
        for step in state.steps(STEPS):
            number = getattr(step, "number", step)
            batch = batch_of(step) if step is number else step
            script.step(state, batch, lambda point, number=number: accident(point, number))
            commit(state, journal)

    run(state)
    tensors = [
        t for m in state._contents.modules.values() for t in m.state_dict().values() if torch.is_tensor(t)
    ]
    for optimizer in state._contents.optimizers.values():
        for values in optimizer.state_dict()["state"].values():
            tensors += [t for t in values.values() if isinstance(t, torch.Tensor)]
    journal.write(weights=[t.double().flatten().tolist() for t in tensors])


def undisturbed(_address: str, folder: str, kinds: list[type[Script]]) -> None:
    """Run scripts of these kinds one after the other, each in a world of its own."""
    for kind in kinds:
        guarded("", folder, kind.__name__, kind=kind)
