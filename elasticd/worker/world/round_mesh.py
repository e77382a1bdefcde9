"""The mesh over which a model is laid out in one round."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo

from elasticd.worker.world.group import device


def dimension(name: str, round: int) -> str:
    """Return the name of a dimension in a round."""
    return f"{name} of round {round}"


class RoundMesh:
    """Makes a mesh for each round, and drops it with the round.

    For torch, meshes of two worlds of the same size would be equal. DTensors would then find the mesh of the
    earlier world, with the worker's earlier rank, in their caches. So the dimensions have other names in each
    round.
    """

    def __init__(self) -> None:
        self._mesh: DeviceMesh | None = None

    def make(self, round: int, shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
        """Return a new mesh of all workers, with these dimensions: see ``dimension``."""
        self.forget()
        self._mesh = init_device_mesh(
            device().type, tuple(shape), mesh_dim_names=tuple(dimension(name, round) for name in names)
        )
        return self._mesh

    def forget(self) -> None:
        """Clear the mesh's references to its process groups, and what torch's caches have of the mesh."""
        if self._mesh is not None:
            vars(self._mesh).get("_pg_registry", {}).clear()
            self._mesh = None
            _clear_caches()


def _clear_caches() -> None:
    """Clear DTensor's caches of what an operation does to tensors on a mesh. Entries for a mesh that is gone
    are of no use, and would never be removed. Some releases of torch lack some of these caches."""
    torchs: Any = torch._C
    of_dtensor: Any = DTensor
    moves: Any = _redistribute
    with contextlib.suppress(AttributeError):
        of_dtensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    with contextlib.suppress(AttributeError):
        torchs._clear_DTensor_sharding_propagator_cache()
    with contextlib.suppress(AttributeError):
        moves._gen_transform_infos.cache_clear()
    with contextlib.suppress(AttributeError):
        moves.clear_redistribute_planner_cache()
    with contextlib.suppress(AttributeError):
        MeshTopoInfo.build_from_mesh.cache_clear()
