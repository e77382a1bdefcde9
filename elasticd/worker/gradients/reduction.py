"""Add up the gradients of all parts of a global batch, so that all workers have the same gradient."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elasticd.data.dealing import Portion
from elasticd.worker.gradients.wrapping import WrappedModels

if TYPE_CHECKING:
    from elasticd.worker.world.group import World

_NONE: Final = ""  # written in place of a model's name: the step calls no further model


class Reduction(Protocol):
    """How a step of a State with data reduces gradients. A worker has one object for each world, and calls
    its methods in this order:

        reduction.begin(left_out)               # left_out(): how many workers have no part of the step
        for part in parts:                      # this worker's parts, by virtual rank; may be empty
            with reduction.part(part):
                ...                             # the script computes the part's loss, a mean over its samples
                reduction.backward(loss, part)
        reduction.finish(parts)
        ...
        reduction.close()                       # the world is over

    After ``finish`` each parameter's ``grad`` is the sum, over all parts of the global batch, of
    ``part.weight`` times the gradient of the part's loss. This holds in every worker, also in one without
    parts. ``loss``: the loss of the global batch, if it is known.
    """

    loss: torch.Tensor | None

    def begin(self, left_out: Callable[[], int]) -> None: ...

    def part(self, part: Portion) -> contextlib.AbstractContextManager[None]: ...

    def backward(self, loss: torch.Tensor, part: Portion) -> None: ...

    def finish(self, parts: list[Portion]) -> None: ...

    def close(self) -> None: ...


class AveragedReduction:
    """Let DistributedDataParallel average the gradients over the workers, once for each step, in the backward
    pass of the last part.

    Models that are not wrapped get weighted gradients, which the script adds up. ``world``: its store tells
    workers without a part which models a step calls. None: there is only one model. ``is_sharded``:
    fully_shard averages the gradients, in the backward pass of each part, and all workers have equally many.
    """

    loss: torch.Tensor | None = None

    def __init__(
        self, models: WrappedModels, world: World | None = None, *, is_sharded: bool = False
    ) -> None:
        self._models, self._world, self._is_sharded = models, world, is_sharded
        self._adds_up = False  # the backward pass of the present part ends in a sum over the workers
        self._orders = 0
        self._order: CallOrder | None = None

    def begin(self, left_out: Callable[[], int]) -> None:
        self._order = None
        if self._world is not None and (readers := left_out()):
            self._order = CallOrder(self._world, self._orders, readers)
            self._orders += 1

    def calls(self, name: str) -> None:
        """Note that the script is about to call a model."""
        adds_up = self._adds_up and torch.is_grad_enabled() and name in self._models.wrapped
        if self._order is not None and adds_up:
            self._order.add(name)

    @contextlib.contextmanager
    def part(self, part: Portion) -> Iterator[None]:
        self._adds_up = part.last
        with contextlib.nullcontext() if part.last else self._models.without_sums():
            yield

    def backward(self, loss: torch.Tensor, part: Portion) -> None:
        if part.last and self._order is not None:
            self._order.end()
        world = dist.get_world_size() if self._models.parallel or self._is_sharded else 1
        (loss * (part.weight * world)).backward()  # type: ignore[no-untyped-call]

    def finish(self, parts: list[Portion]) -> None:
        if parts:
            return
        self._models.wrap_changed()  # the other workers wrap changed models when they call them
        parallel = self._models.parallel
        called = parallel.keys() if self._order is None else self._order.names()
        losses = [_of_nothing(parallel[name]) for name in called if name in parallel]
        if losses:
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Do nothing: ``WrappedModels.leave`` drops the wrappers."""


class CallOrder:
    """The order in which a step calls its models, for the workers without a part of the batch.

    DistributedDataParallel adds up the gradients of the models that were called, in the reverse order of the
    calls. All workers must make these sums in the same order. The last rank always has a part. It writes the
    name of each model to the round's store, before the model's first call in the last part.
    """

    def __init__(self, world: World, number: int, readers: int) -> None:
        """``number``: the number of earlier objects in this world, which makes the store's keys unique.
        ``readers``: the number of workers without a part."""
        self._world, self._number, self._readers = world, number, readers
        self._written: list[str] = []
        self._ended = world.rank != world.size - 1

    def add(self, name: str) -> None:
        """Tell the other workers that the script is about to call the model, once per step."""
        if not self._ended and name not in self._written:
            self._write(name)

    def end(self) -> None:
        """Tell the other workers that the step calls no further model."""
        if not self._ended:
            self._ended = True
            self._write(_NONE)

    def names(self) -> Iterator[str]:
        """Yield the names of the models, each as soon as the step calls it. Raises WorldChanged."""
        for at in itertools.count():
            if (name := self._world.wait_for_value(self._key(at))) == _NONE:
                self._world.forget_values([self._key(i) for i in range(at + 1)], self._readers)
                return
            yield name

    def _write(self, name: str) -> None:
        self._world.set_value(self._key(len(self._written)), name)
        self._written.append(name)

    def _key(self, at: int) -> str:
        return f"call {at} of {self._number}"


def _of_nothing(model: DistributedDataParallel) -> torch.Tensor:
    """Return a loss whose backward pass adds zeros to every sum of this model. So the other workers do not
    wait in vain for this worker, which has no part of the batch.

    The forward pass runs with everything that DistributedDataParallel does around it.
    """
    used = [p for p in model.module.parameters() if p.requires_grad]
    if model.find_unused_parameters:
        used = used[:1]  # so that a parameter that no worker used gets no gradient

    def nothing(*_: Any) -> torch.Tensor:
        return torch.stack([p.flatten()[:0].sum() for p in used]).sum()

    model._run_ddp_forward = nothing  # type: ignore[method-assign]
    try:
        loss: torch.Tensor = model()
    finally:
        del model._run_ddp_forward
    return loss
