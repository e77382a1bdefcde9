"""The last commit: a copy of everything small that may change within a step, to go back to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elasticd.worker.commit import randomness
from elasticd.worker.commit.plaindata import alike, copied, require_dense
from elasticd.worker.gradients.buffers import SMALL

LOOKS = 8  # the first commits
LOOK_EVERY = 64


class LastCommit:
    """The copy of plain data, modules' buffers, extra states and modes (``train()``, ``eval()``), optimizers'
    settings, objects with ``state_dict``, and random numbers.

    Parameters and optimizers' state are not copied here: only an optimizer's step changes them. ``Undo``
    copies them on request.

    ``kept``: the last copy, by these kinds; empty before the first. A large buffer that has not changed is
    not copied again.
    """

    def __init__(
        self,
        plain: dict[str, Any],
        modules: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        stateful: Mapping[str, Any],
    ) -> None:
        self.kept: dict[str, Any] = {}
        self._plain = plain
        self._optimizers = optimizers
        self._stateful = stateful
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
        for name, whole in modules.items():
            for key, tensor in (*whole.named_parameters(), *whole.named_buffers()):
                require_dense(tensor, f"State's {name}.{key}")
        parameters = (parameter for whole in modules.values() for parameter in whole.parameters())
        self.device = next((parameter.device for parameter in parameters), torch.device("cpu"))
        self._versions: list[tuple[int, int]] = []
        self._spare: list[torch.Tensor | None] = []  # older copies, to be overwritten
        self._traceless: set[int] = set()  # large buffers that change without a new version
        self._keeps = 0

    def keep(self) -> None:
        """Copy the present values as the ones to go back to."""
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
                if not alike(self._stateful[name].state_dict(), was):
                    return f"State's {name}"
        return ""

    def _keep_buffers(self) -> list[torch.Tensor | None]:
        """Copy small buffers, and large buffers that have changed: some are constants.

        A change through ``.data`` leaves the version as it was. So large buffers are compared in the first
        commits, and now and then.
        """
        if self._keeps < LOOKS or self._keeps % LOOK_EVERY == 0:
            self._find_traceless()
        self._keeps += 1
        kept = self.kept["buffers"] if self.kept else [None] * len(self._buffers)
        buffers: list[torch.Tensor | None] = []
        spare: list[torch.Tensor | None] = []
        versions: list[tuple[int, int]] = []
        copies: list[torch.Tensor] = []
        changed: list[torch.Tensor] = []
        for i, (owner, name) in enumerate(self._buffers):
            buffer = owner.get(name)
            version = _version(buffer)
            versions.append(version)
            if buffer is None:
                buffers.append(None)
                spare.append(None)
            elif self._is_as_kept(i, buffer):
                buffers.append(kept[i])
                spare.append(None)
            else:
                copy = self._spare[i] if i < len(self._spare) else None
                if copy is None or copy.shape != buffer.shape or copy.device != buffer.device:
                    copy = torch.empty_like(buffer)
                buffers.append(copy)
                spare.append(kept[i])
                copies.append(copy)
                changed.append(buffer)
        if changed:
            torch._foreach_copy_(copies, changed)
        self._spare = spare
        self._versions = versions
        return buffers

    def _is_as_kept(self, number: int, buffer: torch.Tensor) -> bool:
        """Whether a large buffer has the version of its copy, and its versions are reliable."""
        return (
            buffer.numel() > SMALL
            and bool(self.kept)
            and self.kept["buffers"][number] is not None
            and self._versions[number] == _version(buffer)
            and number not in self._traceless
        )

    def _find_traceless(self) -> list[int]:
        """Return the buffers that have changed without a new version."""
        found = []
        for number, (owner, name) in enumerate(self._buffers):
            buffer = owner.get(name)
            if buffer is None or not self._is_as_kept(number, buffer):
                continue
            if not torch.equal(buffer, self.kept["buffers"][number]):
                found.append(number)
        self._traceless |= set(found)
        return found

    def go_back(self) -> None:
        """Restore the copy, if there is one.

        A buffer that has changed without a new version stays as it is: its copy may be much older than the
        last commit.
        """
        if self.kept:
            for number in self._find_traceless():
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
                elif present is not None and present.shape == buffer.shape:
                    present.copy_(buffer)
                else:  # such as a cache that grows on demand
                    device = present.device if present is not None else self.device
                    owner[name] = buffer.to(device, copy=True)
        for name, module in self._extra.items():
            module.set_extra_state(copied(kept["extra"][name], name))
        for part, mode in zip(self._parts, kept["modes"], strict=True):
            part.training = mode
        randomness.resume(kept["random"])
        self._versions = [_version(owner.get(name)) for owner, name in self._buffers]
        self.kept = kept


def _is_simple(value: Any) -> bool:
    return isinstance(value, int | float | str | None)


def _version(buffer: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if buffer is None else (id(buffer), buffer._version)
