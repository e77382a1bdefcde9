"""``--master-port``: a port that the user chooses and that leads to the store of the present round.

Each round has its own store, at a new port, and MASTER_PORT names that port. A script may instead name a
fixed port, as in ``init_method="tcp://HOST:PORT"``. elasticd forwards connections to the fixed port to the
store of the round that this node's workers are in.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterable
from typing import Self

from elasticd.telemetry.accepting import BACKLOG, Scarcity

_CHUNK_BYTES = 1 << 16


class MasterPort:
    """Listens until ``close``. The constructor raises OSError if it cannot listen."""

    def __init__(self, hosts: Iterable[str], port: int) -> None:
        self._listeners: list[socket.socket] = []
        self._store: tuple[str, int] | None = None
        try:
            for address in sorted({_first_address(host, port) for host in hosts}):
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                self._listeners.append(socket.create_server((address, port), family=family, backlog=BACKLOG))
        except OSError:
            self._shut()
            raise
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="elasticd-master-port", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def leads_to(self, store: str) -> None:
        """Forward new connections to ``store``, the HOST:PORT of the round that begins."""
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
        self._loop.set_exception_handler(Scarcity("the store at --master-port").note)
        servers = [await asyncio.start_server(self._pass_on, sock=each) for each in self._listeners]
        for listener in self._listeners:
            listener.listen(BACKLOG)  # asyncio has set 100
        await self._over.wait()
        for server in servers:
            server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward both directions until either end has closed."""
        with contextlib.closing(writer), contextlib.suppress(OSError):
            if self._store is None:  # there is no round yet, so the client is not a worker
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
