"""The kinds of tensors and modules in a state, and this rank's part of a sharded tensor."""

from __future__ import annotations

import sys

import torch
from torch import nn


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor has readable memory of its own."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
    )


def is_flattened(module: nn.Module) -> bool:
    """Whether a part of the module is in torch's first FSDP, FullyShardedDataParallel. It shards parameters
    without telling which piece a rank has."""
    first = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return first is not None and any(isinstance(m, first.FullyShardedDataParallel) for m in module.modules())


def require_copyable(module: nn.Module, by: str) -> None:
    """Raise TypeError for a module of which a deep copy would silently not be compiled. ``by``: the argument
    of State that makes copies."""
    for name, part in module.named_modules():
        if part._compiled_call_impl is not None:
            raise TypeError(
                f"{name or 'the model'} was compiled by its compile(), which the copies that {by}= is given "
                f"would forget: call compile() in the function given as {by}="
            )


def require_dense(tensor: torch.Tensor, name: str) -> None:
    """Raise TypeError for a tensor that is not a dense block of numbers."""
    kind = "quantized" if tensor.is_quantized else "sparse" if tensor.layout is not torch.strided else ""
    if kind or tensor.is_nested:
        raise TypeError(
            f"{name} holds a {kind or 'nested'} tensor, which can be neither sent to another worker nor "
            "saved: keep a dense one, or what it is made of"
        )


def local_of(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return this rank's part of the tensor, and its offsets in the whole."""
    if type(tensor) is not torch.Tensor and hasattr(tensor, "__create_chunk_list__"):
        with torch.device("cpu"):  # torch computes the offsets with tensors on the default device
            [chunk] = tensor.__create_chunk_list__()
        return tensor.to_local(), tuple(chunk.offsets)  # type: ignore[attr-defined]
    return tensor, (0,) * tensor.dim()


def full_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor. All workers that have a part of it call the function together."""
    if hasattr(tensor, "full_tensor"):
        whole: torch.Tensor = tensor.full_tensor()
        return whole
    return tensor
