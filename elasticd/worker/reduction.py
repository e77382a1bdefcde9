"""How the gradients of the parts of a global batch become one gradient that all workers have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elasticd.core.dealing import Part


class Reduction(Protocol):
    """What a step of a State with data asks for, in this order. One for each world.

        for part in parts:                      # this worker's, virtual ranks in order; maybe none
            with reduction.part(part):
                ...                             # the script computes the loss of that part,
                reduction.backward(loss, part)  # a mean over its samples
        reduction.finish(parts)
        ...
        reduction.close()                       # the world is over

    After ``finish`` each parameter's ``grad`` is the sum of ``part.weight`` times the gradient of the
    part's loss over all parts of the global batch, in every worker, and also in one that had none;
    ``loss`` is that of the global batch, where it is known.
    """

    loss: torch.Tensor | None

    def part(self, part: Part) -> contextlib.AbstractContextManager[None]: ...

    def backward(self, loss: torch.Tensor, part: Part) -> None: ...

    def finish(self, parts: list[Part]) -> None: ...

    def close(self) -> None: ...


class Averaged:
    """Leaves it to DistributedDataParallel, which averages over workers: once for each step, with the
    last part's backward pass. ``model``: as State wrapped it. Where it is wrapped in something else or
    not at all, gradients are weighted, and adding them up is left to the script."""

    loss: torch.Tensor | None = None

    def __init__(self, model: Any) -> None:
        self._parallel = model if isinstance(model, DistributedDataParallel) else None
        self._world = dist.get_world_size() if self._parallel is not None else 1

    @contextlib.contextmanager
    def part(self, part: Part) -> Iterator[None]:
        if self._parallel is None or part.last:
            yield
        else:
            with self._parallel.no_sync():
                yield

    def backward(self, loss: torch.Tensor, part: Part) -> None:
        (loss * (part.weight * self._world)).backward()  # type: ignore[no-untyped-call]

    def finish(self, parts: list[Part]) -> None:
        if not parts and self._parallel is not None:
            _take_part_with_nothing(self._parallel)

    def close(self) -> None:
        if self._parallel is not None:
            self._parallel._remove_autograd_hooks()  # type: ignore[no-untyped-call]  # whoever still holds it


def _take_part_with_nothing(model: DistributedDataParallel) -> None:
    """A forward and a backward pass that add zeros to every sum, so that others do not wait in vain:
    all that DistributedDataParallel does around the module's own forward it does here too."""
    used = [p for p in model.module.parameters() if p.requires_grad]
    if model.find_unused_parameters:
        used = used[:1]  # those of no worker stay without a gradient

    def nothing(*_: Any) -> torch.Tensor:
        return torch.stack([p.flatten()[:0].sum() for p in used]).sum()

    model._run_ddp_forward = nothing  # type: ignore[method-assign]
    try:
        loss = model()
    finally:
        del model._run_ddp_forward
    loss.backward()
