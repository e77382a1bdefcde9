"""The objects of a state that are not tensors: how ``torch.save`` writes them, and how they are read without
running code from the data."""

from __future__ import annotations

import copy
import io
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

FACTORIES: Final = {kind.__name__: kind for kind in (bool, int, float, str, list, dict, set, tuple)}
_DEFAULTS: Final = "elasticd: with defaults"
_LOADABLE: Final = (bool, float, complex, str, bytes, type(None))
# Larger integers are tried out, since pickle stores very large ones in another form.
_INT_MAX: Final = 1 << 1000


def pickled(objects: Mapping[str, Any], before: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the objects as ``torch.save`` writes them. Raises TypeError for an object that could not be
    loaded again; an object that is the same as in ``before`` is not tried again."""
    made = {}
    for key, value in objects.items():
        try:
            out = io.BytesIO()
            sure = _surely_loads(value)
            torch.save(value if sure else packed(value), out)
            made[key] = out.getvalue()
            if made[key] != before.get(key) and not sure:
                loaded(made[key])
        except Exception as error:
            raise TypeError(
                f"{key} could not be loaded again: keep tensors and plain objects (numbers, strings, lists, "
                "dicts) only, as torch.load(weights_only=True) takes them"
            ) from error
    return made


def _surely_loads(value: Any) -> bool:
    """Whether the value is known to load again without a trial, which takes long for large values."""
    kind = type(value)
    if kind in _LOADABLE:
        return True
    if kind is int:
        return bool(-_INT_MAX < value < _INT_MAX)
    if kind is dict:
        return all(_surely_loads(k) and _surely_loads(v) for k, v in value.items())
    return kind in (list, tuple) and all(map(_surely_loads, value))


def loaded(raw: bytes) -> Any:
    """Return data that ``torch.save`` wrote from ``packed`` data; the source need not be trusted. Raises the
    errors of ``torch.load``."""
    return _unpacked(torch.load(io.BytesIO(raw), weights_only=True))


def packed(value: Any) -> Any:
    """Return the data without defaultdicts, which ``torch.load(weights_only=True)`` refuses."""
    kind = type(value)
    if kind is defaultdict and value.default_factory in (None, *FACTORIES.values()):
        factory = value.default_factory.__name__ if value.default_factory else ""
        return (_DEFAULTS, factory, {key: packed(item) for key, item in value.items()})
    return _each(packed, value)


def _unpacked(value: Any) -> Any:
    if type(value) is tuple and len(value) == 3 and type(value[0]) is str and value[0] == _DEFAULTS:
        return defaultdict(FACTORIES.get(value[1]), _unpacked(value[2]))
    return _each(_unpacked, value)


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Return the data with ``change`` applied to its parts, if it has parts."""
    kind = type(value)
    if kind in (list, tuple):
        return kind(map(change, value))
    if kind in (dict, OrderedDict, Counter):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = change(item)
        return made
    return value
