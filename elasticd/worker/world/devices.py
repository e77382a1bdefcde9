"""Keep gloo's devices from world to world.

A device of gloo is a socket that listens, and a thread that serves the connections of a group. Torch makes a
device for each group. The thread needs 10 ms to notice that its group is destroyed, and the next world would
wait for that. So the first groups of a world get the devices of the last world's groups.

Devices are kept only while all is well. If a group was not made, or is not destroyed soon, connections of the
old world may still be under way, and the next world gets new devices.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

KEPT_MAX = (
    16  # the groups of a world that get kept devices: a script may make and destroy groups all the time
)
# With one of these variables, gloo ends a device with its first group, or would take a connection of another
# world for one of this world.
_OF_ONE_GROUP = ("TORCH_GLOO_LAZY_INIT", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER")
_torchs_own: Any = dist.ProcessGroupGloo

_kept: list[list[Any]] = []  # the devices of a world's first group, of its second group, and so on
_given = 0  # the number of groups of the present world that have kept devices


class _OnKeptDevices(dist.ProcessGroupGloo):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = _torchs_own._Options()
        options._devices = devices = _take()
        options._threads = 2 * len(devices)  # as torch does
        options._timeout = timeout
        super().__init__(store, rank, size, options)


@contextmanager
def kept() -> Iterator[None]:
    """Have a group that torch makes in the block use kept devices."""
    if _given == KEPT_MAX or any(os.environ.get(name) for name in _OF_ONE_GROUP):
        yield
        return
    c10d.ProcessGroupGloo = _OnKeptDevices  # type: ignore[misc]
    try:
        yield
    except BaseException:
        drop()
        raise
    finally:
        c10d.ProcessGroupGloo = _torchs_own  # type: ignore[misc]


def give_back() -> None:
    """The groups of this world are destroyed: keep their devices for the next world."""
    global _given  # noqa: PLW0603
    _given = 0


def drop() -> None:
    """Keep no device of this world. Each ends with its last group."""
    _kept.clear()
    give_back()


def _take() -> list[Any]:
    """Return the devices for the next group of this world."""
    global _given  # noqa: PLW0603
    if _given == len(_kept):
        _kept.append(_as_torch_makes_them())
    _given += 1
    return _kept[_given - 1]


def _as_torch_makes_them() -> list[Any]:
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(interfaces) > 1:
        return [_torchs_own.create_device(interface=name) for name in interfaces.split(",")]
    return [_torchs_own.create_default_device()]
