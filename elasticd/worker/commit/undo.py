"""Copies, at each commit, of values that a step may change before its last sum over the workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elasticd.worker.commit.plaindata import with_tensors


class Undo:
    """Copies of the wanted parameters, by number, and of the wanted optimizers' state, by name."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizers: Mapping[str, Optimizer]) -> None:
        self._parameters, self._optimizers = parameters, optimizers
        self._wanted: set[int] = set()
        self._wanted_optimizers: set[str] = set()
        self._lain: dict[int, torch.Tensor] = {}  # tensors with the parameters' memory
        self._outlines: dict[
            str, dict[torch.Tensor, Any]
        ] = {}  # the optimizers' state, with the tensors in use
        self._sources: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def want(self, parameters: Iterable[int], optimizers: Iterable[str]) -> bool:
        """Copy these as well, from the next ``keep`` on. Return whether any of them is new."""
        before = len(self._wanted) + len(self._wanted_optimizers)
        self._wanted |= set(parameters)
        self._wanted_optimizers |= set(optimizers)
        return len(self._wanted) + len(self._wanted_optimizers) > before

    @property
    def wanted(self) -> tuple[list[int], list[str]]:
        """The arguments for ``want``. All workers number the parameters alike."""
        return sorted(self._wanted), sorted(self._wanted_optimizers)

    def keep(self) -> None:
        """Copy the present values as the ones to go back to."""
        if not self._wanted and not self._wanted_optimizers:
            return
        self._lain = {n: self._parameters[n].detach() for n in sorted(self._wanted)}
        sources = [*self._lain.values()]

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
        """Whether all of these are copied."""
        return self._lain.keys() >= set(parameters) and self._outlines.keys() >= set(optimizers)

    def put_back(self) -> None:
        """Restore all copies."""
        for number, tensor in self._lain.items():
            parameter = self._parameters[number]
            if parameter.data_ptr() != tensor.data_ptr():
                parameter.data = tensor  # such as a parameter that shared another's memory for a while
        with torch.no_grad():
            torch._foreach_copy_([t.detach() for t in self._sources], self._copies)
        for name, outline in self._outlines.items():
            state = self._optimizers[name].state
            state.clear()
            state.update({p: with_tensors(values, lambda tensor: tensor) for p, values in outline.items()})

    @property
    def nbytes(self) -> int:
        """The bytes that the wanted copies take."""
        sizes = sum(self._parameters[n].nbytes for n in self._wanted)
        found: list[int] = []
        for name in self._wanted_optimizers:
            for values in self._optimizers[name].state.values():
                with_tensors(values, lambda tensor: found.append(tensor.nbytes) or tensor)  # type: ignore[func-returns-value]
        return sizes + sum(found)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device
