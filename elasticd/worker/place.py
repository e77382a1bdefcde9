"""Where in the world this worker is, now."""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as dist


def rank() -> int:
    """This worker's place among the workers of the present world. A change of world may change it."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many workers train together at present."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


@functools.cache
def device() -> torch.device:
    """This worker's device for the life of its process: a GPU if there is one, or else the CPU.
    It stays, although LOCAL_RANK may change with the world."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    mine = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(mine)
    return mine
