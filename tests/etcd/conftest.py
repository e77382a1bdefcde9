"""Real etcds, a proxy, and helpers that wait."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elasticd.core.facts import Budget
from elasticd.core.ports import Applied, Put
from elasticd.etcd.blocking_client import Client
from elasticd.etcd.embedded import Embedded
from elasticd.etcd.store import EtcdStore
from tests.etcd.cluster import EtcdOnPorts, await_serving

PATIENCE_S = 60.0


class Heard(list[Any]):
    """Collects the arguments of callbacks, and waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def __call__(self, what: Any) -> None:
        with self._changed:
            self.append(what)
            self._changed.notify_all()

    def until(self, holds: Callable[[], Any]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, PATIENCE_S), f"not within {PATIENCE_S} s; heard {self!r}"


def write(store: EtcdStore, total: int) -> None:
    """Write until a write is applied."""
    answers = Heard()
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends:
        store.transact((), (Put("budget", Budget(total=total)),), answers)
        answers.until(lambda: answers)
        if isinstance(answers.pop(), Applied):
            return
    raise AssertionError("never applied")


class Proxy:
    """A TCP proxy on loopback. While it is mute, it accepts connections and passes nothing on.

    ``delay_s``: by how much everything that it passes on is delayed.
    """

    def __init__(self, target: tuple[str, int], delay_s: float = 0.0) -> None:
        self._target = target
        self._delay_s = delay_s
        self._passing = threading.Event()
        self._passing.set()
        self._ends: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def mute(self) -> None:
        self._passing.clear()

    def pass_on(self) -> None:
        self._passing.set()

    def hang_up(self) -> None:
        """Break all connections."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._passing.set()
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.hang_up()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            self._ends.append(client)
            self._passing.wait()
            with socket.create_connection(self._target) as server:
                self._ends.append(server)
                other = {client: server, server: client}
                while True:
                    for end in select.select(list(other), [], [])[0]:
                        data = end.recv(65536)
                        self._passing.wait()
                        if not data:
                            return
                        time.sleep(self._delay_s)
                        other[end].sendall(data)


@pytest.fixture(scope="module")
def server() -> Iterator[Embedded]:
    with EtcdOnPorts() as server:
        yield server


@pytest.fixture
def etcd(server: Embedded) -> Iterator[Embedded]:
    """An etcd without keys. A test may stop its process."""
    await_serving(server.access)
    with Client(server.access) as client:
        client.delete_raw(b"/", prefix=True)
    yield server
    os.kill(server.pid, signal.SIGCONT)


@pytest.fixture
def open_store() -> Iterator[Callable[..., EtcdStore]]:
    """Opens stores of the job ``job``, and closes them at the end."""
    with contextlib.ExitStack() as stores:

        def open_(access: Any, *ttl_s: float, **options: Any) -> EtcdStore:
            store = EtcdStore(access, "job", *ttl_s, **options)
            stores.callback(store.close)
            return store

        yield open_


@pytest.fixture
def proxy(etcd: Embedded) -> Iterator[Proxy]:
    host, port = etcd.endpoint.split(":")
    built = Proxy((host, int(port)))
    yield built
    built.close()


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def deaf() -> Iterator[str]:
    """An endpoint to which connections time out: its backlog is full, so the kernel drops SYNs."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(server.getsockname())
        yield f"127.0.0.1:{server.getsockname()[1]}"
