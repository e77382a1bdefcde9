"""``--master-port``: a port of the user's choosing that leads to the store of the round at hand.

Each round has a store of its own, at a new port, which MASTER_PORT names. But a script may name the port it
was given itself, as ``init_method="tcp://HOST:PORT"``, and torch has all its ranks be clients there. So what
connects to this port is passed on, byte for byte, to the store of the round that this node's workers are in.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterable
from typing import Self

_CHUNK_BYTES = 1 << 16


class Door:
    """Listens from when it is made until ``close``. Raises OSError where it cannot."""

    def __init__(self, hosts: Iterable[str], port: int) -> None:
        self._listeners: list[socket.socket] = []
        self._store: tuple[str, int] | None = None
        try:
            for address in sorted({_first_address(host, port) for host in hosts}):
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                self._listeners.append(socket.create_server((address, port), family=family, backlog=4096))
        except OSError:
            self._shut()
            raise
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="elasticd-door", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def leads_to(self, store: str) -> None:
        """``store``: HOST:PORT of the round that begins. Who connects from now on gets there."""
        host, _, port = store.rpartition(":")
        self._store = host.strip("[]"), int(port)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            self._shut()

    def _shut(self) -> None:
        for listener in self._listeners:
            listener.close()

    async def _serve(self) -> None:
        servers = [await asyncio.start_server(self._pass_on, sock=each) for each in self._listeners]
        await self._over.wait()
        for server in servers:
            server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until either end has closed."""
        with contextlib.closing(writer), contextlib.suppress(OSError):
            if self._store is None:  # no round yet, so this is none of our workers
                return
            theirs, to_store = await asyncio.open_connection(*self._store)
            with contextlib.closing(to_store):
                ways = [
                    asyncio.ensure_future(_copy(reader, to_store)),
                    asyncio.ensure_future(_copy(theirs, writer)),
                ]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(_CHUNK_BYTES):
            sink.write(data)
            await sink.drain()


def _first_address(host: str, port: int) -> str:
    return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
