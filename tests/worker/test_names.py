"""How long a thread waits for a name server."""

from __future__ import annotations

import ctypes
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from elasticd.procs.page import BOOT_DIR
from elasticd.worker.world import names


class _WithServer(ctypes.Structure):
    """The beginning of glibc's ``struct __res_state``, up to the first name server."""

    _fields_ = [*names._Resolver._fields_, ("nscount", ctypes.c_int), ("server", ctypes.c_char * 16)]


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


def with_server(server: socket.socket, act: Callable[[], None]) -> list[tuple[int, int]]:
    """Call ``act`` in a thread that has this name server. Return how often and how long the thread asks a
    name server, before and after the call."""
    kept: list[tuple[int, int]] = []

    def run() -> None:
        resolver = names._of_this_thread()
        assert resolver is not None
        host, port = server.getsockname()
        address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host)
        ctypes.memmove(ctypes.addressof(resolver) + _WithServer.server.offset, address, len(address))
        kept.append((resolver.retrans, resolver.retry))
        act()
        kept.append((resolver.retrans, resolver.retry))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return kept


def test_a_thread_asks_a_silent_name_server_once_and_later_as_often_as_before(
    silent_server: socket.socket,
) -> None:
    def look_up() -> None:
        with names.asked_briefly(), pytest.raises(socket.gaierror):
            socket.getnameinfo(("10.1.2.3", 1), 0)

    before, after = with_server(silent_server, look_up)
    assert questions(silent_server) == 1
    assert before == after and before[0] > 1


def test_a_thread_of_another_libc_looks_up_names_as_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    with names.asked_briefly():
        assert socket.getaddrinfo("127.0.0.1", 1)


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
    call = "from tests.worker.test_names import look_up_as_a_store_does as look_up; look_up()"
    done = subprocess.run(
        [sys.executable, "-c", call], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["0", "192.0.2.7", "127.0.0.1"]
