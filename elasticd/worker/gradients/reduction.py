"""Reduce the gradients of a global batch's parts to one gradient, the same in all workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elasticd.data.dealing import Portion
from elasticd.worker.gradients.wrapping import Silence


class Reduction(Protocol):
    """How a step of a State with data reduces gradients; one object for each world. The calls come in this
    order:

        for part in parts:                      # this worker's, in order of virtual ranks; may be empty
            with reduction.part(part):
                ...                             # the script computes the loss of that part,
                reduction.backward(loss, part)  # a mean over its samples
        reduction.finish(parts)
        ...
        reduction.close()                       # the world is over

    After ``finish`` each parameter's ``grad`` is the sum, over all parts of the global batch, of
    ``part.weight`` times the gradient of the part's loss. This holds in every worker, also in one without
    parts. ``loss``: the loss of the global batch, if it is known.
    """

    loss: torch.Tensor | None

    def part(self, part: Portion) -> contextlib.AbstractContextManager[None]: ...

    def backward(self, loss: torch.Tensor, part: Portion) -> None: ...

    def finish(self, parts: list[Portion]) -> None: ...

    def close(self) -> None: ...


class Averaged:
    """Leave the sum to DistributedDataParallel, which averages over the workers: once for each step, in the
    last part's backward pass.

    ``models``: the models as State has wrapped them. ``wrap_anew`` wraps models again whose trainable
    parameters have changed. Models that are not wrapped get weighted gradients, and the script adds them up.
    """

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
            self._wrap_anew()  # the other workers did so when they called the model
        if not parts and self._parallel:
            torch.stack([_of_nothing(model) for model in self._parallel]).sum().backward()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        for model in self._parallel:
            model._remove_autograd_hooks()  # type: ignore[no-untyped-call]  # the script may still use it


def _of_nothing(model: DistributedDataParallel) -> torch.Tensor:
    """Return the loss of a forward pass whose backward pass adds zeros to every sum, so that other workers do
    not wait in vain.

    Everything that DistributedDataParallel does around the module's forward runs here too.
    """
    used = [p for p in model.module.parameters() if p.requires_grad]
    if model.find_unused_parameters:
        used = used[:1]  # a parameter that no worker used keeps no gradient

    def nothing(*_: Any) -> torch.Tensor:
        return torch.stack([p.flatten()[:0].sum() for p in used]).sum()

    model._run_ddp_forward = nothing  # type: ignore[method-assign]
    try:
        loss: torch.Tensor = model()
    finally:
        del model._run_ddp_forward
    return loss
