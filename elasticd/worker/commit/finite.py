"""Look for NaN and infinite values: one pass over the tensors, and on a GPU one wait."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(largest.isfinite().all()) for largest in _largest(tensors))


def any_nan(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a value is NaN. Infinite values are allowed: masks consist of them."""
    return any(bool(largest.isnan().any()) for largest in _largest(tensors))


def _largest(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield for each device the largest magnitude of each tensor. A sum of squares could overflow though no
    element does."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        wide = tensor.is_floating_point() and tensor.element_size() > 1  # narrower types have no norm
        if (wide or tensor.is_complex()) and tensor.numel() and tensor.layout is torch.strided:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if local.numel():
                found.setdefault(local.device, []).append(local)
    for on_device in found.values():
        yield torch.stack(torch._foreach_norm(on_device, ord=float("inf")))
