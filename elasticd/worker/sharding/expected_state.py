"""The tensors that an optimizer will keep for each parameter, known before its first step."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from typing import Any

import torch
from torch.optim import Optimizer


def expected_slots(
    optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, torch.dtype]:
    """Return the names and types of the tensors, of the shape of the parameter, that the optimizer will keep
    for a parameter of this group. Empty if they are not known.

    A copy of the optimizer makes a step with a tiny parameter. Only torch's own optimizers are tried: the
    step of another may be a collective.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return {}
    tiny = torch.zeros(
        (2,) * min(parameter.dim(), 2), dtype=parameter.dtype, requires_grad=True, device="cpu"
    )
    tiny.grad = torch.zeros_like(tiny)
    trial = copy.copy(optimizer)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**group, "params": [tiny], "capturable": False, "fused": None}]
    step: Any = inspect.unwrap(type(trial).step)  # without the hooks of a step, which count steps
    try:
        with torch.no_grad():
            step(trial)
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
    ):  # a step that needs more than gradients, such as a closure
        return {}
    kept = trial.state[tiny].items()
    return {
        name: v.dtype for name, v in kept if isinstance(v, torch.Tensor) and v.shape == tiny.shape and v.dim()
    }
