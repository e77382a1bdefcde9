"""The mesh over which a model is laid out in one round."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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
        """Clear the mesh's references to its process groups, since torch's caches keep the mesh."""
        if self._mesh is not None:
            vars(self._mesh).get("_pg_registry", {}).clear()
            self._mesh = None
