"""Tells whether etcd is silent, or whether this machine is cut off from etcd."""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from elasticd.etcd.access import host_and_port, is_unix

_log = logging.getLogger(__name__)
PROBE_S = 0.5  # how long a host may take to accept or refuse a connection
_LACKING = {errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT}  # of a machine without IPv6
AGAIN_S = 1.0  # the pause between two probes


def reachable(endpoints: tuple[str, ...], timeout_s: float = PROBE_S) -> frozenset[str]:
    """Return the endpoints whose host accepts or refuses a TCP connection within the timeout. Unix sockets
    always count as reachable."""
    found: set[str] = set()
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        try:
            for endpoint in endpoints:
                if is_unix(endpoint):
                    found.add(endpoint)
                    continue
                host, port = host_and_port(endpoint)
                for family, kind, protocol, _, address in _resolve(host, port, deadline):
                    try:
                        sock = socket.socket(family, kind, protocol)
                    except OSError as error:
                        if error.errno not in _LACKING:
                            raise
                        continue
                    sock.setblocking(False)
                    selector.register(sock, selectors.EVENT_WRITE, endpoint)
                    if _answered(sock.connect_ex(address)):
                        found.add(endpoint)
            # Poll at least once: on a busy machine, the time may be over already.
            while len(found) < len(endpoints) and selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    break
                for key, _ in ready:
                    connecting = key.fileobj
                    assert isinstance(connecting, socket.socket)
                    if _answered(connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                        found.add(key.data)
                    selector.unregister(connecting)
                    connecting.close()
        finally:
            for key in list(selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
    return frozenset(found)


def cut_off(endpoints: tuple[str, ...]) -> bool:
    """Return whether a majority of the endpoints cannot be reached. etcd may then still serve others."""
    unreachable = len(endpoints) - len(reachable(endpoints))
    return 2 * unreachable > len(endpoints)


class ReachabilityProbe:
    """Probes the endpoints repeatedly while the result is needed."""

    def __init__(
        self, endpoints: tuple[str, ...], clock: Callable[[], float], verdict: Callable[[bool, float], None]
    ) -> None:
        """``verdict(cut_off, at)`` is called in the probe's thread after each probe; ``at`` is when the
        probe began."""
        self._endpoints = endpoints
        self._clock = clock
        self._verdict = verdict
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, wanted: bool) -> None:
        """Start or stop the probes."""
        if not wanted:
            self._wanted.clear()
            return
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="etcd-reachability", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._wanted.set()
        if self._thread:
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while self._wanted.wait() and not self._closed.is_set():
            at = self._clock()
            try:
                verdict = cut_off(self._endpoints)
            except Exception as error:  # noqa: BLE001  # nothing may end this thread
                _log.warning("whether etcd can be reached is not known, and is tried again: %s", error)
                self._closed.wait(AGAIN_S)
                continue
            if self._wanted.is_set() and not self._closed.is_set():
                self._verdict(verdict, at)
            self._closed.wait(AGAIN_S)


def _answered(error: int) -> bool:
    return error in (0, errno.ECONNREFUSED, errno.ECONNRESET)


_Addresses = list[tuple[int, int, int, str, tuple[str, int]]]
_addresses: dict[tuple[str, int], _Addresses] = {}


def _resolve(host: str, port: int, deadline: float) -> _Addresses:
    """Return the addresses of a host by the deadline; if the lookup fails, the addresses of the last lookup.
    A numeric address needs no lookup."""
    with suppress(OSError, UnicodeError):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)  # type: ignore[return-value]
    found: list[_Addresses] = []

    def look_up() -> None:
        with suppress(OSError, UnicodeError):
            found.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))  # type: ignore[arg-type]

    thread = threading.Thread(target=look_up, name="etcd-resolve", daemon=True)
    thread.start()
    thread.join(max(0.05, (deadline - time.monotonic()) / 2))
    if found:
        _addresses[host, port] = found[0]
    return _addresses.get((host, port), [])
