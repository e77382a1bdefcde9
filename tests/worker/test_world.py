"""Which connections end with a world."""

from __future__ import annotations

import socket
import threading

import pytest
import torch.distributed as dist

from elasticd.core.link import Enter
from elasticd.worker.world import World


def test_a_world_cuts_what_torch_has_connected_and_no_connection_of_the_scripts_own() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("known", "")
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    world = World(Enter(1, env))
    ends: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def connect() -> None:
            ends.append(socket.create_connection(listening.getsockname()))
            ends.append(listening.accept()[0])

        with world._connecting():
            meanwhile = threading.Thread(target=connect)
            meanwhile.start()
            store = world._connect()
            meanwhile.join()
        world.close()
    mine, other = ends
    with mine, other:
        mine.sendall(b"still there")
        assert other.recv(64) == b"still there"
    with pytest.raises(RuntimeError):
        store.get("known")
