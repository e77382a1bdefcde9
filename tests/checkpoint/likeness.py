"""Comparison of values with their types."""

from __future__ import annotations

from typing import Any

import torch


def with_types(value: Any) -> Any:
    """A value that is equal to another only if the types of keys and containers are equal, too."""
    if isinstance(value, torch.Tensor):
        return (
            "tensor",
            str(value.dtype),
            value.tolist() if value.numel() < 10 else float(value.double().sum()),
        )
    if isinstance(value, dict):
        items = [(type(k).__name__, k, with_types(v)) for k, v in value.items()]
        return (type(value).__name__, items)
    if isinstance(value, list | tuple):
        return (type(value).__name__, [with_types(v) for v in value])
    return (type(value).__name__, value)
