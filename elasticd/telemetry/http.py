"""A few pages for who asks over HTTP, from one thread that nothing else waits for.

GET and HEAD of what is in memory, one request a connection, is little enough to be written out: the
standard library's server takes a thread a connection and can be held up a byte at a time, and a
framework's would be six more packages in every agent. What is asked for is bounded in size, in time,
and in how many ask at once: where too many have come, the one that has been there longest has to go, so that
nobody who only sits there keeps a probe out.

A browser may be told by a name server that a stranger's name is this machine's address, and then lets the
stranger's page read what is here. So pages that tell more than numbers are shown only to who asks for this
machine by an address, or by a name that it is known to have.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import re
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Self

CONNECTIONS_MAX = 32
REQUEST_MAX_BYTES = 16 * 1024
PATIENCE_S = 10.0  # for all of a request and of its answer

_log = logging.getLogger(__name__)
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    421: "Misdirected Request",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


# Given the headers, by their names in lower case. Must not block: all are answered by one thread.
Page = Callable[[Mapping[str, str]], Answer]


class HttpServer:
    """Serves ``pages`` by path, until ``close``. ``port`` is the one it listens on.

    ``port``: the one wanted; if somebody has it already, a free one is taken. Raises OSError where the
    address cannot be listened on at all. ``guarded``: the paths of pages that are for those alone who ask for
    this machine by an address, as localhost, or by one of ``names``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        pages: Mapping[str, Page],
        *,
        guarded: Collection[str] = (),
        names: Collection[str] = (),
    ) -> None:
        self._pages = pages
        self._guarded = guarded
        self._names = {name.lower() for name in ("localhost", host, *names)}
        self._open: dict[asyncio.Task[object], None] = {}  # those who are served, the oldest first
        listener = _listen(host, port)
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="elasticd-http", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/"

    def close(self) -> None:
        """Stop listening and drop who is being answered."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()

    def _run(self, listener: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve_all(listener))
        finally:
            self._loop.close()
            listener.close()

    async def _serve_all(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._serve, sock=listener, limit=REQUEST_MAX_BYTES)
        await self._over.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = None
        if len(self._open) > CONNECTIONS_MAX:
            next(iter(self._open)).cancel()
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer, head_only = self._answer(await reader.readuntil(b"\r\n\r\n"))
                writer.write(_encoded(answer, head_only))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever asks so is not owed an answer
        finally:
            writer.transport.abort()
            self._open.pop(task, None)

    def _answer(self, request: bytes) -> tuple[Answer, bool]:
        line, *headers = request.decode("latin-1").split("\r\n")
        try:
            method, target, version = line.split(" ")
        except ValueError:
            return Answer(b"not a request\n", status=400), False
        if not version.startswith("HTTP/1."):
            return Answer(b"HTTP/1.1 is spoken here\n", status=400), False
        if method not in ("GET", "HEAD"):
            return Answer(b"there is nothing to change here\n", status=405), False
        fields = {n.strip().lower(): v.strip() for n, _, v in (h.partition(":") for h in headers if h)}
        path = target.partition("?")[0]
        page = self._pages.get(path)
        if path in self._guarded and not self._is_ours(fields.get("host", "")):
            say = f"ask for this machine by its address, or as {', '.join(sorted(self._names))}\n"
            return Answer(say.encode(), status=421), method == "HEAD"
        if page is None:
            there = "".join(f"{path}\n" for path in self._pages)
            return Answer(f"there are:\n{there}".encode(), status=404), method == "HEAD"
        try:
            answer = page(fields)
        except Exception:  # noqa: BLE001  # a page that fails must not take the others with it
            _log.exception("cannot answer %s", target)
            answer = Answer(b"cannot be shown; the agent's log says why\n", status=500)
        return answer, method == "HEAD"

    def _is_ours(self, host: str) -> bool:
        """Whether it is this machine that is asked for. A browser always says; other programs need not."""
        name = re.sub(r":\d*$", "", host).lower()
        if not host or name.rstrip(".") in self._names:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or port == 0:
            raise
        return socket.create_server((address[0], 0), family=family)


def _encoded(answer: Answer, head_only: bool) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        "Cache-Control: no-store\r\n"
        "X-Content-Type-Options: nosniff\r\n"
        "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if head_only else answer.body)
