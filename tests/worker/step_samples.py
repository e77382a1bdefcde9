"""A dataset made of the batches of steps. It is the same in each process, whatever the world."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


class StepSamples(torch.utils.data.Dataset[torch.Tensor]):
    """The samples of all steps, in order. ``size``: of the batch of a step. ``batch_of``: makes the batch of
    a step."""

    def __init__(self, steps: int, size: int, batch_of: Callable[[int], torch.Tensor]) -> None:
        self._steps, self._size, self._batch_of = steps, size, batch_of

    def __len__(self) -> int:
        return self._steps * self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._batch_of(index // self._size)[index % self._size]


@functools.cache
def noise(size: int, step: int) -> torch.Tensor:
    """Return a batch of so many samples of four numbers."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 4, generator=generator, dtype=torch.float64)
