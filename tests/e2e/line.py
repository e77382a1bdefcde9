"""A TCP connection that can be cut as a network cuts it: packets vanish, and neither end is told."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading


class Line:
    """A connection to one address. Clients connect to ``port``."""

    def __init__(self, host: str, port: int) -> None:
        self._far = (host, port)
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(0)  # two clients fill this queue, so that a third client gets no answer at all
        self.port: int = self._listener.getsockname()[1]
        self._peers: dict[socket.socket, socket.socket] = {}
        self._queued: list[socket.socket] = []
        self._whole = threading.Event()
        self._whole.set()
        self._idle = threading.Event()
        self._closing = False
        self._woken, self._wake = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Cut the line. Once this returns, nothing passes, and no client can connect."""
        self._idle.clear()
        self._whole.clear()
        os.write(self._wake, b"x")
        self._idle.wait()
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self.port))
            self._queued.append(filler)

    def mend(self) -> None:
        for filler in self._queued:
            filler.close()
        self._queued.clear()
        self._whole.set()

    def close(self) -> None:
        self._closing = True
        self.mend()
        os.write(self._wake, b"x")
        self._thread.join()
        for end in (self._listener, *self._peers):
            end.close()
        self._selector.close()
        os.close(self._woken)
        os.close(self._wake)

    def _carry(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._woken:
                    os.read(self._woken, 1)
                    self._idle.set()
                    self._whole.wait()
                    if self._closing:
                        return
                    break  # some sockets were ready before the cut: ask again
                if key.fileobj is self._listener:
                    self._join()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._pass_on(key.fileobj)

    def _join(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._far)
        except OSError:
            near.close()
            return
        for end, other in ((near, far), (far, near)):
            self._peers[end] = other
            self._selector.register(end, selectors.EVENT_READ)

    def _pass_on(self, end: socket.socket) -> None:
        other = self._peers.get(end)
        if other is None:
            return
        try:
            data = end.recv(65536)
            other.sendall(data)
        except OSError:
            data = b""
        if not data:
            for one in (end, other):
                with contextlib.suppress(KeyError):
                    self._selector.unregister(one)
                self._peers.pop(one, None)
                one.close()
