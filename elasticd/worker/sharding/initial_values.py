"""The initial values of a model on the meta device, which has no memory.

Each worker makes all values, one module after another, and keeps its part. So the values are the same for any
layout, and a worker needs memory for one module besides its part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from elasticd.worker.values import randomness

Init = Callable[[str, nn.Module], Any]
_TOGETHER = 1 << 20  # numbers that are summed at once
_SUMMED = 1e-9  # relative; sums in double precision differ less, in whatever order


class Sums(NamedTuple):
    """A sum of a parameter's values, each with another weight, and how much the sums of workers may differ
    by rounding. Both are 0 if the sum is not finite."""

    values: float
    slack: float

    @classmethod
    def of(cls, values: torch.Tensor) -> Sums:
        flat = values.reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        if flat.itemsize == 1:
            flat = flat.view(torch.uint8)  # torch cannot compute with all such types
        weights = torch.linspace(0.5, 1.5, min(len(flat), _TOGETHER), dtype=torch.float64, device="cpu")
        total = sizes = 0.0
        for part in torch.split(flat, _TOGETHER):  # as numbers in double precision take more memory
            numbers = part.double()
            total += numbers.dot(weights[: len(numbers)]).item()
            sizes += numbers.abs_().sum().item()
        if not math.isfinite(total):
            return cls(0.0, 0.0)
        # Each value may be rounded up or down.
        exact = torch.finfo(flat.dtype).eps if flat.is_floating_point() else 0.0
        return cls(total, sizes * (_SUMMED + 8 * exact / math.sqrt(max(1, len(flat)))))


class InitialValues:
    """Makes the initial values of a model on the meta device.

    ``init(name, module)`` is called for each module, in the order of ``named_modules()``, and may be called
    again. The module's own parameters and buffers are then whole, in the host's memory, and their values are
    undefined. Those of the modules within have no memory. None: ``reset_parameters()`` of each module that
    has parameters or buffers of its own.
    """

    def __init__(self, model: nn.Module, init: Init | None) -> None:
        self._model, self._init = model, init
        self._called = [(n, m) for n, m in model.named_modules() if init is not None or _own(m)]
        self._with_buffers = [
            (n, m) for n, m in model.named_modules() if any(b.is_meta for b in m.buffers(recurse=False))
        ]
        if init is None:
            for name, module in (*self._called, *self._with_buffers):
                if not callable(getattr(module, "reset_parameters", None)):
                    raise TypeError(
                        f"{name or 'the model'} has no reset_parameters(), which would give it values: give "
                        "State init= for a model on the meta device"
                    )

    def make_buffers(self) -> None:
        """Give the model's buffers memory and values. Random numbers continue as if nothing was drawn."""
        with randomness.drawing_from():
            for name, module in self._with_buffers:
                bare = {k: b for k, b in module._buffers.items() if b is not None and b.is_meta}
                blank = {k: _blank(b) for k, b in bare.items()}
                module._buffers.update(blank)
                own = {k: _blank_parameter(p) for k, p in _own(module).items()}
                _, written = self._call(name, module, own)
                made = {k: module._buffers.get(k) for k in bare}
                _require_values(name, made, {*map(_memory_of, blank.values())} - written)

    def parameters(self, random: randomness.Sources) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each parameter's number and values. ``random``: the random numbers to draw. Random numbers
        then continue as if nothing was drawn. Raises TypeError if a parameter gets no values."""
        with randomness.drawing_from(random):
            yield from self._made()

    def _made(self) -> Iterator[tuple[int, torch.Tensor]]:
        numbers = {id(p): number for number, p in enumerate(self._model.parameters())}
        last = {id(p): at for at, (_, module) in enumerate(self._called) for p in _own(module).values()}
        whole: dict[int, nn.Parameter] = {}  # by the parameter's id; those that further modules share stay
        for at, (name, module) in enumerate(self._called):
            own = _own(module)
            blank = {id(p): _blank_parameter(p) for p in own.values() if id(p) not in whole}
            whole.update(blank)
            made, written = self._call(name, module, {key: whole[id(p)] for key, p in own.items()})
            _require_values(name, made, {*map(_memory_of, blank.values())} - written)
            whole.update((id(p), made[key]) for key, p in own.items())
            for parameter in {id(p) for p in own.values()}:
                if last[parameter] == at:
                    yield numbers[parameter], whole.pop(parameter).detach()

    def _call(
        self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter]
    ) -> tuple[dict[str, nn.Parameter], set[int]]:
        """Call ``init`` for a module with these parameters. Return the parameters that it has then, and the
        memory (``_memory_of``) that was written to."""
        bare = dict(module._parameters)
        module._parameters.update(parameters)
        try:
            with torch.no_grad(), _OwnOnly(name) as writes:
                if self._init is not None:
                    self._init(name, module)
                else:
                    reset: Any = module.reset_parameters
                    reset()
            now = _own(module)
        finally:
            module._parameters.update(bare)
        for key, like in parameters.items():
            if key not in now or (now[key].shape, now[key].dtype) != (like.shape, like.dtype):
                raise TypeError(
                    f"init= gives {_path(name, key)} another shape or type than the model has: keep both"
                )
        return {key: now[key] for key in parameters}, writes.written


class _OwnOnly(TorchDispatchMode):
    """A ``with`` block that refuses to write to tensors without memory, also through ``.data``. The values
    would be lost. ``name``: of the module that is given its values. ``written``: the memory that is written
    to."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name
        self.written: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
            for argument in func._schema.arguments:
                its = given.get(argument.name)
                each = its if isinstance(its, list | tuple) else [its]
                tensors = [one for one in each if isinstance(one, torch.Tensor)] if argument.is_write else []
                self.written.update(_memory_of(one) for one in tensors if not one.is_meta)
                if any(one.is_meta for one in tensors):
                    raise TypeError(
                        f"init= writes to modules within {self._name or 'the model'} while it is called for "
                        "that module, and they have no memory then: write to each module's own parameters "
                        "when it is called for it"
                    )
        return func(*args, **kwargs)


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return {key: p for key, p in module._parameters.items() if p is not None}


def is_bare(model: nn.Module) -> bool:
    """Whether the model's parameters are on the meta device. Raises TypeError if only a part of the model
    is."""
    parameters = {p.is_meta for p in model.parameters()}
    if len(parameters) > 1 or (parameters == {False} and any(b.is_meta for b in model.buffers())):
        raise TypeError(
            "a part of the model is on the meta device, and other parameters are not: build the whole model "
            "on the meta device, or none of it"
        )
    return parameters == {True}


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the host's memory that shows whether it was written to."""
    room = torch.empty_like(tensor, device="cpu")
    mark = _mark(room)
    return room.zero_() if mark is None else room.fill_(mark)


def _blank_parameter(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(_blank(parameter.detach()), requires_grad=parameter.requires_grad)


def _mark(tensor: torch.Tensor) -> float | int | None:
    """Return a number that a tensor of this type has only where nobody has written to it. None: there is no
    such number, since any may be meant."""
    if tensor.itemsize == 1 or not tensor.dtype.is_signed:
        return None
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.nan
    return torch.iinfo(tensor.dtype).min


def _memory_of(tensor: torch.Tensor) -> int:
    """Return what the memory of the tensor is known by. Views have the same memory."""
    return tensor.untyped_storage().data_ptr()


def _require_values(name: str, made: Mapping[str, torch.Tensor | None], blank: Collection[int]) -> None:
    """Raise TypeError for a tensor that nobody has written to, or not to all of it. If no number can mark
    that, only the former is known. ``blank``: the memory (``_memory_of``) that nobody has written to."""
    for key, tensor in made.items():
        if tensor is None or not tensor.numel():
            continue
        if (mark := _mark(tensor)) is None:
            # A write through NumPy is not seen, unless it has left other values than zeros.
            bare = _memory_of(tensor) in blank and not bool(tensor.reshape(-1).view(torch.uint8).any())
            values = "no values"
        else:
            is_nan = mark != mark
            bare = bool((tensor.isnan() if is_nan else tensor == mark).any())
            values = f"no values, or {'NaN' if is_nan else mark}"
        if bare:
            raise TypeError(
                f"{_path(name, key)} has got {values}: have init= write to "
                f"all parameters and buffers of {name or 'the model'}"
            )


def _path(name: str, key: str) -> str:
    return f"{name}.{key}".lstrip(".")
