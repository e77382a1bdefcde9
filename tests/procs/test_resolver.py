"""Which processes and threads ask no name server."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from elasticd.procs.page import BOOT_DIR
from tests.procs.conftest import Bench

ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module elasticd_resolver, which workers load from the boot folder."""
    monkeypatch.syspath_prepend(BOOT_DIR)
    return importlib.import_module("elasticd_resolver")


@contextlib.contextmanager
def a_silent_server() -> Iterator[socket.socket]:
    """Run a name server that answers nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.setblocking(False)
        yield server


@pytest.fixture
def silent_server() -> Iterator[socket.socket]:
    with a_silent_server() as server:
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


def with_server(names: ModuleType, server: socket.socket, act: Callable[[], None]) -> None:
    """Call ``act`` in a thread that has this name server alone, and asks it once. ``names``: the module
    elasticd_resolver."""

    def run() -> None:
        names.use_server(names.resolver_of_this_thread(), server)
        act()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


CLIENT = f"""
import importlib, socket, sys
import torch.distributed as dist
from tests.procs.test_resolver import a_silent_server, questions, with_server
sys.path.insert(0, {BOOT_DIR!r})
names = importlib.import_module("elasticd_resolver")
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
asked = []

def act():
    dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False).set("known", "")
    client = dist.TCPStore(host_name="127.0.0.1", port=server.port, wait_for_workers=False)
    client.get("known")
    asked.append(questions(silent))
    assert f"remote=[::ffff:127.0.0.1]:{{server.port}}" in repr(client), client
    questions(silent)  # torch asks for the name of the client's own address
    try:
        socket.getnameinfo(("10.1.2.3", 1), socket.NI_NAMEREQD)
    except socket.gaierror:
        asked.append(questions(silent))

with a_silent_server() as silent:
    with_server(names, silent, act)
print(*asked)
"""


def test_a_worker_that_connects_to_a_store_asks_no_name_server_and_torch_writes_addresses(
    bench: Bench,
) -> None:
    """The thread asks the name server again later. Torch warns of nothing."""
    (exit,) = bench.run(CLIENT, env={"PYTHONPATH": ROOT})
    assert exit.code == 0, exit.traceback
    assert bench.console.lines() == [b"0 1"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.1.2.3"])
def test_a_thread_asks_no_name_server_about_an_address(
    names: ModuleType, silent_server: socket.socket, host: str
) -> None:
    found: list[str] = []

    def look_up() -> None:
        names.call_unasked(host, lambda: found.append(socket.getnameinfo(("192.0.2.7", 1), 0)[0]))

    with_server(names, silent_server, look_up)
    assert questions(silent_server) == 0
    assert found == ["192.0.2.7"]


@pytest.mark.parametrize("host", ["trainer.example", "", "10.1.2.3\0", None])
def test_a_thread_asks_for_the_address_of_what_is_no_address(
    names: ModuleType, silent_server: socket.socket, host: str | None
) -> None:
    def look_up() -> None:
        with pytest.raises(socket.gaierror):
            names.call_unasked(host, lambda: socket.gethostbyname("trainer.example"))

    with_server(names, silent_server, look_up)
    assert questions(silent_server) > 0


def test_an_error_in_the_call_leaves_the_thread_its_name_server(
    names: ModuleType, silent_server: socket.socket
) -> None:
    def look_up() -> None:
        before = bytes(names.resolver_of_this_thread())
        with pytest.raises(ZeroDivisionError):
            names.call_unasked("127.0.0.1", lambda: 1 / 0)
        assert bytes(names.resolver_of_this_thread()) == before

    with_server(names, silent_server, look_up)


def test_a_thread_whose_name_server_has_an_ipv6_address_looks_up_names_as_always(
    names: ModuleType, silent_server: socket.socket
) -> None:
    """Such an address has the family 0 where that of an IPv4 address is."""

    def look_up() -> None:
        resolver = names.resolver_of_this_thread()
        *others, _ = struct.unpack(names._STATE, resolver)
        resolver[:] = before = struct.pack(names._STATE, *others, b"")
        seen = []
        names.call_unasked("127.0.0.1", lambda: seen.append(bytes(names.resolver_of_this_thread())))
        assert seen == [before]

    with_server(names, silent_server, look_up)


def test_a_thread_of_another_libc_looks_up_names_as_always(
    names: ModuleType, silent_server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up() -> None:
        monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
        with pytest.raises(socket.gaierror):
            names.call_unasked("127.0.0.1", lambda: socket.getnameinfo(("10.1.2.3", 1), 0))

    with_server(names, silent_server, look_up)
    assert questions(silent_server) == 1


def test_the_server_within_the_process_answers_questions_alone_and_ends_with_an_empty_message(
    names: ModuleType,
) -> None:
    server = names._start_server()

    def ask_on() -> None:
        while True:
            client.send(b"?")

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(20)
        client.connect(server.getsockname())
        client.send(b"?" * 40)
        question = b"\1\2\1\0\0\1" + bytes(4) + b"\0\1" + b"\1a\0\0\x0c\0\1" + b"and options"
        client.send(question)
        assert client.recv(512) == b"\1\2\x81\x83\0\1" + bytes(6) + b"\1a\0\0\x0c\0\1"
        client.send(b"")
        with pytest.raises(ConnectionRefusedError):  # its socket is closed
            ask_on()


def look_up_as_a_store_does() -> None:
    """Print how many questions a name server gets, and the names."""
    sys.path.insert(0, BOOT_DIR)
    import elasticd_resolver
    import elasticd_store

    elasticd_store._ask_no_name_server()
    with a_silent_server() as server:
        found: list[str] = []

        def look_up() -> None:
            found.extend([socket.getnameinfo(("192.0.2.7", 1), 0)[0], socket.gethostbyname("localhost")])

        with_server(elasticd_resolver, server, look_up)
        print(questions(server), *found)


def test_the_process_that_serves_stores_asks_no_name_server_for_the_names_of_clients() -> None:
    call = "from tests.procs.test_resolver import look_up_as_a_store_does as look_up; look_up()"
    done = subprocess.run(
        [sys.executable, "-c", call], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["0", "192.0.2.7", "127.0.0.1"]
