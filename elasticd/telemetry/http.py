"""Serve a few pages over HTTP or HTTPS from one thread that nothing else waits for.

The thread imports the server, tornado, at the first connection: a run without readers saves 30 ms and 4 MiB.
Requests are bounded in size, time and number. When there are too many connections, the oldest one is closed,
so that idle connections block no probe.

Other servers were measured with 32 connections that send half a request. uvicorn, waitress and cheroot then
refuse a probe or make the probe wait. hypercorn and aiohttp answer, but install at least six more packages.
tornado installs none, and documents a method that a subclass can override to count connections.

DNS rebinding: an attacker's name server may resolve the attacker's host name to this machine's address. The
attacker's page in a browser could then read the pages here. Pages with more than numbers therefore require a
Host header with an address, or with a known name of this machine.
"""

from __future__ import annotations

import errno
import socket
import ssl
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from elasticd.telemetry.accepting import Scarcity, serve_from_the_first

CONNECTIONS_MAX = 32
REQUEST_MAX_BYTES = 16 * 1024
PATIENCE_S = 10.0  # the time limit for one request and its answer


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


# Takes the headers; lookup ignores case. Must not block: one thread answers all requests.
Page = Callable[[Mapping[str, str]], Answer]


@dataclass(frozen=True, slots=True)
class Tls:
    """The PEM files of a certificate and its key."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Site:
    """The pages and who may read them.

    ``pages``: by path. ``guarded``: paths whose Host header must be an address, localhost or one of
    ``names``. ``private``: paths that require the ``token``, if there is one.
    """

    pages: Mapping[str, Page]
    guarded: Collection[str] = ()
    names: Collection[str] = ()
    private: Collection[str] = ()
    token: str | None = field(default=None, repr=False)


class HttpServer:
    """Serve ``site`` until ``close``. The attribute ``port`` is the port that the server listens on.

    The argument ``port`` is the wanted port; if it is in use, the system chooses a free one. Raises OSError
    if the address or the files of ``tls`` cannot be used.
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
        """Stop listening and drop all open connections."""
        self._closed_to_end.close()
        self._thread.join()

    def _run(self, listener: socket.socket) -> None:
        scarcity = Scarcity("the status page and the metrics")

        def serve() -> None:
            import asyncio

            from elasticd.telemetry import http_site

            asyncio.run(http_site.serve(self._site, listener, self._context, self._over, scarcity))

        with listener, self._over:
            serve_from_the_first(listener, self._over, serve, scarcity)


def context(tls: Tls) -> ssl.SSLContext:
    """Return a context for ``tls``. Raises OSError (ssl.SSLError is one) if the files cannot be used."""
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # Without a password, OpenSSL would ask for the one of an encrypted key on the terminal.
    made.load_cert_chain(tls.cert, tls.key, password="")
    return made


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or port == 0:
            raise
        return socket.create_server((address[0], 0), family=family)
