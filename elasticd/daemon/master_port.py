"""``--master-port``: a port that the user chooses and that leads to the store of the present round.

Each round has its own store, at a new port, and MASTER_PORT names that port. A script may instead name a
fixed port, as in ``init_method="tcp://HOST:PORT"``. elasticd forwards connections to the fixed port to the
store of the live round. A connection between two rounds waits for the next round. A worker of another node
may enter the round before this node's agent has heard of the round.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Self

from elasticd.core.facts import Phase, Round
from elasticd.telemetry.accepting import BACKLOG, Scarcity

LOOK_S: Final = 1.0  # how often a waiting connection looks for a round that this node has no worker in
_CHUNK_BYTES = 1 << 16


class MasterPort:
    """Listens until ``close``, on those of ``hosts`` that are this machine's. The constructor raises OSError
    if it cannot listen.

    ``round``: returns the newest round that the agent knows. It is called on another thread.
    """

    def __init__(self, hosts: Iterable[str], port: int, round: Callable[[], Round | None]) -> None:
        self._listeners: list[socket.socket] = []
        self._round = round
        try:
            for address in sorted({*_addresses(hosts, port)}):
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                try:
                    listener = socket.create_server((address, port), family=family, backlog=BACKLOG)
                except OSError as error:
                    if error.errno != errno.EADDRNOTAVAIL:
                        raise
                else:
                    self._listeners.append(listener)
            if not self._listeners:
                raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        except OSError:
            self._shut()
            raise
        self._loop = asyncio.new_event_loop()
        self._over, self._begins = asyncio.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="elasticd-master-port", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def round_begins(self) -> None:
        """Forward the waiting connections to the store of the round that begins."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._begins.set)

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
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _store(self) -> tuple[str, int]:
        """Return the host and the port of the live round's store. Wait for a live round."""
        while (round := self._round()) is None or round.phase is not Phase.LIVE:
            self._begins.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._begins.wait(), LOOK_S)
        host, _, port = round.store.rpartition(":")
        return host.strip("[]"), int(port)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward both directions until either end has closed."""
        with contextlib.closing(writer), contextlib.suppress(OSError):
            host, port = await self._store()
            theirs, to_store = await asyncio.open_connection(host, port)
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


def _addresses(hosts: Iterable[str], port: int) -> Iterator[str]:
    """Yield the first address of each host. A name may be of another machine, or not known here."""
    for host in hosts:
        with contextlib.suppress(socket.gaierror, UnicodeError):
            yield str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
