"""This worker's place in the present world."""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as dist


def rank() -> int:
    """Return this worker's rank in the present world. A change of world may change it."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of workers in the present world."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


@functools.cache
def device() -> torch.device:
    """Return this worker's device for the life of its process: a GPU if there is one, else the CPU.

    The device stays the same, although LOCAL_RANK may change with the world.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    mine = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(mine)
    return mine
