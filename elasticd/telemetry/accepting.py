"""How servers in the agent take connections. A server is imported at the first connection, and waits while
this process has no free file."""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import asyncio

# Connections that the kernel keeps until the server accepts them. The kernel drops further ones, whose
# clients try again after 1 s, 3 s and 7 s. All agents of a large job may call a new leader within a second.
# asyncio sets 100 if nobody says otherwise. Linux keeps net.core.somaxconn at most: 4096 by default.
BACKLOG: Final = 4096
RETRY_S: Final = 1.0  # as in asyncio
_NEEDED: Final = 16  # files, to import a server and to start an event loop
_SCARCE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def listen(address: str) -> socket.socket:
    """Return a socket at a free port of the address. Raise OSError if it cannot listen.

    An address that no interface of this machine has is one of a router, which translates it: the socket then
    listens on all interfaces.
    """
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    try:
        return socket.create_server((address, 0), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", 0), family=family, backlog=BACKLOG)


class Scarcity:
    """Says once that no file is free for a connection. ``server``: what the connection leads to."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._said = False

    def say(self) -> None:
        from elasticd.telemetry import log  # imports asyncio, which most runs of one node do not need

        if self._said:
            return
        self._said = True
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        said = (
            f"no file is free for a connection to {self._server}; connections wait until one is. This "
            f"process may have {most} files open: raise the limit (`ulimit -n`; in systemd LimitNOFILE=)"
        )
        log.get("elasticd.agent").warning("files.none_free", sentence=said, server=self._server, limit=most)

    def note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error of an event loop. Without a free file asyncio tries again each second, and reports
        a hundred errors each time. Other errors of connections are silent."""
        error = context.get("exception")
        if is_scarce(error):
            self.say()
        elif not isinstance(error, OSError):
            loop.default_exception_handler(context)


def serve_from_the_first(
    listener: socket.socket, over: socket.socket, serve: Callable[[], None], scarcity: Scarcity
) -> None:
    """Wait until somebody connects, then ``serve``. Return when ``serve`` returns, or if ``over`` becomes
    readable before."""
    while not _readable(over, listener):
        if _are_free():
            try:
                return serve()
            except (OSError, ImportError):
                if _are_free():  # the error has another cause
                    raise
        scarcity.say()
        if _readable(over, within_s=RETRY_S):
            return None
    return None


def is_scarce(error: object) -> bool:
    """Whether the error says that no file is free."""
    return isinstance(error, OSError) and error.errno in _SCARCE


def _readable(over: socket.socket, *others: socket.socket, within_s: float | None = None) -> bool:
    """Wait for any of the sockets. Return whether ``over`` is readable. A poll needs no file of its own."""
    either = select.poll()
    for each in (over, *others):
        either.register(each, select.POLLIN)
    return over.fileno() in dict(either.poll(within_s and within_s * 1000))


def _are_free() -> bool:
    return files_are_free(_NEEDED)


def files_are_free(number: int) -> bool:
    """Whether this process may open as many files more."""
    tried: list[int] = []
    with suppress(OSError):
        while len(tried) < number:
            tried.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    for fd in tried:
        os.close(fd)
    return len(tried) == number
