"""Which processes and threads ask no name server."""

from __future__ import annotations

import ctypes
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from elasticd.procs.page import BOOT_DIR
from elasticd.worker.world import resolver as world_resolver
from tests.worker.test_world import a_world


class _WithServer(ctypes.Structure):
    """The beginning of glibc's ``struct __res_state``, up to the first name server."""

    _fields_ = [*world_resolver._Resolver._fields_, ("server", ctypes.c_char * 16)]


@pytest.fixture
def silent_server() -> Iterator[socket.socket]:
    """A name server that answers nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.setblocking(False)
        yield server


def questions(server: socket.socket) -> int:
    """Return how many questions the server has got."""
    number = 0
    while True:
        try:
            server.recv(512)
        except BlockingIOError:
            return number
        number += 1


def with_server(server: socket.socket, act: Callable[[], None]) -> None:
    """Call ``act`` in a thread that has this name server alone, and asks it once."""

    def run() -> None:
        resolver = world_resolver._of_this_thread()
        assert resolver is not None
        host, port = server.getsockname()
        address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host)
        ctypes.memmove(ctypes.addressof(resolver) + _WithServer.server.offset, address, len(address))
        resolver.nscount = resolver.retrans = resolver.retry = 1
        act()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


def test_a_worker_that_connects_to_a_store_asks_no_name_server_and_torch_warns_of_nothing(
    silent_server: socket.socket, capfd: pytest.CaptureFixture[str]
) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = a_world(server.port)
    asked: list[int] = []

    def act() -> None:
        world._connect().set("known", "")
        asked.append(questions(silent_server))
        with pytest.raises(socket.gaierror):
            socket.getnameinfo(("10.1.2.3", 1), 0)
        asked.append(questions(silent_server))

    capfd.readouterr()
    with_server(silent_server, act)
    assert asked == [0, 1], "the thread asks again later"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.1.2.3"])
def test_a_thread_asks_no_name_server_about_an_address(silent_server: socket.socket, host: str) -> None:
    def look_up() -> None:
        with world_resolver.unasked(host), pytest.raises(socket.gaierror):
            socket.gethostbyname("trainer.example")

    with_server(silent_server, look_up)
    assert questions(silent_server) == 0


def test_a_thread_asks_for_the_address_of_a_name(silent_server: socket.socket) -> None:
    def look_up() -> None:
        with world_resolver.unasked("trainer.example"), pytest.raises(socket.gaierror):
            socket.gethostbyname("trainer.example")

    with_server(silent_server, look_up)
    assert questions(silent_server) > 0


def test_a_thread_of_another_libc_and_another_torch_looks_up_names_as_always(
    silent_server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str | None) -> object:
        if name is not None:
            raise OSError(f"{name}: cannot open shared object file")
        return object()

    def look_up() -> None:
        monkeypatch.setattr(ctypes, "CDLL", load)
        with (
            world_resolver.unasked("127.0.0.1"),
            world_resolver._torchs_warnings_muted(),
            pytest.raises(socket.gaierror),
        ):
            socket.getnameinfo(("10.1.2.3", 1), 0)

    with_server(silent_server, look_up)
    assert questions(silent_server) == 1


def look_up_as_a_store_does() -> None:
    """Print how many questions a name server gets, and the names."""
    sys.path.insert(0, BOOT_DIR)
    import elasticd_store

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.setblocking(False)
        elasticd_store._ask_no_name_server()
        found: list[str] = []

        def look_up() -> None:
            found.extend([socket.getnameinfo(("192.0.2.7", 1), 0)[0], socket.gethostbyname("localhost")])

        with_server(server, look_up)
        print(questions(server), *found)


def test_the_process_that_serves_stores_asks_no_name_server_for_the_names_of_clients() -> None:
    call = "from tests.worker.test_resolver import look_up_as_a_store_does as look_up; look_up()"
    done = subprocess.run(
        [sys.executable, "-c", call], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["0", "192.0.2.7", "127.0.0.1"]
