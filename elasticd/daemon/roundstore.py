"""The c10d stores of rounds. A process of the agent serves them, so a store outlives the round's workers.

Every round has a new server on a new port, so no write of an older round reaches a newer one. The process
(elasticd/worker/boot/elasticd_store.py) is forked from the zygote, which has imported torch: the agent itself
needs no torch.
"""

from __future__ import annotations

import json
import os
import socket
import sys

from elasticd.channel.framing import pair
from elasticd.channel.warden_messages import Ended
from elasticd.daemon.config import CannotStart
from elasticd.procs.page import BOOT_DIR
from elasticd.procs.warden_client import Warden
from elasticd.telemetry import log

CLIENT_TIMEOUT_S = 300.0


class TorchRoundStores:
    """``core.ports.RoundStores`` with torch's TCPStore.

    The reserved port listens before the server runs, so early workers wait in the backlog and do not fail.
    The socket is bound to the node's own address only, since TCPStore has no authentication.

    ``ahead``: whether a server that is not forked from the zygote imports torch at once, and not when the
    first worker connects.
    """

    def __init__(self, address: str, warden: Warden, *, ahead: bool) -> None:
        self._address = address
        self._warden = warden
        self._argv = [sys.executable, "-P", os.path.join(BOOT_DIR, "elasticd_store.py"), *["--ahead"] * ahead]
        self._listener: socket.socket | None = None
        self.port = self._reserve()
        self._server = self._start()

    def open(self) -> None:
        assert self._listener is not None, "renew comes before the next open"
        listener, self._listener = self._listener, None
        with listener:
            try:
                self._send(listener)
            except OSError:  # the server was killed
                self._server.close()
                self._server = self._start()
                self._send(listener)

    def renew(self) -> int:
        if self._listener is None:
            self.port = self._reserve()
        return self.port

    def shut(self) -> None:
        """Close the store and the reserved port, and end the server."""
        self._server.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _send(self, listener: socket.socket) -> None:
        """Send what the store serves. One way, one message: JSON, as the server has only the standard library
        and torch."""
        where = {"host": self._address, "port": self.port, "timeout_s": CLIENT_TIMEOUT_S}
        socket.send_fds(self._server, [json.dumps(where).encode()], [listener.fileno()])

    def _start(self) -> socket.socket:
        ours, theirs = pair()
        with theirs:
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            files = [null, os.dup(null), os.dup(2), os.dup(theirs.fileno())]
            self._warden.start_store(self._argv, files, self._ended)
        return ours

    def _ended(self, end: Ended) -> None:
        if end.code and self._server.fileno() >= 0 and not self._warden.closing:
            log.get("elasticd.agent").warning("store.ended", code=end.code, why=end.error)

    def _reserve(self) -> int:
        try:
            family = socket.getaddrinfo(self._address, 0, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((self._address, 0), family=family, backlog=4096)
        except OSError as error:
            raise CannotStart(f"cannot listen on {self._address}, this node's --address: {error}") from error
        port: int = self._listener.getsockname()[1]
        return port
