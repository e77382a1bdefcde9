"""Jobs whose steps are out of the ordinary: several modules, several optimizers, closures, parameters that
the script changes itself."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elasticd import worker
from tests.worker.jobs import Accident, Journal, begin, commit, hear_of_leaving


def batch_of(step: int) -> torch.Tensor:
    """The same in each worker, so that sums are alike in a world of any size."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def linear(seed: int, wide: int = 6, out: int = 6) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(wide, out)


class Script:
    """``make``: what the State is given; ``step``: one step, which calls ``accident`` at its points."""

    def make(self) -> worker.State:
        raise NotImplementedError

    def step(self, state: worker.State, batch: Any, at: Callable[[str], None]) -> None:
        raise NotImplementedError

    def after(self, state: worker.State) -> None:
        """The commit."""


class TwoModules(Script):
    """With other data in each worker."""

    def make(self) -> worker.State:
        model, head = linear(1), linear(2, 6, 1)
        optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=0.05)
        return worker.State(model=model, head=head, optimizer=optimizer)

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        state.optimizer.zero_grad()
        loss = state.head(state.model(batch + worker.rank()).tanh()).square().mean()
        at("forward")
        loss.backward()
        state.optimizer.step()


class Apart(TwoModules):
    """Calls its own head, which nobody wraps."""

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        state.optimizer.zero_grad()
        state._contents.modules["head"](state.model(batch + worker.rank()).tanh()).square().mean().backward()
        state.optimizer.step()


class Adversaries(Script):
    """A GAN: one optimizer steps before the other one's sums."""

    def make(self) -> worker.State:
        model, critic = linear(1), linear(2, 6, 1)
        return worker.State(
            model=model,
            critic=critic,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
            second=torch.optim.Adam(critic.parameters(), lr=0.05),
        )

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        state.second.zero_grad()
        (state.critic(batch) - state.critic(state.model(batch).detach())).square().mean().backward()
        state.second.step()
        at("between")
        state.optimizer.zero_grad()
        state.critic(state.model(batch)).square().mean().backward()
        state.optimizer.step()


class Closure(Script):
    """All of the step is in a closure, as with Lightning's automatic optimization."""

    def make(self) -> worker.State:
        model = linear(1)
        return worker.State(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.05))

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        def closure() -> torch.Tensor:
            state.optimizer.zero_grad()
            loss: torch.Tensor = state.model(batch).square().mean()
            at("forward")
            loss.backward()
            return loss

        state.optimizer.step(closure)


class Lbfgs(Closure):
    """The closure is called again and again, and dies in its second call."""

    def make(self) -> worker.State:
        model = linear(1)
        self.optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=3)
        return worker.State(model=model, optimizer=self.optimizer)

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        calls = 0

        def at_second(point: str) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                at(point)

        super().step(state, batch, at_second)


class Momentum(Script):
    """MoCo: a second encoder follows the first in each forward pass."""

    def make(self) -> worker.State:
        model = linear(1)
        keys = copy.deepcopy(model).requires_grad_(False)
        return worker.State(model=model, keys=keys, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        with torch.no_grad():
            for mine, other in zip(
                state.keys.parameters(), state._contents.modules["model"].parameters(), strict=True
            ):
                mine.data.mul_(0.9).add_(other.data, alpha=0.1)
        state.optimizer.zero_grad()
        loss = (state.model(batch) - state.keys(batch)).square().mean() + state.model(batch).square().mean()
        at("forward")
        loss.backward()
        state.optimizer.step()


class Swapped(Closure):
    """Evaluated with other weights, between commits, in which somebody dies."""

    undo: bool | None = True

    def make(self) -> worker.State:
        model = linear(1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        return worker.State(model=model, optimizer=optimizer, undo=self.undo)

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        own = [p.data for p in state._contents.modules["model"].parameters()]
        for p in state._contents.modules["model"].parameters():
            p.data = p.data * 0.5
        at("forward")
        dist.all_reduce(torch.zeros(1))
        for p, data in zip(state._contents.modules["model"].parameters(), own, strict=True):
            p.data = data
        super().step(state, batch, lambda _: None)


class Averages(Closure):
    """Evaluated with exponential averages in place of the weights, after each other step, in which somebody
    dies. The weights lie in a copy meanwhile."""

    def make(self) -> worker.State:
        model = linear(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        averages = copy.deepcopy(model).requires_grad_(False)
        return worker.State(model=model, averages=averages, optimizer=optimizer)

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        mine, averages = (list(state._contents.modules[name].parameters()) for name in ("model", "averages"))
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
    """Sharpness-aware: the gradient is of where the loss is largest nearby, and the weights are there when
    somebody dies."""

    def make(self) -> worker.State:
        model = linear(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return worker.State(model=model, optimizer=optimizer)

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        parameters = list(state._contents.modules["model"].parameters())
        state.model(batch).square().mean().backward()
        away = [0.05 * p.grad / p.grad.norm() for p in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, away)
        state.optimizer.zero_grad()
        loss = state.model(batch).square().mean()
        at("forward")
        loss.backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, away)
        state.optimizer.step()
        state.optimizer.zero_grad()


class Scaled(Script):
    """Gradients are unscaled, and clipped by a norm that all workers find together; there somebody dies."""

    def make(self) -> worker.State:
        model = linear(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        return worker.State(model=model, optimizer=optimizer, scaler=scaler)

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        state.optimizer.zero_grad()
        state.scaler.scale(state.model(batch).square().mean()).backward()
        state.scaler.unscale_(state.optimizer)
        gradients = [p.grad for p in state._contents.modules["model"].parameters()]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        at("forward")
        dist.all_reduce(norm, dist.ReduceOp.MAX)
        torch._foreach_mul_(gradients, float(0.5 / norm.clamp(min=0.5)))
        state.scaler.step(state.optimizer)
        state.scaler.update()


class Unfrozen(Script):
    """The first layer is trained from the fourth step on. Each worker has its own part of a batch, so that
    gradients which are not added up would differ."""

    def make(self) -> worker.State:
        model = nn.Sequential(linear(1), nn.Tanh(), linear(2))
        model[0].requires_grad_(False)
        return worker.State(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-3))

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        state._contents.modules["model"][0].requires_grad_(state.step >= 3)
        state.optimizer.zero_grad()
        mine = self.model(state)(batch[worker.rank() :: worker.world_size()])
        loss = mine.square().sum() / len(batch) * worker.world_size()
        at("forward")
        loss.backward()
        state.optimizer.step()

    def model(self, state: worker.State) -> Any:
        return state.model


class MomentumUnfrozen(Unfrozen):
    """A second model follows the first before each forward pass. Its first layer begins to change late."""

    def make(self) -> worker.State:
        model = nn.Sequential(linear(1), nn.Tanh(), linear(2))
        keys = copy.deepcopy(model).requires_grad_(False)
        model[0].requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-3)
        return worker.State(model=model, keys=keys, optimizer=optimizer)

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        for mine, other in zip(
            state.keys.parameters(), state._contents.modules["model"].parameters(), strict=True
        ):
            mine.data.mul_(0.9).add_(other.data, alpha=0.1)
        super().step(state, batch, at)


class Stale(Unfrozen):
    """Calls the model as it was wrapped before that."""

    def model(self, state: worker.State) -> Any:
        self.first = getattr(self, "first", None) or state.model
        return self.first


class Beginning(Script):
    """A second optimizer begins with the fourth step, after a checkpoint, and steps before the other's sums.
    Nothing is copied to undo that with, so survivors go back to that checkpoint."""

    def make(self) -> worker.State:
        model, late = linear(1), linear(2)
        late.requires_grad_(False)
        return worker.State(
            model=model,
            late=late,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            second=torch.optim.Adam(late.parameters(), lr=0.05, eps=1e-3),
            undo=False,
        )

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        if state.step >= 3:
            state._committed.saves.checkpoints.wait()  # type: ignore[union-attr]
            state._contents.modules["late"].requires_grad_(True)
            state.second.zero_grad()
            state.late(batch).square().mean().backward()
            state.second.step()
        state.optimizer.zero_grad()
        loss = state.model(batch).square().mean()
        at("forward")
        loss.backward()
        state.optimizer.step()


class Embedded(Script):
    """Its gradients are sparse, and so small a part of the weights that their copies would be dear."""

    def make(self) -> worker.State:
        torch.manual_seed(1)
        model = nn.EmbeddingBag(40, 6, sparse=True)
        return worker.State(model=model, optimizer=torch.optim.SparseAdam(model.parameters(), lr=0.05))

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        state.optimizer.zero_grad()
        loss = state.model((batch.abs() * 20).long() % 40).square().mean()
        at("forward")
        loss.backward()
        state.optimizer.step()


class Late(Closure):
    """Its scheduler steps after the commit."""

    def make(self) -> worker.State:
        model = linear(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return worker.State(model=model, optimizer=optimizer, schedule=schedule)

    def after(self, state: worker.State) -> None:
        state.schedule.step()


class Lengths(Closure):
    """From the fifth step on, each rank has a queue of another length."""

    def make(self) -> worker.State:
        model = linear(1)
        return worker.State(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), queue=torch.zeros(3)
        )

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        super().step(state, batch, at)
        if state.step >= 5:
            state.queue = torch.zeros(3 + worker.rank())


class WithData(Script):
    """Each step is one of ``worker.Data``."""

    samples, virtual_ranks = 64, 6

    def make(self) -> worker.State:
        model = nn.Sequential(linear(1), nn.BatchNorm1d(6))
        data = worker.Data(
            [torch.full((6,), n / 9) for n in range(self.samples)],
            global_batch=12,
            virtual_ranks=self.virtual_ranks,
            shuffle=False,
        )
        return worker.State(model, torch.optim.SGD(model.parameters(), lr=0.05), data=data)

    def step(self, state: worker.State, batch: Any, at: Callable[[str], None]) -> None:
        for x in batch:
            y = state.model(x)
            at("forward")
            batch.backward(self.loss(y))
        state.optimizer.step()
        state.optimizer.zero_grad()

    def loss(self, y: torch.Tensor) -> torch.Tensor:
        return y.square().mean()


class UnfrozenParts(WithData):
    """The first layer is trained from the fourth step on. Of three workers one has two parts of a batch."""

    samples, virtual_ranks = 96, 4

    def make(self) -> worker.State:
        state = super().make()
        model = nn.Sequential(linear(1), nn.Tanh(), linear(2))
        model[0].requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-3)
        return worker.State(model, optimizer, data=state.data)

    def step(self, state: worker.State, batch: Any, at: Callable[[str], None]) -> None:
        state._contents.modules["model"][0].requires_grad_(state.step >= 3)
        super().step(state, batch, at)


class UnfrozenIdle(UnfrozenParts):
    """Of three workers one has no part of a batch."""

    virtual_ranks = 2


class SeveralModels(WithData):
    """One model is called before the one that State is given first, and one is never called. Of three workers
    one has no part of a batch."""

    virtual_ranks = 2

    def make(self) -> worker.State:
        data = super().make().data
        modules = {"model": linear(1), "encoder": linear(2), "idle": linear(3)}
        parameters = [p for module in modules.values() for p in module.parameters()]
        return worker.State(
            **modules, optimizer=torch.optim.SGD(parameters, lr=0.05, momentum=0.9), data=data
        )

    def step(self, state: worker.State, batch: Any, at: Callable[[str], None]) -> None:
        for x in batch:
            y = state.model(state.encoder(x).tanh())
            at("forward")
            batch.backward(self.loss(y))
        state.optimizer.step()
        state.optimizer.zero_grad()


class Contrastive(WithData):
    """Each batch is compared with those of the other workers, of which four have as many as each other."""

    virtual_ranks = 4

    def loss(self, y: torch.Tensor) -> torch.Tensor:
        others = y.detach().mean()
        dist.all_reduce(others)
        return (y - others).square().mean()


class LoneSample(WithData):
    """The last batch of the epoch leaves a virtual rank one sample."""

    samples = 12 * 6 + 7


class Accumulated(Script):
    """Commits after each backward pass, and steps after each fourth."""

    def make(self) -> worker.State:
        model = linear(1)
        return worker.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        state.model(batch).square().mean().backward()
        if state.step % 4 == 3:
            state.optimizer.step()
            state.optimizer.zero_grad()


class Extra(Closure):
    """A module with a state of its own."""

    def make(self) -> worker.State:
        model = Counting()
        return worker.State(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.05))


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
    """A large buffer that is changed through ``.data``."""

    def make(self) -> worker.State:
        model = Codes()
        return worker.State(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.05))


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


SCRIPTS: dict[str, type[Script]] = {
    kind.__name__: kind
    for kind in (
        TwoModules, Apart, Adversaries, Closure, Lbfgs, Momentum, MomentumUnfrozen, Swapped, Averages, Sharp,
        Scaled, Unfrozen, UnfrozenParts, UnfrozenIdle, Beginning, Embedded, Late, Lengths, Contrastive,
        LoneSample, Stale, Accumulated, Extra, Codebook, SeveralModels,
    )
}  # fmt: skip
STEPS = 8


def guarded(address: str, folder: str, name: str, kind: str, accident: Accident, **environment: str) -> None:
    """A whole script of that kind."""
    begin(address, folder, name)
    hear_of_leaving()
    os.environ.update(environment)
    journal = Journal(folder, name)
    script = SCRIPTS[kind]()
    state = script.make()

    @worker.run
    def run(state: worker.State) -> None:
        journal.write(entered=state.step, world=worker.world_size())
        for step in state.steps(STEPS):
            number = getattr(step, "number", step)
            batch = batch_of(step) if step is number else step
            script.step(state, batch, lambda point, number=number: accident(point, number))
            commit(state, journal)
            script.after(state)

    run(state)
    tensors = [
        t for m in state._contents.modules.values() for t in m.state_dict().values() if torch.is_tensor(t)
    ]
    for optimizer in state._contents.optimizers.values():
        for values in optimizer.state_dict()["state"].values():
            tensors += [t for t in values.values() if isinstance(t, torch.Tensor)]
    journal.write(weights=[t.double().flatten().tolist() for t in tensors])
