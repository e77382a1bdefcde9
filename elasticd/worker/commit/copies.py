"""Copies that are made at each commit, so that a worker can go back to the commit. Copied are all small
values that may change within a step, and the parameters that a step changes before all workers' gradients are
summed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elasticd.checkpoint.client.tensors import require_dense
from elasticd.worker.gradients.buffers import SMALL
from elasticd.worker.values import randomness
from elasticd.worker.values.contents import Contents
from elasticd.worker.values.plaindata import alike, copied, with_tensors

_log = logging.getLogger(__name__)
LOOKS = 8  # the number of first commits at which large buffers are compared with their copies
LOOK_EVERY = 64  # after that, large buffers are compared at every 64th commit


class LastCommit:
    """The copy of plain data, modules' buffers, extra states and modes (``train()``, ``eval()``), optimizers'
    settings, objects with ``state_dict``, and random numbers.

    Parameters and optimizers' state are not copied here, since usually only an optimizer's step changes them.
    ``Undo`` copies them on request.

    ``kept``: the last copy, as a dict with an entry for each of these kinds; empty before the first copy. A
    large buffer that has not changed is not copied again.
    """

    def __init__(self, contents: Contents) -> None:
        self.kept: dict[str, Any] = {}
        self._warned = False
        self._plain, self._optimizers = contents.plain, contents.optimizers
        self._stateful = contents.stateful
        for name, whole in contents.modules.items():
            for key, tensor in (*whole.named_parameters(), *whole.named_buffers()):
                require_dense(tensor, f"State's {name}.{key}")
        self.follow(contents)

    def follow(self, contents: Contents) -> None:
        """Copy from these modules, and restore to them, from now on: they are others for each world if the
        model is sharded. The last copy stays."""
        modules = contents.modules
        self._modules = modules
        self._buffers = [
            (module._buffers, name)
            for whole in modules.values()
            for module in whole.modules()
            for name in module._buffers
        ]
        self._parts = [part for whole in modules.values() for part in whole.modules()]
        self._extra = {
            f"{name}.{path}".rstrip("."): module
            for name, whole in modules.items()
            for path, module in whole.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        self.device = next((p.device for p in contents.parameters()), torch.device("cpu"))
        self._versions: list[tuple[int, int]] = []
        self._spare: list[torch.Tensor | None] = [None] * len(self._buffers)  # older copies, for reuse
        self._unversioned: set[int] = set()  # large buffers whose version does not change with their content
        if self.kept and len(self.kept["buffers"]) != len(self._buffers):  # another part of a split model
            self.kept = {**self.kept, "buffers": [None] * len(self._buffers)}
        self._keeps = 0

    def keep(self) -> None:
        """Copy the present values, so that this worker can go back to them."""
        self.kept = {
            "plain": copied(self._plain, "State"),
            "stateful": {
                name: copied(thing.state_dict(), f"State's {name}.state_dict()")
                for name, thing in self._stateful.items()
            },
            "groups": {
                name: [{k: copied(v, name) for k, v in g.items() if k != "params"} for g in o.param_groups]
                for name, o in self._optimizers.items()
            },
            "buffers": self._keep_buffers(),
            "extra": {
                name: copied(module.get_extra_state(), f"{name}.get_extra_state()")
                for name, module in self._extra.items()
            },
            "modes": [part.training for part in self._parts],
            "random": randomness.note(),
        }

    def changed(self, *, deep: bool) -> str:
        """Return a name for the first value that differs from the copy; empty if there is none.

        Numbers and texts in plain data and optimizers' settings are compared. ``deep``: all plain data and
        objects with ``state_dict`` as well.
        """
        for name, was in self.kept["plain"].items():
            if (deep or _is_simple(was)) and not alike(self._plain[name], was):
                return f"State's {name}"
        for name, groups in self.kept["groups"].items():
            for group, was in zip(self._optimizers[name].param_groups, groups, strict=True):
                for key, value in was.items():
                    if _is_simple(value) and not alike(group.get(key), value):
                        return f"{key} of {name}"
        if deep:
            for name, was in self.kept["stateful"].items():
                if not name.startswith("_") and not alike(self._stateful[name].state_dict(), was):
                    return f"State's {name}"
        return ""

    def _keep_buffers(self) -> list[torch.Tensor | None]:
        """Copy small buffers, and large buffers that have changed.

        A change through ``.data`` leaves the tensor's version as it was. So large buffers are compared with
        their copies at the first commits, and at some later commits.
        """
        if self._keeps < LOOKS or self._keeps % LOOK_EVERY == 0:
            self._find_unversioned()
            self._warn_of_new_buffers()
        self._keeps += 1
        kept = self.kept["buffers"] if self.kept else [None] * len(self._buffers)
        buffers: list[torch.Tensor | None] = []
        copies: list[torch.Tensor] = []
        changed: list[torch.Tensor] = []
        for i, (owner, name) in enumerate(self._buffers):
            buffer = owner.get(name)
            copy, self._spare[i] = self._spare[i], None
            if buffer is None:
                buffers.append(None)
            elif self._is_as_kept(i, buffer):
                buffers.append(kept[i])
            else:
                if copy is None or _kind(copy) != _kind(buffer):
                    copy = torch.empty_like(buffer)
                buffers.append(copy)
                self._spare[i] = kept[i]
                copies.append(copy)
                changed.append(buffer)
        if changed:
            torch._foreach_copy_(copies, changed)
        self._versions = [_version(owner.get(name)) for owner, name in self._buffers]
        return buffers

    def _warn_of_new_buffers(self) -> None:
        """Warn of the first buffer that a module got after ``follow``, as in its first forward pass."""
        if self._warned or sum([len(part._buffers) for part in self._parts]) <= len(self._buffers):
            return
        self._warned = True
        known = {(id(owner), name) for owner, name in self._buffers}
        name, path, key = next(
            (name, path, key)
            for name, whole in self._modules.items()
            for path, part in whole.named_modules()
            for key in part._buffers
            if (id(part._buffers), key) not in known
        )
        _log.warning(
            "the buffer %s of %s was registered after State was made, and is not kept: register it in the "
            "module's __init__",
            f"{path}.{key}".lstrip("."),
            name,
        )

    def _is_as_kept(self, number: int, buffer: torch.Tensor) -> bool:
        """Whether this is a large buffer with the same version as its copy, and its versions are reliable."""
        return (
            buffer.numel() > SMALL
            and bool(self.kept)
            and self.kept["buffers"][number] is not None
            and self._versions[number] == _version(buffer)
            and number not in self._unversioned
        )

    def _find_unversioned(self) -> list[int]:
        """Return the numbers of the buffers that have changed without a new version."""
        found = []
        for number, (owner, name) in enumerate(self._buffers):
            buffer = owner.get(name)
            if buffer is None or not self._is_as_kept(number, buffer):
                continue
            if not torch.equal(buffer, self.kept["buffers"][number]):
                found.append(number)
        self._unversioned |= set(found)
        return found

    def go_back(self) -> None:
        """Restore the copy, if there is one.

        A buffer that has changed without a new version stays as it is: its copy may be much older than the
        last commit.
        """
        if self.kept:
            for number in self._find_unversioned():
                owner, name = self._buffers[number]
                changed = owner[name]
                assert changed is not None
                self.kept["buffers"][number] = changed.detach().clone()
            self.take(self.kept)

    def take(self, kept: dict[str, Any]) -> None:
        """Restore these values, and keep them as the copy."""
        self._plain.update(copied(kept["plain"], "State"))
        for name, thing in self._stateful.items():
            thing.load_state_dict(copied(kept["stateful"][name], name))
        for name, optimizer in self._optimizers.items():
            for group, values in zip(optimizer.param_groups, kept["groups"][name], strict=True):
                group.update(copied(values, name))
        with torch.no_grad():
            for (owner, name), buffer in zip(self._buffers, kept["buffers"], strict=True):
                present = owner.get(name)
                if buffer is None:
                    owner[name] = None
                elif present is not None and (present.shape, present.dtype) == (buffer.shape, buffer.dtype):
                    present.copy_(buffer)
                else:  # the shape or the type has changed, as of a cache that grows on demand
                    device = present.device if present is not None else self.device
                    owner[name] = buffer.to(device, copy=True)
        for name, module in self._extra.items():
            module.set_extra_state(copied(kept["extra"][name], name))
        for part, mode in zip(self._parts, kept["modes"], strict=True):
            part.training = mode
        randomness.resume(kept["random"])
        self._versions = [_version(owner.get(name)) for owner, name in self._buffers]
        self._spare = [None] * len(self._buffers)  # they may be the copies that are now kept
        self.kept = kept


def _is_simple(value: Any) -> bool:
    return isinstance(value, int | float | str | None)


def _version(buffer: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if buffer is None else (id(buffer), buffer._version)


class Undo:
    """Copies of chosen parameters, by number, and of chosen optimizers' state, by name."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizers: Mapping[str, Optimizer]) -> None:
        self._parameters, self._optimizers = parameters, optimizers
        self._wanted: set[int] = set()
        self._wanted_optimizers: set[str] = set()
        self._originals: dict[int, torch.Tensor] = {}  # tensors that share the parameters' memory
        self._outlines: dict[str, dict[torch.Tensor, Any]] = {}  # the optimizers' state, not copied
        self._sources: list[torch.Tensor] = []  # the tensors of both, in the order of ``_copies``
        self._copies: list[torch.Tensor] = []

    def want(self, parameters: Iterable[int], optimizers: Iterable[str]) -> bool:
        """Copy these parameters and optimizers as well, from the next ``keep`` on. Return whether any of them
        was not copied before."""
        before = len(self._wanted) + len(self._wanted_optimizers)
        self._wanted |= set(parameters)
        self._wanted_optimizers |= set(optimizers)
        return len(self._wanted) + len(self._wanted_optimizers) > before

    @property
    def wanted(self) -> tuple[list[int], list[str]]:
        """The chosen parameters and optimizers, for ``want`` of another worker. All workers number the
        parameters in the same way."""
        return sorted(self._wanted), sorted(self._wanted_optimizers)

    def keep(self) -> None:
        """Copy the present values, so that this worker can go back to them."""
        if not self._wanted and not self._wanted_optimizers:
            return
        self._originals = {n: self._parameters[n].detach() for n in sorted(self._wanted)}
        sources = [*self._originals.values()]

        def noted(tensor: torch.Tensor) -> torch.Tensor:
            sources.append(tensor)
            return tensor

        self._outlines = {
            name: {p: with_tensors(values, noted) for p, values in self._optimizers[name].state.items()}
            for name in sorted(self._wanted_optimizers)
        }
        if [_kind(t) for t in sources] != [_kind(t) for t in self._copies]:
            self._copies = [torch.empty_like(t) for t in sources]
        self._sources = sources
        with torch.no_grad():
            torch._foreach_copy_(self._copies, [t.detach() for t in sources])

    def covers(self, parameters: Iterable[int], optimizers: Iterable[str]) -> bool:
        """Whether all of these parameters and optimizers are copied."""
        return self._originals.keys() >= set(parameters) and self._outlines.keys() >= set(optimizers)

    def put_back(self) -> None:
        """Restore all copies."""
        for number, tensor in self._originals.items():
            parameter = self._parameters[number]
            if parameter.data_ptr() != tensor.data_ptr():
                parameter.data = tensor  # the script had pointed the parameter at other memory for a while
        with torch.no_grad():
            torch._foreach_copy_([t.detach() for t in self._sources], self._copies)
        for name, outline in self._outlines.items():
            state = self._optimizers[name].state
            state.clear()
            state.update({p: with_tensors(values, lambda tensor: tensor) for p, values in outline.items()})

    @property
    def nbytes(self) -> int:
        """The size of the copies in bytes."""
        sizes = sum(self._parameters[n].nbytes for n in self._wanted)
        found: list[int] = []
        for name in self._wanted_optimizers:
            for values in self._optimizers[name].state.values():
                with_tensors(values, lambda tensor: found.append(tensor.nbytes) or tensor)  # type: ignore[func-returns-value]
        return sizes + sum(found)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device
