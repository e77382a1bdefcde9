"""Plain data: numbers, strings, tensors and containers of them. Such data can be copied, sent and loaded
without running code that the data contains."""

from __future__ import annotations

import copy
import hashlib
import io
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch

from elasticd.checkpoint.client.objects import FACTORIES, loaded, packed
from elasticd.checkpoint.client.tensors import require_dense

_CONTAINERS = (dict, OrderedDict, Counter, defaultdict, list, set)
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_KEEP = (
    "keep numbers, strings, tensors, and dicts, lists, tuples and sets of them, or objects with state_dict() "
    "and load_state_dict()"
)


def copied(value: Any, name: str = "value") -> Any:
    """Return a copy that shares nothing mutable with the value.

    Raises TypeError, with ``name``, for anything but numbers, strings, dense tensors, and dicts, lists,
    tuples and sets of them. Numpy numbers as keys become equal Python numbers.
    """
    kind = type(value)
    if kind in _VALUES:
        return value
    if isinstance(value, torch.Tensor):
        require_dense(value, name)
        return value.detach().clone()
    if kind is tuple:
        return tuple([copied(v, name) for v in value])
    if kind is list:
        return [copied(v, name) for v in value]
    if kind is set:
        return {copied(v, name) for v in value}
    if kind in _CONTAINERS:
        made = copy.copy(value)
        if kind is defaultdict and value.default_factory not in (None, *FACTORIES.values()):
            raise TypeError(
                f"{name} holds a defaultdict of {value.default_factory!r}, which cannot be sent to another "
                "worker: use int, float, str, bool, list, dict, set or tuple as its default_factory"
            )
        made.clear()
        for key, item in value.items():
            made[plain_key(key, name)] = copied(item, name)
        return made
    raise TypeError(f"{name} holds a {kind.__qualname__}, which cannot be sent to another worker: {_KEEP}")


def plain_key(key: Any, name: str) -> Any:
    kind = type(key)
    if kind in _VALUES:
        return key
    if kind is tuple:
        return tuple([plain_key(part, name) for part in key])
    if kind.__module__ == "numpy" and type(number := key.item()) in _VALUES and number == key:
        return number
    raise TypeError(
        f"{name} holds the key {key!r}, a {kind.__qualname__}, which cannot be sent to another worker: have "
        "keys be plain numbers or strings"
    )


def outlined(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return the data as bytes to send, without the contents of its tensors, and a list of the tensors. The
    bytes have the shapes, types and strides."""
    tensors: list[torch.Tensor] = []

    def leave_out(tensor: torch.Tensor) -> torch.Tensor:
        require_dense(tensor, "it")
        tensors.append(tensor)
        return emptied(tensor)

    outline = io.BytesIO()
    torch.save(packed(with_tensors(value, leave_out)), outline)
    return outline.getvalue(), tensors


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without content, with the shape and the type of this one. It is dense, and its
    dimensions are in the same order in memory."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return torch.empty_like(tensor, device="meta")
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def require_sendable(value: Any, name: str) -> None:
    """Raise TypeError, with ``name``, for data that another worker could not load."""
    try:
        loaded(outlined(value)[0])
    except Exception as error:
        raise TypeError(f"{name} holds a value that cannot be sent to another worker: {_KEEP}") from error


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the data with ``change`` applied to each tensor, in a fixed order."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(with_tensors(v, change) for v in value)
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = with_tensors(item, change)
        return made
    return value


def unchanged(value: Any, given: Any) -> Any:
    """Return ``value``, which was made from ``given``. Where a tensor's dtype was changed, use the tensor of
    ``given``."""
    if isinstance(value, torch.Tensor) and isinstance(given, torch.Tensor):
        return value if value.dtype == given.dtype else given.to(value.device)
    if isinstance(value, dict) and isinstance(given, dict):
        for key in value.keys() & given.keys():
            value[key] = unchanged(value[key], given[key])
    if type(value) in (list, tuple) and type(value) is type(given) and len(value) == len(given):
        return type(value)(map(unchanged, value, given))
    return value


def number_of(digest: hashlib.blake2b) -> int:
    """Return 63 bits of the digest, which a tensor of integers can hold."""
    return int.from_bytes(digest.digest(), "little") >> 1


def alike(one: Any, other: Any) -> bool:
    """Whether the two are the same data; NaN equals NaN."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (one.shape, one.dtype) == (other.shape, other.dtype) and _equal(
            one.detach().cpu(), other.detach().cpu()
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if type(one) in (list, tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(alike, one, other))
    # 0 and 0.0 count as the same number.
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return (numbers or type(one) is type(other)) and bool(one == other or (one != one and other != other))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if torch.equal(one, other):
        return True
    if not one.is_floating_point() and not one.is_complex():
        return False
    if one.itemsize == 1:  # torch does not compare elements of 8-bit floating-point types
        one, other = one.float(), other.float()
    return bool(((one == other) | ((one != one) & (other != other))).all())
