"""Serve a site's pages with tornado. Import this module when the first request comes."""

from __future__ import annotations

import asyncio
import base64
import hmac
import ipaddress
import logging
import re
import socket
import ssl
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPHeaders
from tornado.ioloop import IOLoop
from tornado.iostream import IOStream
from tornado.web import Application, HTTPError, RequestHandler

from elasticd.telemetry import http
from elasticd.telemetry.accepting import RETRY_S, Scarcity, is_scarce
from elasticd.telemetry.http import Page, Site

_log = logging.getLogger(__name__)


async def serve(
    site: Site,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    over: socket.socket,
    scarcity: Scarcity,
) -> None:
    """Serve the pages of ``site`` at ``listener`` until ``over`` is readable. ``tls``: None for plain HTTP.
    ``scarcity`` hears of connections that find no free file."""
    logging.getLogger("tornado").setLevel(logging.ERROR)  # or invalid requests would fill the agent's log
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(over, ended.set)
    loop.set_exception_handler(_pause_if_scarce(listener, scarcity))
    listener.setblocking(False)
    server = _Server(
        _application(site),
        ssl_options=tls,
        no_keep_alive=True,
        max_header_size=http.REQUEST_MAX_BYTES,
        max_body_size=0,
    )
    server.add_socket(listener)
    await ended.wait()
    server.stop()
    server.drop_all()


def _pause_if_scarce(
    listener: socket.socket, scarcity: Scarcity
) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """Return a handler of the event loop's errors. Without a free file tornado would try again at once,
    without end."""
    events = IOLoop.current()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if is_scarce(context.get("exception")):
            events.update_handler(listener, 0)
            events.call_later(RETRY_S, events.update_handler, listener, IOLoop.READ)
        scarcity.note(loop, context)

    return handle


class _Server(HTTPServer):
    """An HTTPServer that limits the number of connections and the length of each."""

    def initialize(self, *args: Any, **options: Any) -> None:
        super().initialize(*args, **options)
        self._streams: list[IOStream] = []  # the oldest first

    def handle_stream(self, stream: IOStream, address: tuple[Any, ...]) -> None:
        self._streams = [s for s in self._streams if not s.closed()] + [stream]
        if len(self._streams) > http.CONNECTIONS_MAX:
            self._streams[0].close()
        IOLoop.current().call_later(http.PATIENCE_S, stream.close)
        super().handle_stream(stream, address)

    def drop_all(self) -> None:
        for stream in self._streams:
            stream.close()


def _application(site: Site) -> Application:
    names = {name.lower() for name in ("localhost", *site.names)}
    here = "\n".join(site.pages)
    return Application(
        [
            (
                re.escape(path) + "$",
                _PageHandler,
                {
                    "page": page,
                    "names": names if path in site.guarded else None,
                    "token": site.token if path in site.private else None,
                },
            )
            for path, page in site.pages.items()
        ],
        default_handler_class=_NotFoundHandler,
        default_handler_args={"here": here},
        log_function=lambda _: None,
    )


class _TextHandler(RequestHandler):
    """Answer in plain text, with headers that forbid to cache or embed the page."""

    def set_default_headers(self) -> None:
        self.clear_header("Server")
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.set_header("Cache-Control", "no-store")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")

    def compute_etag(self) -> str | None:
        return None  # pages are not cached, so there is nothing to compare

    def refuse(self, status: HTTPStatus, why: str) -> None:
        self.set_status(status)
        self.finish(f"{why}\n")

    def write_error(self, status_code: int, **_: Any) -> None:
        """Answer an unsupported method, and a page that raised."""
        status = HTTPStatus(status_code)
        says = {
            HTTPStatus.METHOD_NOT_ALLOWED: "the pages can only be read: use GET or HEAD",
            HTTPStatus.INTERNAL_SERVER_ERROR: "the page cannot be shown; the agent's log says why",
        }
        self.refuse(status, says.get(status, status.phrase))

    def log_exception(self, typ: Any, value: BaseException | None, tb: Any) -> None:
        if value is not None and not isinstance(value, HTTPError):
            _log.error("cannot answer %s", self.request.path, exc_info=value)


class _NotFoundHandler(_TextHandler):
    def initialize(self, here: str) -> None:
        self._here = here

    def prepare(self) -> None:
        self.refuse(HTTPStatus.NOT_FOUND, f"no such page; the pages are:\n{self._here}")


class _PageHandler(_TextHandler):
    """A page. ``names``: the allowed names in the Host header, or None for any. ``token``: the token that the
    request must carry, or None."""

    def initialize(self, page: Page, names: set[str] | None, token: str | None) -> None:
        self._page = page
        self._names = names
        self._token = token

    def prepare(self) -> None:
        if self._names and not _is_one_of(self._names, self.request.headers.get("Host", "")):
            names = ", ".join(sorted(self._names))
            self.refuse(HTTPStatus.MISDIRECTED_REQUEST, f"use this machine's address, or a name: {names}")
        elif self._token and not hmac.compare_digest(_sent(self.request.headers), self._token.encode()):
            # A browser then asks for a password.
            self.set_header("WWW-Authenticate", 'Basic realm="elasticd"')
            why = "this page needs the token: send it as a Bearer token, or as the password of any user"
            self.refuse(HTTPStatus.UNAUTHORIZED, why)

    def get(self) -> None:
        answer = self._page(self.request.headers)
        self.set_status(answer.status)
        self.set_header("Content-Type", answer.content_type)
        self.finish(answer.body)

    head = get


def _sent(headers: HTTPHeaders) -> bytes:
    """Return the token of the Authorization header: the text after "Bearer", or the password after "Basic"
    for any user."""
    scheme, _, credentials = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip().encode()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(credentials, validate=True).partition(b":")[2]
        except ValueError:  # raised also for characters that are not ASCII
            return b""
    return b""


def _is_one_of(names: set[str], host: str) -> bool:
    """Whether the Host header is an address or one of ``names``. Browsers always send the header; a request
    without one is allowed."""
    name = re.sub(r":\d*$", "", host).lower()
    if not host or name.rstrip(".") in names:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
