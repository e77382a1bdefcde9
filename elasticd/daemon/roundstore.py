"""The c10d store of a round, hosted by an agent so that it outlives workers.

A fresh server on a fresh port for every round: whatever an older round left behind, or still tries
to write, goes nowhere.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

from elasticd.daemon.errors import CannotStart

CLIENT_TIMEOUT_S = 300.0


class TorchRoundStores:
    """Implements ``core.ports.RoundStores`` with torch's TCPStore.

    The port is bound, and listens, from when it is announced: workers that connect before the
    server is up wait in the backlog instead of failing. Bound to the node's own address only, as
    the protocol of TCPStore knows no authentication.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._store: TCPStore | None = None
        self._listener: socket.socket | None = None
        self.port = self._reserve()

    def open(self) -> None:
        from torch.distributed import TCPStore

        assert self._listener is not None, "renew comes before the next open"
        listener, self._listener = self._listener, None
        self._store = TCPStore(
            self._address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=CLIENT_TIMEOUT_S),
            master_listen_fd=listener.detach(),  # the store closes it
        )

    def renew(self) -> int:
        if self._listener is None:
            self.port = self._reserve()
        return self.port

    def shut(self) -> None:
        """For good: no port is left listening."""
        self._store = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _reserve(self) -> int:
        try:
            family = socket.getaddrinfo(self._address, 0, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.socket(family, socket.SOCK_STREAM)
            self._listener.bind((self._address, 0))
            self._listener.listen(4096)
        except OSError as error:
            raise CannotStart(f"cannot listen on {self._address}, this node's --address: {error}") from error
        port: int = self._listener.getsockname()[1]
        return port
