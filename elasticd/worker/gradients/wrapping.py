"""Wrap a State's models for a world, and count the sums of their gradients."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from elasticd.checkpoint.client.tensors import is_flattened
from elasticd.worker.values.contents import SHARD_INSTEAD

if TYPE_CHECKING:
    from elasticd.worker.world.group import World


Wrap = Callable[[nn.Module], Any]


def data_parallel(model: nn.Module) -> DistributedDataParallel:
    """Wrap a model in DistributedDataParallel: the default for ``wrap``. The weights are not sent, since all
    workers have the same weights already."""
    first = next(model.parameters())
    return DistributedDataParallel(model, [first.device] if first.is_cuda else None, init_sync=False)


def to_wrap(modules: Mapping[str, nn.Module], trained: Set[int]) -> list[str]:
    """Return the names of the modules to wrap: the model, and all modules with trained parameters.
    ``trained``: the ids of the parameters that an optimizer trains.

    Raises TypeError if two modules share some trained parameters, and each has other trained parameters.
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


class WrappedModels:
    """The modules of a State as scripts call them: wrapped for the present world, and wrapped again after the
    script freezes or unfreezes parameters.

    ``names``: of the modules to wrap. ``wrap``: the function that wraps; None: no module is wrapped.
    ``sums_per_step``: only the last backward pass of a step ends in a sum over the workers.
    ``before_forward``: called with the name of a module before its forward pass. For a module that is not
    wrapped, it is called when the script reads the module from the State.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        names: Sequence[str] = (),
        wrap: Wrap | None = None,
        *,
        sums_per_step: bool = False,
    ) -> None:
        self._modules, self._names, self._wrap = modules, names, wrap
        self._sums_per_step = sums_per_step
        self.before_forward: Callable[[str], None] = lambda name: None
        self._world: World | None = None
        self._wrapped: dict[str, _Wrapped] = {}
        self._silence: contextlib.ExitStack | None = None
        self._own_calls = 0

    def __getitem__(self, name: str) -> Any:
        """Return the module, wrapped for its present trainable parameters if it is to be wrapped."""
        self._wrap_again(name)
        if name in self.wrapped:
            return self.wrapped[name]
        self.before_forward(name)
        return self._modules[name]

    def __len__(self) -> int:
        """The number of modules to wrap."""
        return len(self._names)

    @property
    def wrapped(self) -> dict[str, Any]:
        """The modules that are wrapped, by name."""
        return {name: w.model for name, w in self._wrapped.items() if w.model is not None}

    @property
    def parallel(self) -> dict[str, DistributedDataParallel]:
        """The modules in a DistributedDataParallel, by name."""
        return {n: model for n, model in self.wrapped.items() if isinstance(model, DistributedDataParallel)}

    # ------------------------------------------------------------ worlds

    def enter(self, world: World | None) -> None:
        """Wrap the modules for a world. None: the world never changes."""
        self._world, self._own_calls = world, 0
        for name in self._names:
            self._wrap_module(name)

    def leave(self) -> None:
        """Drop the wrappers: the script calls the modules themselves again."""
        for model in self.parallel.values():
            model._remove_autograd_hooks()  # type: ignore[no-untyped-call]  # the script may still use it
        self._wrapped.clear()

    def wrap_changed(self) -> None:
        """Wrap modules again whose trainable parameters have changed."""
        for name in self._names:
            self._wrap_again(name)

    def refuse_unfrozen(self) -> None:
        """Raise RuntimeError for a parameter with a gradient that the workers do not add up."""
        for name, wrapped in self._wrapped.items():
            if late := wrapped.unfrozen():
                raise RuntimeError(
                    f"{late} was unfrozen after State had wrapped {name} for this world, so the workers do "
                    f"not add up its gradient: call state.{name} in each forward pass, which wraps it again, "
                    "keep no variable with the earlier wrapper, and call step.backward before you freeze or "
                    "unfreeze parameters"
                )

    def _wrap_again(self, name: str) -> None:
        wrapped = self._wrapped.get(name)
        if wrapped is not None and wrapped.is_outdated:
            if isinstance(wrapped.model, DistributedDataParallel):
                wrapped.model._remove_autograd_hooks()  # type: ignore[no-untyped-call]
            self._wrap_module(name)

    def _wrap_module(self, name: str) -> None:
        """Wrap a module, unless it is frozen and has no gradients to add up. Raises TypeError if State could
        not keep the result."""
        self._wrapped[name] = wrapped = _Wrapped(self._modules[name])
        if self._wrap is None or wrapped.is_frozen:
            return
        wrapped.model = model = wrapped.made_by(self._wrap)
        if self._sums_per_step and getattr(model, "static_graph", False):
            raise TypeError(
                "static_graph=True requires that all backward passes are alike, and with Data only some of "
                "them end in a sum over the workers: remove static_graph=True from wrap="
            )
        if isinstance(model, nn.Module):
            model.register_forward_pre_hook(lambda *_: self.before_forward(name))
        if isinstance(model, DistributedDataParallel):
            if self._world is not None:
                count_sums(model, self._world)
            self._leave_out_own_calls(model)
            if self._silence is not None:
                self._silence.enter_context(model.no_sync())

    # ------------------------------------------------------------ sums

    @contextlib.contextmanager
    def without_sums(self) -> Iterator[None]:
        """A ``with`` block in which backward passes do not sum gradients over the workers."""
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "_silence", None)
            self._silence = stack
            for model in self.parallel.values():
                stack.enter_context(model.no_sync())
            yield

    def calls(self) -> int:
        """Return the number of collectives that the script has called in the present world. Not counted are
        the collectives by which DistributedDataParallel copies rank 0's buffers before a forward pass."""
        return _calls() - self._own_calls

    def _leave_out_own_calls(self, model: DistributedDataParallel) -> None:
        reference = weakref.ref(model)

        # A function, since a deep copy of the model would copy the object of a bound method.
        def pre_forward(*args: Any, **kwargs: Any) -> Any:
            before, mine = _calls(), reference()
            assert mine is not None
            given = DistributedDataParallel._pre_forward(mine, *args, **kwargs)  # type: ignore[no-untyped-call]
            self._own_calls += _calls() - before
            return given

        model._pre_forward = pre_forward  # type: ignore[method-assign]


class _Wrapped:
    """A module, its wrapper (``model``; None if it is not wrapped), and which of its parameters were
    trainable when it was wrapped."""

    def __init__(self, module: nn.Module) -> None:
        self.model: Any = None
        self._module = module
        self._parameters = [*module.parameters()]
        self._flags = [p.requires_grad for p in self._parameters]

    @property
    def is_outdated(self) -> bool:
        """Whether the script has frozen or unfrozen parameters since the module was wrapped."""
        return [p.requires_grad for p in self._parameters] != self._flags

    @property
    def is_frozen(self) -> bool:
        return not any(self._flags)

    def unfrozen(self) -> str:
        """Return the name of a parameter that has a gradient, but was frozen when the module was wrapped;
        empty if there is none."""
        if not self.is_outdated:
            return ""
        late = {
            id(p)
            for p, was in zip(self._parameters, self._flags, strict=True)
            if not was and p.requires_grad and p.grad is not None
        }
        return next((name for name, p in self._module.named_parameters() if id(p) in late), "")

    def made_by(self, wrap: Wrap) -> Any:
        """Return the wrapped module. Raises TypeError if it has other parameters."""
        mine = [(id(p), p.shape) for p in self._parameters]
        model = wrap(self._module)
        now = [(id(p), p.shape) for p in self._module.parameters()]
        if now != mine or (isinstance(model, nn.Module) and is_flattened(model)):
            raise TypeError(
                "wrap= gives the model other parameters, which State cannot keep: to shard the model, "
                f"{SHARD_INSTEAD}"
            )
        return model


def _calls() -> int:
    """Return the number of collectives that were called in the present world."""
    world: Any = dist.group.WORLD if dist.is_initialized() else None
    return world._get_sequence_number_for_group() if world is not None else 0


def count_sums(model: DistributedDataParallel, world: World) -> None:
    """Count in ``world`` how many backward passes through the model begin, and how many complete.

    A pass whose sum failed does not complete, even if the script caught the exception. ``end`` is queued by
    another callback, so it runs after the callback in which DistributedDataParallel waits for its sums.
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
