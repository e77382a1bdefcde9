"""Data that can be copied, sent and loaded without running anybody's code."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch

_CONTAINERS = (dict, OrderedDict, Counter, defaultdict, list, set)
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def copied(value: Any, name: str = "value") -> Any:
    """A copy that shares nothing that can change. Raises TypeError, naming ``name``, for what is
    neither a number, a string, a tensor nor a dict, list, tuple or set of such."""
    kind = type(value)
    if kind in _VALUES:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if kind is tuple:
        return tuple([copied(v, name) for v in value])
    if kind is list:
        return [copied(v, name) for v in value]
    if kind is set:
        return {copied(v, name) for v in value}
    if kind in _CONTAINERS:
        made = copy.copy(value)
        for key, item in made.items():
            made[key] = copied(item, name)
        return made
    raise TypeError(
        f"{name} holds a {kind.__qualname__}, which cannot be sent to another worker: keep numbers, strings, "
        "tensors, and dicts, lists, tuples and sets of them, or objects with state_dict() and "
        "load_state_dict()"
    )


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same data, each tensor in it changed for another, in a fixed order."""
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
    """What was made of the ``given`` data, but with tensors whose type has changed as they were given."""
    if isinstance(value, torch.Tensor) and isinstance(given, torch.Tensor):
        return value if value.dtype == given.dtype else given.to(value.device)
    if isinstance(value, dict) and isinstance(given, dict):
        for key in value.keys() & given.keys():
            value[key] = unchanged(value[key], given[key])
    if type(value) in (list, tuple) and type(value) is type(given) and len(value) == len(given):
        return type(value)(map(unchanged, value, given))
    return value


def alike(one: Any, other: Any) -> bool:
    """Whether they are the same data; numbers that are NaN are alike."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (one.shape, one.dtype) == (other.shape, other.dtype) and bool(
            torch.equal(one.detach().cpu(), other.detach().cpu())
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if type(one) in (list, tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and bool(one == other or (one != one and other != other))
