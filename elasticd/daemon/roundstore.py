"""The c10d stores of rounds. An agent hosts the store, so the store outlives workers.

Every round has a new server on a new port, so no write of an older round reaches a newer one.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

from elasticd.daemon.config import CannotStart

CLIENT_TIMEOUT_S = 300.0


class TorchRoundStores:
    """``core.ports.RoundStores`` with torch's TCPStore.

    The reserved port listens before the server runs, so early workers wait in the backlog and do not fail.
    The socket is bound to the node's own address only, since TCPStore has no authentication.
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
            master_listen_fd=listener.detach(),  # the store closes the descriptor
        )

    def renew(self) -> int:
        if self._listener is None:
            self.port = self._reserve()
        return self.port

    def shut(self) -> None:
        """Close the store and the reserved port."""
        self._store = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _reserve(self) -> int:
        try:
            family = socket.getaddrinfo(self._address, 0, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((self._address, 0), family=family, backlog=4096)
        except OSError as error:
            raise CannotStart(f"cannot listen on {self._address}, this node's --address: {error}") from error
        port: int = self._listener.getsockname()[1]
        return port
