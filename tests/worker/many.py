"""A script whose State has one value of each kind. Each value is compared with its value in an undisturbed
training. Gradients are the same in each worker, so the comparison is exact."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from elasticd import worker
from tests.checkpoint.likeness import with_types
from tests.worker.guarding import Counting, batch_of, linear
from tests.worker.jobs import NOTHING, Accident, begin, commit, hear_of_leaving, take_the_same_of_all

STEPS = 10
SAVED = 6  # the step after which workers save and die, if they are told to
BIG = 1 << 19  # elements: more than a checkpoint writes in one piece


class Renaming(nn.Linear):
    """A module whose ``state_dict`` gives copies, under other names."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {f"old_{key}": t.clone() for key, t in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({k.removeprefix("old_"): t for k, t in state.items()}, *args, **kwargs)


def hooked() -> nn.Module:
    """Give the module a hook that has its ``state_dict`` give copies."""
    module = linear(3)
    module.register_state_dict_post_hook(
        lambda _, state, prefix, __: state.update({key: t.clone() for key, t in state.items()})
    )
    return module


def renaming() -> nn.Module:
    torch.manual_seed(4)
    return Renaming(6, 6)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "model": lambda: linear(1),
    "extra": Counting,
    "renaming": renaming,
    "hooked": hooked,
    "grouped": lambda: nn.Sequential(linear(6), nn.LayerNorm(6)),
}


def optimizer_of(name: str, module: nn.Module, turned: bool) -> torch.optim.Optimizer:
    """Return an optimizer. ``turned``: its groups are in another order."""
    if name != "grouped":
        return torch.optim.AdamW(module.parameters(), lr=0.05)
    decayed = {"params": [module[0].weight], "weight_decay": 0.3, "lr": 0.05}
    free = {"params": [module[0].bias, *module[1].parameters()], "weight_decay": 0.0, "lr": 0.01}
    return torch.optim.AdamW([free, decayed] if turned else [decayed, free])


def plain() -> dict[str, Any]:
    return {
        "numbers": {},  # a large mapping with numbers as keys
        "dotted": {"a.b": 0, "a": {"b": 0}},
        "history": [],
        "named": {},  # a long mapping
        "ordered": OrderedDict(),
        "lists": defaultdict(list),
        "noise": torch.Generator().manual_seed(9),
    }


def make(turned: bool = False, **more: Any) -> worker.State:
    modules = {name: build() for name, build in MODULES.items()}
    optimizers = {f"of_{name}": optimizer_of(name, module, turned) for name, module in modules.items()}
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizers["of_model"], 0.9)
    return worker.State(
        **modules, **optimizers, schedule=schedule, **plain(), wrap=take_the_same_of_all, **more
    )


def step(state: worker.State, number: int, at: Callable[[str], None]) -> None:
    batch = batch_of(number)
    loss = sum(getattr(state, name)(batch).square().mean() for name in MODULES)
    at("forward")
    loss.backward()
    at("summed")
    for name in MODULES:
        optimizer = getattr(state, f"of_{name}")
        optimizer.step()
        optimizer.zero_grad()
    state.schedule.step()
    for group in state.of_grouped.param_groups:
        group["lr"] *= 0.99
    for key in (1, 2, "1"):
        state.numbers[key] = torch.full((BIG,), number + len(str(key)) * 0.5)
    state.dotted["a.b"] += 1
    state.dotted["a"]["b"] -= 1
    state.dotted[number] = {True: number, str(number): None}
    state.history.append({"step": number, "loss": number / 7})
    for n in range(100):
        state.named[f"{number} {n}"] = n
    state.ordered[number] = float(torch.rand(1, generator=state.noise))
    state.lists[number // 2].append(torch.tensor(number))


def digests(state: worker.State) -> dict[str, str]:
    """Return a digest of each value, by name."""
    things: dict[str, Any] = {
        name: [*state._contents.modules[name].state_dict().values()] for name in MODULES
    }
    for name in MODULES:
        module, optimizer = state._contents.modules[name], getattr(state, f"of_{name}")
        names = {p: key for key, p in module.named_parameters()}
        groups = [
            sorted((names[p], sorted((k, v) for k, v in g.items() if k != "params")) for p in g["params"])
            for g in optimizer.param_groups
        ]
        moments = {names[p]: [v for _, v in sorted(its.items())] for p, its in optimizer.state.items()}
        things[f"of_{name}"] = [sorted(groups, key=str), sorted(moments.items())]
    things["schedule"] = sorted(state.schedule.state_dict().items())
    things |= {name: getattr(state, name) for name in plain() if name != "noise"}
    things["noise"] = torch.rand(1, generator=state.noise)
    return {name: hashlib.sha256(str(exactly(thing)).encode()).hexdigest() for name, thing in things.items()}


def exactly(value: Any) -> Any:
    """Return a value that shows types, and the bits of each tensor."""
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        return type(value).__name__, [(with_types(k), exactly(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [exactly(v) for v in value]
    return with_types(value)


def train(
    address: str,
    folder: str,
    name: str,
    accident: Accident = NOTHING,
    *,
    turned: bool = False,
    saver: str = "",
    **more: Any,
) -> None:
    """Run the whole script. Without an address: in a world of its own."""
    journal = begin(address, folder, name, saver)
    hear_of_leaving()
    state = make(turned, **more)

    @worker.run
    def run(state: worker.State) -> None:
        journal.write(entered=state.step)
        for number in state.steps(STEPS):
            step(state, number, lambda point, number=number: accident(point, number))
            commit(state, journal)
            if accident.point == "saved" and state.step == SAVED:
                state._committed.saves.checkpoints.wait()
            accident("saved", state.step)

    run(state)
    journal.write(digests=digests(state))
