"""How the gradients of the parts of a global batch become one gradient that all workers have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elasticd.core.dealing import Portion
from elasticd.worker.wrapping import Silence


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

    def part(self, part: Portion) -> contextlib.AbstractContextManager[None]: ...

    def backward(self, loss: torch.Tensor, part: Portion) -> None: ...

    def finish(self, parts: list[Portion]) -> None: ...

    def close(self) -> None: ...


class Averaged:
    """Leaves it to DistributedDataParallel, which averages over workers: once for each step, with the
    last part's backward pass. ``models``: as State has wrapped them by now; ``wrap_anew`` wraps those anew of
    which other parameters are to be trained now. Where none is wrapped in that, gradients are weighted, and
    adding them up is left to the script."""

    loss: torch.Tensor | None = None

    def __init__(
        self,
        models: Collection[Any],
        silence: Silence | None = None,
        wrap_anew: Callable[[], None] = lambda: None,
    ) -> None:
        self._models = models
        self._silence = silence or Silence()
        self._wrap_anew = wrap_anew

    @property
    def _parallel(self) -> list[DistributedDataParallel]:
        return [model for model in self._models if isinstance(model, DistributedDataParallel)]

    @contextlib.contextmanager
    def part(self, part: Portion) -> Iterator[None]:
        with contextlib.nullcontext() if part.last else self._silence.over(self._parallel):
            yield

    def backward(self, loss: torch.Tensor, part: Portion) -> None:
        world = dist.get_world_size() if self._parallel else 1
        (loss * (part.weight * world)).backward()  # type: ignore[no-untyped-call]

    def finish(self, parts: list[Portion]) -> None:
        if not parts:
            self._wrap_anew()  # as the other workers have, when they called the model
        if not parts and self._parallel:
            torch.stack([_of_nothing(model) for model in self._parallel]).sum().backward()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        for model in self._parallel:
            model._remove_autograd_hooks()  # type: ignore[no-untyped-call]  # whoever still holds it


def _of_nothing(model: DistributedDataParallel) -> torch.Tensor:
    """A forward pass whose backward pass adds zeros to every sum, so that others do not wait in vain:
    all that DistributedDataParallel does around the module's own forward it does here too."""
    used = [p for p in model.module.parameters() if p.requires_grad]
    if model.find_unused_parameters:
        used = used[:1]  # those of no worker stay without a gradient

    def nothing(*_: Any) -> torch.Tensor:
        return torch.stack([p.flatten()[:0].sum() for p in used]).sum()

    model._run_ddp_forward = nothing  # type: ignore[method-assign]
    try:
        loss: torch.Tensor = model()
    finally:
        del model._run_ddp_forward
    return loss
