"""The present world as a mesh of devices: replicas of the model, and the workers of each."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from elasticd.worker.world.group import device, world_size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def mesh(unit: int | None = None) -> DeviceMesh:
    """Return the present world as a mesh with the dimensions ``replicate`` and ``unit``.

    The shape is (world size / unit, unit). Rank r is at (r // unit, r % unit): ``mesh()["unit"]`` has the
    workers that hold one model together, ``mesh()["replicate"]`` those that hold the same part of it.

    ``unit``: the number of workers in a unit; by default that of ``elasticd run --unit``, else 1. All ranks
    call the function, once in each world, after the process group is made. Raises ValueError if the world is
    no multiple of the unit.
    """
    from torch.distributed.device_mesh import init_device_mesh

    size = world_size()
    if unit is None:
        unit = int(os.environ.get("ELASTICD_UNIT", "1"))
    if unit < 1 or size % unit:
        raise ValueError(
            f"a world of {size} workers has no whole units of {unit}; give `elasticd run --unit {unit}`"
        )
    return init_device_mesh(device().type, (size // unit, unit), mesh_dim_names=("replicate", "unit"))
