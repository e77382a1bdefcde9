"""Wrap a State's models for a world, and count the sums of their gradients."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

if TYPE_CHECKING:
    from elasticd.worker.world.group import World

SHARDED = (
    "pieces of a sharded model (FSDP) are lost with each worker: have the script start again instead, with "
    "worker.Checkpoints and without worker.run"
)

Wrap = Callable[[nn.Module], Any]


def data_parallel(model: nn.Module) -> DistributedDataParallel:
    """Wrap a model, unless the script gives its own ``wrap``. All workers have the same weights already, so
    none are sent."""
    first = next(model.parameters())
    return DistributedDataParallel(model, [first.device] if first.is_cuda else None, init_sync=False)


def is_flattened(module: nn.Module) -> bool:
    """Whether a part of the module is in torch's first FSDP, FullyShardedDataParallel. It shards parameters
    without telling which piece a rank has."""
    first = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return first is not None and any(isinstance(m, first.FullyShardedDataParallel) for m in module.modules())


def to_wrap(modules: Mapping[str, nn.Module], trained: Set[int]) -> list[str]:
    """Return the names of the modules to wrap: the model, and modules with parameters that an optimizer
    trains (``trained``: their ids).

    Raises TypeError if two modules share some trained parameters and each has others.
    """
    found: list[str] = []
    covered: dict[int, str] = {}
    for name, module in modules.items():
        mine = {id(p) for p in module.parameters()} & trained
        new = mine - covered.keys()
        if name != "model" and not new:
            continue
        if shared := mine - new:
            other = covered[shared.pop()]
            raise TypeError(
                f"State was given {other} and {name}, which have parameters in common, and {name} has others "
                "that are trained: to have each gradient added up once, give State one module that holds both"
            )
        covered |= dict.fromkeys(mine, name)
        found.append(name)
    return found


class Wrapped:
    """A module, and which of its parameters were trainable when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = [*module.parameters()]
        self._flags = [p.requires_grad for p in self._parameters]

    @property
    def as_it_was(self) -> bool:
        """Whether the same parameters are trainable now."""
        return [p.requires_grad for p in self._parameters] == self._flags

    @property
    def is_frozen(self) -> bool:
        return not any(self._flags)

    def unfrozen(self) -> str:
        """Return the name of a parameter that has a gradient but was not trainable; empty if there is
        none."""
        if self.as_it_was:
            return ""
        late = {
            id(p)
            for p, was in zip(self._parameters, self._flags, strict=True)
            if not was and p.requires_grad and p.grad is not None
        }
        return next((name for name, p in self._module.named_parameters() if id(p) in late), "")

    def wrapped_in(self, wrap: Wrap, world: World | None, *, sums_per_step: bool) -> Any:
        """Return the module wrapped by ``wrap``. Raises TypeError if State could not keep the result.

        ``sums_per_step``: only the last backward pass of a step ends in a sum over the workers.
        """
        mine = [(id(p), p.shape) for p in self._parameters]
        wrapped = wrap(self._module)
        now = [(id(p), p.shape) for p in self._module.parameters()]
        if now != mine or (isinstance(wrapped, nn.Module) and is_flattened(wrapped)):
            raise TypeError(f"wrap= gives the model other parameters, which State cannot keep, as {SHARDED}")
        if sums_per_step and getattr(wrapped, "static_graph", False):
            raise TypeError(
                "static_graph=True wants the same of every backward pass, and with Data not each of them "
                "ends in a sum over the workers: leave it out of wrap="
            )
        if world is not None and isinstance(wrapped, DistributedDataParallel):
            count_sums(wrapped, world)
        return wrapped


class Silence:
    """A ``with`` block in which backward passes through the models add nothing up over the workers."""

    def __init__(self) -> None:
        self._open: contextlib.ExitStack | None = None

    @contextlib.contextmanager
    def over(self, models: Iterable[Any]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "_open", None)
            self._open = stack
            for model in models:
                self.take_in(model)
            yield

    def take_in(self, model: Any) -> None:
        """Include a model that is wrapped during the block."""
        if self._open is not None and isinstance(model, DistributedDataParallel):
            self._open.enter_context(model.no_sync())


class Calls:
    """The number of collectives called in the present world. DistributedDataParallel's own before a forward
    pass, which copy rank 0's buffers to all workers, are not counted."""

    def __init__(self, models: Iterable[Any]) -> None:
        self._own = 0
        for model in models:
            self.leave_out(model)

    def leave_out(self, model: Any) -> None:
        """Do not count the collectives that the model calls by itself."""
        if isinstance(model, DistributedDataParallel):
            model._pre_forward = partial(self._counted, weakref.ref(model))  # type: ignore[method-assign]

    def _counted(self, model: weakref.ref[DistributedDataParallel], *args: Any, **kwargs: Any) -> Any:
        before = self._all()
        mine = model()
        assert mine is not None
        given = DistributedDataParallel._pre_forward(mine, *args, **kwargs)  # type: ignore[no-untyped-call]
        self._own += self._all() - before
        return given

    def __call__(self) -> int:
        return self._all() - self._own

    def _all(self) -> int:
        world: Any = dist.group.WORLD if dist.is_initialized() else None
        return world._get_sequence_number_for_group() if world is not None else 0


def count_sums(model: DistributedDataParallel, world: World) -> None:
    """Count, in ``world``, the backward passes through the model that begin and that complete.

    A pass whose sum failed does not complete, even if the script caught the exception. The end is a callback
    queued by a callback, so it runs after the callback in which DistributedDataParallel waits for its sums.
    """
    queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

    def end() -> None:
        world.sums += 1

    # The model is an argument: a closure with the model would be a reference cycle, which outlives the world.
    def forward(model: nn.Module, _: Any, output: Any) -> None:
        begun = False

        def begin(_: torch.Tensor) -> None:
            nonlocal begun
            if not begun:
                begun = True
                world.sums_begun += 1
                queue(lambda: queue(end))

        if model.require_backward_grad_sync:
            # The loss of each worker may use other outputs.
            for tensor in _find_tensors(output):  # type: ignore[no-untyped-call]
                if tensor.requires_grad:
                    tensor.register_hook(begin)

    model.register_forward_hook(forward)
