"""Norms of sharded gradients in consistent mode, for torch's ``clip_grad_norm_``.

torch adds up the norm of a DTensor from the norms of its shards, so that the result depends on the layout.
Here one worker takes the norm of a whole gradient, as it is taken of a model that is not sharded. The workers
take turns, so each receives about the same number of bytes, and has one whole gradient at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import clip_grad
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

_meshes: list[DeviceMesh] = []  # the norms of gradients on these meshes are taken whole


def take_whole(mesh: DeviceMesh) -> Callable[[], None]:
    """Have torch take the norms of gradients on this mesh whole. Return a function that ends that."""
    _replace()
    _meshes.append(mesh)
    return functools.partial(_forget, mesh)


def _forget(mesh: DeviceMesh) -> None:
    _meshes[:] = [other for other in _meshes if other is not mesh]


@functools.cache
def _replace() -> None:
    """Replace torch's function, once in a process."""
    by_layout = clip_grad._get_total_norm

    @functools.wraps(by_layout)
    def total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        mesh = _mesh_of(given)
        if mesh is None:
            return by_layout(given, norm_type, error_if_nonfinite, foreach)
        with torch.no_grad():
            norm = _norm(given, mesh, float(norm_type), foreach)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be "
                "clipped: give error_if_nonfinite=False to scale them all the same"
            )
        return _replicated(norm, mesh)

    clip_grad._get_total_norm = nn.utils.get_total_norm = total_norm


def _mesh_of(tensors: Sequence[torch.Tensor]) -> DeviceMesh | None:
    """Return the mesh over which all these tensors are sharded as fully_shard does, if their norms are taken
    whole."""
    for mesh in _meshes:
        layout = mesh, (*[Replicate()] * (mesh.ndim - 1), Shard(0))
        if tensors and all(_layout_of(tensor) == layout for tensor in tensors):
            return mesh
    return None


def _layout_of(tensor: torch.Tensor) -> tuple[DeviceMesh, tuple[Any, ...]] | None:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _norm(gradients: Sequence[Any], mesh: DeviceMesh, kind: float, foreach: bool | None) -> torch.Tensor:
    group = mesh.get_group(mesh.ndim - 1)
    size, rank = group.size(), group.rank()
    norms: list[torch.Tensor] = []
    grouped: dict[Any, Any] = _group_tensors_by_device_and_dtype([list(gradients)])
    for [its], _ in grouped.values():
        of_group = its[0].to_local().new_zeros(len(its))
        for first in range(0, len(its), size):
            taken = _whole_of_one(its[first : first + size], group, size, rank)
            if taken is not None:
                plain = foreach is False
                of_group[first + rank] = (
                    torch.linalg.vector_norm(taken, kind) if plain else torch._foreach_norm([taken], kind)[0]
                )
        if size > 1:
            dist.all_reduce(of_group, group=group)  # only one worker has a number other than 0
        norms.append(of_group)
    device = gradients[0].device
    total: torch.Tensor = torch.linalg.vector_norm(torch.cat([norm.to(device) for norm in norms]), kind)
    return total


def _whole_of_one(
    gradients: Sequence[Any], group: dist.ProcessGroup, size: int, rank: int
) -> torch.Tensor | None:
    """Return the gradient whose index is this rank, whole; None if there are fewer gradients. All ranks call
    the function together, each with its shards of all gradients."""
    locals_: list[torch.Tensor] = [gradient.to_local().reshape(-1) for gradient in gradients]
    mine = gradients[rank] if rank < len(gradients) else None
    lengths = shard_lengths(tuple(mine.shape), size) if mine is not None else [0] * size
    if size == 1:
        return locals_[0].view(gradients[0].shape)
    room = locals_[0].new_empty(sum(lengths))
    sent = [len(local) for local in locals_] + [0] * (size - len(locals_))
    dist.all_to_all_single(room, torch.cat(locals_), lengths, sent, group=group)
    return room.view(mine.shape) if mine is not None else None


def shard_lengths(shape: tuple[int, ...], size: int) -> list[int]:
    """Return the number of elements of each rank's shard of a tensor that is sharded by its first dimension,
    as ``torch.chunk`` cuts."""
    rows, row = shape[0], math.prod(shape[1:])
    most = -(-rows // size)
    return [max(0, min(most, rows - rank * most)) * row for rank in range(size)]


def _replicated(norm: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)
