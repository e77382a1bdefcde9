"""Jobs whose steps are out of the ordinary: several modules, several optimizers, closures, parameters that
the script changes itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elasticd import worker
from tests.worker.jobs import Accident, Journal, begin, commit


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

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        raise NotImplementedError


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
        state._modules["head"](state.model(batch + worker.rank()).tanh()).square().mean().backward()
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
                state.keys.parameters(), state._modules["model"].parameters(), strict=True
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
        own = [p.data for p in state._modules["model"].parameters()]
        for p in state._modules["model"].parameters():
            p.data = p.data * 0.5
        at("forward")
        dist.all_reduce(torch.zeros(1))
        for p, data in zip(state._modules["model"].parameters(), own, strict=True):
            p.data = data
        super().step(state, batch, lambda _: None)


class Unfrozen(Script):
    """The first layer is trained from the fourth step on."""

    def make(self) -> worker.State:
        model = nn.Sequential(linear(1), nn.Tanh(), linear(2))
        model[0].requires_grad_(False)
        return worker.State(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.05))

    def step(self, state: worker.State, batch: torch.Tensor, at: Callable[[str], None]) -> None:
        state._modules["model"][0].requires_grad_(state.step >= 3)
        state.optimizer.zero_grad()
        loss = self.model(state)(batch).square().mean()
        at("forward")
        loss.backward()
        state.optimizer.step()

    def model(self, state: worker.State) -> Any:
        return state.model


class Stale(Unfrozen):
    """Calls the model as it was wrapped before that."""

    def model(self, state: worker.State) -> Any:
        self.first = getattr(self, "first", None) or state.model
        return self.first


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
        TwoModules, Apart, Adversaries, Closure, Lbfgs, Momentum, Swapped, Unfrozen, Stale, Accumulated,
        Extra, Codebook,
    )
}  # fmt: skip
STEPS = 8


def guarded(address: str, folder: str, name: str, kind: str, accident: Accident) -> None:
    """A whole script of that kind."""
    begin(address, folder, name)
    journal = Journal(folder, name)
    script = SCRIPTS[kind]()
    state = script.make()

    @worker.run
    def run(state: worker.State) -> None:
        journal.write(entered=state.step, world=worker.world_size())
        for step in state.steps(STEPS):
            script.step(state, batch_of(step), lambda point, step=step: accident(point, step))
            commit(state, journal)

    run(state)
    tensors = [t for m in state._modules.values() for t in m.state_dict().values() if torch.is_tensor(t)]
    for optimizer in state._optimizers.values():
        for values in optimizer.state_dict()["state"].values():
            tensors += [t for t in values.values() if isinstance(t, torch.Tensor)]
    journal.write(weights=[t.double().flatten().tolist() for t in tensors])
