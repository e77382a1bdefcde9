"""A module of which each worker of a unit has a part. The script makes the parts for each world."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from elasticd.checkpoint.client.tensors import local_of, require_copyable
from elasticd.worker.values.contents import Contents
from elasticd.worker.values.plaindata import copied
from elasticd.worker.world.group import device, unit_size, world_size
from elasticd.worker.world.round_mesh import RoundMesh, dimension

Split = Callable[[Any, DeviceMesh], nn.Module | None]  # of any class of module
_NAME = "model"


class SlotCopy(NamedTuple):
    """A copy of a value of an optimizer's state. ``like``: it has the shape of its parameter, and is laid out
    like it. ``on_device``: it is a tensor on the worker's device."""

    like: bool
    on_device: bool
    value: Any


class SplitModel:
    """The model of a State, and the optimizers that train it.

    The script's module stays whole, on the CPU as a rule, with its initial values. For each world the
    script's function makes this worker's part of a copy, and the optimizers are given the part's parameters.
    """

    def __init__(self, contents: Contents, split: Split, unit: int | None) -> None:
        if [*contents.modules] != [_NAME]:
            raise TypeError("with split=, State keeps one module, which is given as model=")
        self._contents, self._split, self._asked = contents, split, unit
        self._whole = contents.modules[_NAME]
        require_copyable(self._whole, "split")
        self._mesh = RoundMesh()
        names = {id(p): name for name, p in self._whole.named_parameters()}
        self._groups = {
            name: [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
            for name, optimizer in contents.optimizers.items()
        }

    # ------------------------------------------------------------ worlds

    @property
    def unit(self) -> int:
        """The number of workers in a unit. Raises ValueError if the world has no whole units."""
        return unit_size(self._asked)

    def lay_out(self, round: int) -> None:
        """Make this worker's part for the present world, with initial values. Raises TypeError."""
        shape = world_size() // self.unit, self.unit
        mesh = self._mesh.make(round, shape, ("replicate", "unit"))
        model = copy.deepcopy(self._whole)
        part = self._split(model, mesh[dimension("unit", round)])
        part = model if part is None else part
        self._refuse(part)
        self._use(part.to(device()))

    def leave(self) -> None:
        """Drop the part, with its process groups."""
        self._use(self._whole)
        self._mesh.forget()

    def _use(self, model: nn.Module) -> None:
        self._contents.modules[_NAME] = model
        parameters = dict(model.named_parameters())
        for name, optimizer in self._contents.optimizers.items():
            for group, names in zip(optimizer.param_groups, self._groups[name], strict=True):
                group["params"][:] = [parameters[n] for n in names if n in parameters]
            optimizer.state.clear()

    def _refuse(self, part: Any) -> None:
        if not isinstance(part, nn.Module):
            raise TypeError(
                f"split= returned a {type(part).__name__}, and not the worker's part of the module"
            )
        known = {name for name, _ in self._whole.named_parameters()}
        strange = [name for name, _ in part.named_parameters() if name not in known]
        if strange:
            raise TypeError(
                f"split= gives a parameter the name {strange[0]}, which the whole module does not have: keep "
                "the names, for example by an nn.Sequential of an OrderedDict"
            )

    # ------------------------------------------------------------ values

    @torch.no_grad()
    def copied(self) -> dict[str, Any]:
        """Return a copy of the part's parameters and of its optimizers' state, in the host's memory, and
        whether each parameter is ``trained``, not frozen. It is made at each commit, so it uses few functions
        of DTensor, which are slow."""
        names: dict[torch.Tensor, str] = {
            p: name for name, p in self._contents.modules[_NAME].named_parameters()
        }
        return {
            "parameters": {name: _host(p) for p, name in names.items()},
            "trained": {name: p.requires_grad for p, name in names.items()},
            "optimizers": {
                name: {
                    names[p]: {slot: tuple(_slot(value, p, name)) for slot, value in values.items()}
                    for p, values in optimizer.state.items()
                }
                for name, optimizer in self._contents.optimizers.items()
            },
        }

    @torch.no_grad()
    def fill(self, part: dict[str, Any]) -> None:
        """Copy the values in ``part`` (see ``copied``) into the model and the optimizers. Raises RuntimeError
        if ``part`` is of another place of a unit, with other parameters."""
        parameters = dict(self._contents.modules[_NAME].named_parameters())
        if parameters.keys() != part["parameters"].keys():
            raise RuntimeError(
                "split= gives workers at the same place of their units other parts: derive the part from the "
                "mesh alone"
            )
        for name, value in part["parameters"].items():
            local_of(parameters[name].detach())[0].copy_(value)
            parameters[name].requires_grad_(part["trained"][name])
        for name, optimizer in self._contents.optimizers.items():
            optimizer.state.clear()
            for key, slots in part["optimizers"][name].items():
                parameter = parameters[key]
                optimizer.state[parameter] = {
                    slot: _placed(SlotCopy(*value), parameter, name) for slot, value in slots.items()
                }


def _host(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if _is_divided(tensor) else tensor  # type: ignore[attr-defined]
    return local.to("cpu", copy=True)


def _is_divided(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a DTensor, of which this worker has a part."""
    return hasattr(tensor, "to_local")


def _slot(value: Any, parameter: torch.Tensor, optimizer: str) -> SlotCopy:
    if not isinstance(value, torch.Tensor):
        return SlotCopy(False, False, copied(value, f"State's {optimizer}.state"))
    like = value.shape == parameter.shape and _is_divided(value) == _is_divided(parameter)
    return SlotCopy(like, value.is_cuda, _host(value))


def _placed(held: SlotCopy, parameter: torch.Tensor, optimizer: str) -> Any:
    if not isinstance(held.value, torch.Tensor):
        return copied(held.value, f"State's {optimizer}.state")
    if held.like:
        target = torch.zeros_like(parameter.detach(), dtype=held.value.dtype)
        local_of(target)[0].copy_(held.value)
        return target
    return held.value.to(parameter.device if held.on_device else "cpu", copy=True)
