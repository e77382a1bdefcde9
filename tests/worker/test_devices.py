"""Gloo's devices, which are kept from world to world."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from elasticd.channel.worker_messages import Enter
from elasticd.worker.world import destroying, devices
from elasticd.worker.world.group import World

LONG = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def no_devices_are_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("send", "recv", "recv_anysource"):  # a world replaces these for good
        monkeypatch.setattr(dist.ProcessGroup, name, getattr(dist.ProcessGroup, name))
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS"):  # likewise
        monkeypatch.setenv(name, "0")
    devices.drop()
    yield
    devices.drop()


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def listening() -> set[str]:
    """Return the sockets of this process that listen: each device of gloo has one."""
    found = set()
    for number, its_id in destroying.sockets():
        with socket.socket(fileno=socket.dup(number)) as one:
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(its_id)
    return found


def formed(server: dist.TCPStore) -> World:
    """Form a world of this process alone."""
    server.set("here", "0")
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    world = World(Enter(1, env))
    world.form(0, LONG)
    return world


def leave(world: World) -> None:
    world.close()
    world.forget()


def test_the_groups_of_the_next_world_listen_where_those_of_the_last_did(server: dist.TCPStore) -> None:
    before = listening()
    world = formed(server)
    dist.new_group()
    first = listening() - before
    assert len(first) == 2, "one for each group"
    leave(world)
    assert listening() - before == first, "no device has ended"
    world = formed(server)
    dist.new_group()
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value == 1
    assert listening() - before == first, "no device is new"
    dist.new_group()
    assert len(listening() - before) == 3
    leave(world)
    devices.drop()
    assert listening() == before


def test_groups_that_a_script_makes_and_destroys_leave_few_devices(server: dist.TCPStore) -> None:
    before = listening()
    world = formed(server)
    for _ in range(2 * devices.KEPT_MAX):
        dist.destroy_process_group(dist.new_group())
    assert len(listening() - before) == devices.KEPT_MAX
    leave(world)


def test_no_device_is_kept_once_a_group_was_not_made(server: dist.TCPStore) -> None:
    """A worker that is late may still connect to the group that was given up."""
    before = listening()
    leave(formed(server))
    first = listening() - before
    with pytest.raises(RuntimeError), devices.kept():
        dist.distributed_c10d.ProcessGroupGloo(dist.HashStore(), 0, 2, timedelta(milliseconds=10))
    world = formed(server)
    assert not listening() & first
    leave(world)


def test_no_device_is_kept_of_a_group_that_is_not_destroyed_soon(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = listening()
    world = formed(server)
    first = listening() - before
    monkeypatch.setattr(destroying, "destroy", lambda *_: False)
    leave(world)
    monkeypatch.undo()
    world = formed(server)
    assert not listening() & first
    leave(world)


def test_no_device_is_kept_of_a_group_that_the_script_still_holds(server: dist.TCPStore) -> None:
    before = listening()
    world = formed(server)
    first = listening() - before
    held = dist.group.WORLD
    leave(world)
    world = formed(server)
    assert first < listening() - before
    del held
    leave(world)


@pytest.mark.parametrize("variable", ["TORCH_GLOO_LAZY_INIT", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER"])
def test_no_device_is_kept_that_can_serve_one_group_only(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    before = listening()
    leave(formed(server))
    assert listening() == before


def test_devices_are_those_of_the_interfaces_that_the_user_names(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    before = listening()
    world = formed(server)
    assert len(listening() - before) == 2
    leave(world)
