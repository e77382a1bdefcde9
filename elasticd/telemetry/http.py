"""A few pages over HTTP or HTTPS, from one thread that nothing else waits for.

The thread imports the server, tornado, when the first connection comes: a run that nobody looks at does not
pay the 30 ms and 4 MiB. What is asked for is bounded in size, in time, and in how many ask at once: where too
many have come, the connection that has been there longest is closed, so that idle ones keep no probe out.
Of the servers that were measured, uvicorn, waitress and cheroot refuse a probe or make it wait while 32
connections send half a request; hypercorn and aiohttp do not, and bring six more packages and more. tornado
brings none, and has a documented place to count connections in.

A browser may be told by a name server that a stranger's name is this machine's address, and then lets the
stranger's page read what is here. So pages that tell more than numbers are shown only to who asks for this
machine by an address, or by a name that it is known to have.
"""

from __future__ import annotations

import errno
import selectors
import socket
import ssl
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

CONNECTIONS_MAX = 32
REQUEST_MAX_BYTES = 16 * 1024
PATIENCE_S = 10.0  # for all of a request and of its answer


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


# Given the headers, whose names may be asked for in any case. Must not block: all are answered by one thread.
Page = Callable[[Mapping[str, str]], Answer]


@dataclass(frozen=True, slots=True)
class Tls:
    """The files of a certificate and of its key, as PEM."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Site:
    """``pages``: by path. ``guarded``: the paths of pages that are for those alone who ask for this machine
    by an address, as localhost, or by one of ``names``. ``private``: the paths of pages that ask for the
    ``token``, if there is one."""

    pages: Mapping[str, Page]
    guarded: Collection[str] = ()
    names: Collection[str] = ()
    private: Collection[str] = ()
    token: str | None = field(default=None, repr=False)


class HttpServer:
    """Serves ``site`` until ``close``. ``port`` is the one it listens on.

    ``port``: the one wanted; if somebody has it already, a free one is taken. Raises OSError where the
    address cannot be listened on at all, or the files of ``tls`` cannot be used.
    """

    def __init__(self, host: str, port: int, site: Site, tls: Tls | None = None) -> None:
        self._site = replace(site, names=(host, *site.names))
        self._context = context(tls) if tls else None
        listener = _listen(host, port)
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._over, self._closed_to_end = socket.socketpair()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="elasticd-http", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self._context else 'http'}://{host}:{self.port}/"

    def close(self) -> None:
        """Stop listening and drop who is being answered."""
        self._closed_to_end.close()
        self._thread.join()

    def _run(self, listener: socket.socket) -> None:
        with listener, self._over:
            if self._somebody_comes(listener):
                import asyncio

                from elasticd.telemetry.http_site import serve

                asyncio.run(serve(self._site, listener, self._context, self._over))

    def _somebody_comes(self, listener: socket.socket) -> bool:
        """Whether that is before the end."""
        with selectors.DefaultSelector() as either:
            either.register(listener, selectors.EVENT_READ)
            either.register(self._over, selectors.EVENT_READ)
            return self._over not in [key.fileobj for key, _ in either.select()]


def context(tls: Tls) -> ssl.SSLContext:
    """Raises OSError, which ssl.SSLError is, where the files cannot be used."""
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    made.load_cert_chain(tls.cert, tls.key, password="")  # else one that is encrypted asks the terminal
    return made


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or port == 0:
            raise
        return socket.create_server((address[0], 0), family=family)
