"""How the model of a State is wrapped for a world, and how the sums of its gradients are counted there."""

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
    from elasticd.worker.world import World

SHARDED = (
    "pieces of a sharded model (FSDP) are lost with each worker: have the script start again instead, with "
    "worker.Checkpoints and without worker.run"
)

Wrap = Callable[[nn.Module], Any]


def data_parallel(model: nn.Module) -> DistributedDataParallel:
    """How a model is wrapped unless the script says otherwise. All workers have the same weights
    already, so nothing is sent."""
    first = next(model.parameters())
    return DistributedDataParallel(model, [first.device] if first.is_cuda else None, init_sync=False)


def is_flattened(module: nn.Module) -> bool:
    """Whether some of it is in torch's first FSDP, FullyShardedDataParallel, which shards parameters and does
    not say which piece of what a rank has."""
    first = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return first is not None and any(isinstance(m, first.FullyShardedDataParallel) for m in module.modules())


def to_wrap(modules: Mapping[str, nn.Module], trained: Set[int]) -> list[str]:
    """The names of those that are to be wrapped: the model, and what else has parameters that an optimizer
    trains, by their ids. Raises TypeError where two have some of them in common, and each has others."""
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
    """A module, with the parameters that were to be trained when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = [*module.parameters()]
        self._flags = [p.requires_grad for p in self._parameters]

    @property
    def as_it_was(self) -> bool:
        """Whether the same are to be trained now."""
        return [p.requires_grad for p in self._parameters] == self._flags

    @property
    def is_frozen(self) -> bool:
        return not any(self._flags)

    def unfrozen(self) -> str:
        """One that has a gradient now, and was not to be trained; empty if there is none."""
        if self.as_it_was:
            return ""
        late = {
            id(p)
            for p, was in zip(self._parameters, self._flags, strict=True)
            if not was and p.requires_grad and p.grad is not None
        }
        return next((name for name, p in self._module.named_parameters() if id(p) in late), "")

    def wrapped_in(self, wrap: Wrap, world: World | None, *, sums_per_step: bool) -> Any:
        """The module in ``wrap``. Raises TypeError where State could not keep what comes of it.
        ``sums_per_step``: not each backward pass ends in a sum over the workers, only the step's last."""
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
    """A time in which backward passes through the models add nothing up over the workers."""

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
        """A model that is wrapped anew meanwhile."""
        if self._open is not None and isinstance(model, DistributedDataParallel):
            self._open.enter_context(model.no_sync())


class Calls:
    """How many collectives were called in the present world, but for DistributedDataParallel's own before a
    forward pass, with which it makes the buffers of all workers those of the first."""

    def __init__(self, models: Iterable[Any]) -> None:
        self._own = 0
        for model in models:
            self.leave_out(model)

    def leave_out(self, model: Any) -> None:
        """What it calls by itself."""
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
    """Count, in ``world``, the backward passes through the model, and those that got to their end: of one
    whose sum failed there is no second count, whoever caught the exception. The end is a callback that a
    callback asks for, and so comes after the one in which DistributedDataParallel waits for its sums."""
    queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

    def end() -> None:
        world.sums += 1

    # The model is an argument: a function that holds the model would be a cycle, which outlives the world.
    def forward(model: nn.Module, _: Any, output: Any) -> None:
        begun = False

        def begin(_: torch.Tensor) -> None:
            nonlocal begun
            if not begun:
                begun = True
                world.sums_begun += 1
                queue(lambda: queue(end))

        if model.require_backward_grad_sync:
            # Each worker may make its loss of others of them.
            for tensor in _find_tensors(output):  # type: ignore[no-untyped-call]
                if tensor.requires_grad:
                    tensor.register_hook(begin)

    model.register_forward_hook(forward)
