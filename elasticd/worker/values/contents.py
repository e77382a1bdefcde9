"""The values that a script gives to a State."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from elasticd.checkpoint.client.tensors import is_flattened
from elasticd.worker.values.plaindata import copied
from elasticd.worker.values.randomness import GeneratorState

T = TypeVar("T")
SHARD_INSTEAD = "give State the bare module, and a function that calls fully_shard as shard="


@dataclass(frozen=True, slots=True)
class Local(Generic[T]):
    """A value of a State that each worker has for itself; all other values are shared.

    Example: ``State(..., losses=worker.Local([]))``, then ``state.losses``. Like all values, the value is
    restored when a step is abandoned. It is never sent to another worker, and is in no checkpoint: each
    process begins with the value given here.
    """

    value: T


class Contents:
    """The values of a State, by kind and by name.

    ``plain``: numbers, strings, tensors, and containers of them. ``stateful``: objects with ``state_dict``.
    ``own``: the names of the values that each worker has for itself. ``never_own``: types of values that no
    worker may have for itself.

    Raises TypeError for a value that a State cannot keep.
    """

    def __init__(
        self, given: Mapping[str, Any], *, never_own: tuple[type, ...] = (nn.Module, Optimizer)
    ) -> None:
        self._never_own = never_own
        self.plain: dict[str, Any] = {}
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.stateful: dict[str, Any] = {}
        self.own = {name for name, value in given.items() if isinstance(value, Local)}
        for name, value in given.items():
            self._add(name, value)
        kept = {id(p) for p in self.parameters()}
        for name, optimizer in self.optimizers.items():
            if any(id(p) not in kept for p in parameters_of(optimizer)):
                raise TypeError(
                    f"{name} changes parameters of no module that State was given, so a worker that joins "
                    "later would not get them: give State their module as well, under another name"
                )

    def _add(self, name: str, value: Any) -> None:
        if isinstance(value, Local):
            value = value.value
            if isinstance(value, self._never_own):
                raise TypeError(
                    f"{name} is a {type(value).__name__}, which State keeps the same in all workers: "
                    "worker.Local is for plain data, generators, and other objects with state_dict()"
                )
        if isinstance(value, DistributedDataParallel):
            raise TypeError(
                "State wraps the model itself, for each world anew: give it the module, not its DDP"
            )
        if isinstance(value, nn.Module):
            if any(hasattr(p, "device_mesh") for p in value.parameters()) or is_flattened(value):
                raise TypeError(f"State cannot keep {name}, which is sharded already: {SHARD_INSTEAD}")
            if (lazy := next((key for key, p in value.named_parameters() if is_lazy(p)), None)) is not None:
                raise TypeError(
                    f"State's {name}.{lazy} has no shape yet: call the model once before, so that its lazy "
                    "modules make their parameters"
                )
            self.modules[name] = value
        elif isinstance(value, Optimizer):
            self.optimizers[name] = value
        elif isinstance(value, torch.Generator):
            self.stateful[name] = GeneratorState(value)
        elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            self.stateful[name] = value
        else:
            copied(value, f"State's {name}")
            self.plain[name] = value

    def shared(self, values: Mapping[str, T]) -> dict[str, T]:
        """Return the values, by name, that are shared by all workers."""
        return {name: value for name, value in values.items() if name not in self.own}

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all modules, each once."""
        return [*{id(p): p for module in self.modules.values() for p in module.parameters()}.values()]

    @property
    def trained(self) -> set[int]:
        """The ids of the parameters that an optimizer trains."""
        return {id(p) for optimizer in self.optimizers.values() for p in parameters_of(optimizer)}

    @property
    def scalers(self) -> list[Any]:
        return [thing for thing in self.stateful.values() if isinstance(thing, torch.amp.GradScaler)]

    @property
    def order(self) -> dict[str, list[list[str]]]:
        """The names of each optimizer's parameters, by group. The optimizer itself has no names."""
        names = {p: f"{name}.{key}" for name, m in self.modules.items() for key, p in m.named_parameters()}
        return {
            name: [[names[p] for p in group["params"]] for group in optimizer.param_groups]
            for name, optimizer in self.optimizers.items()
        }

    def tensors(self, *, buffers: bool) -> Iterator[torch.Tensor]:
        """Yield all parameters and optimizers' tensors, in the same order on all workers. ``buffers``: yield
        the modules' buffers too."""
        for _, module in sorted(self.modules.items()):
            yield from module.parameters()
            if buffers:
                yield from module.buffers()
        for _, optimizer in sorted(self.optimizers.items()):
            for _, values in sorted(optimizer.state_dict()["state"].items()):
                yield from (v for _, v in sorted(values.items()) if isinstance(v, torch.Tensor))


class EpochProgress:
    """The progress of a training's epochs, which a State keeps with its other values. ``ended``: the number
    of complete epochs, including the work after their last step. ``began``: the number of steps before the
    present epoch; None between epochs. ``stopped``: no epoch follows."""

    def __init__(self) -> None:
        self.ended = 0
        self.began: int | None = None
        self.stopped = False

    @property
    def marks(self) -> int:
        """The number of commits without a step."""
        return self.ended + self.stopped

    def state_dict(self) -> dict[str, Any]:
        return {"at": (self.ended, self.began, self.stopped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ended, self.began, self.stopped = state["at"]


class FrozenParameters:
    """Which parameters of a State's modules are frozen (``requires_grad``). A State keeps this with its other
    values: a script may freeze and unfreeze parameters during the training.

    ``modules``: by name; they may be others in each world. ``changed``: a parameter that the last
    ``load_state_dict`` froze or unfroze; empty if there was none.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self.changed = ""
        self.follow()

    def follow(self) -> None:
        """List the parameters of the present modules anew."""
        self._named: list[tuple[str, nn.Parameter]] = []
        self._last: tuple[list[bool], dict[str, str]] | None = None

    def state_dict(self) -> dict[str, Any]:
        named = self._parameters()
        trains = [parameter.requires_grad for _, parameter in named]
        if self._last is None or trains != self._last[0]:
            names: dict[bool, list[str]] = {True: [], False: []}
            for (name, _), does in zip(named, trains, strict=True):
                names[does].append(name)
            self._last = trains, {"trained": "\n".join(names[True]), "frozen": "\n".join(names[False])}
        return dict(self._last[1])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        wanted = dict.fromkeys(state["trained"].split("\n"), True)
        wanted |= dict.fromkeys(state["frozen"].split("\n"), False)
        self.changed = ""
        self.follow()
        for name, parameter in self._parameters():
            trains = wanted.get(name, parameter.requires_grad)
            if trains is not parameter.requires_grad:
                parameter.requires_grad_(trains)
                self.changed = self.changed or name

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        if not self._named:
            self._named = [
                (f"{name}.{key}", parameter)
                for name, module in self._modules.items()
                for key, parameter in module.named_parameters()
            ]
        return self._named


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradients_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p.grad for p in parameters_of(optimizer) if p.grad is not None]
