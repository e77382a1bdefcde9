"""The addresses of a job's savers, in etcd.

Each agent writes its saver's address and a secret. A caller must prove that it knows the secret. Clients
that may read the job's keys can therefore read the savers' copies.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from elasticd.checkpoint.replication.wire import PeerGone
from elasticd.core.facts import SaverAddress
from elasticd.core.ports import Applied, Put, Store
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.blocking_client import Client
from elasticd.etcd.errors import StoreError
from elasticd.telemetry import accepting

if TYPE_CHECKING:
    from elasticd.daemon.driver import Driver

_FOLDER: Final = "savers/"
_AGAIN_S: Final = 1.0
_LOOK_S: Final = 5.0


def listen(node: str, address: str) -> tuple[socket.socket, SaverAddress]:
    """Return a socket at a free port of the address, and the record that other savers need to call it. Raise
    OSError if the socket cannot listen."""
    listener = accepting.listen(address)
    return listener, SaverAddress(node, address, listener.getsockname()[1], secrets.token_hex(16))


class EtcdPeers:
    """The job's savers, as registered in etcd."""

    def __init__(self, access: EtcdAccess, job: str) -> None:
        self._access = access
        self._job = job

    def find(self, node: str) -> SaverAddress:
        """Return the saver of a node. Raise PeerGone if none is registered or etcd does not answer."""
        found = self._read(lambda client: [client.get(self._job, _FOLDER + node)])
        if not found:
            raise PeerGone(f"no saver of {node} is registered in etcd")
        return found[0]

    def others(self) -> list[SaverAddress]:
        """Return all savers. Raise PeerGone if etcd does not answer."""
        return self._read(lambda client: list(client.list(self._job, _FOLDER)[0].entries))

    def _read(self, ask: Callable[[Client], list[object]]) -> list[SaverAddress]:
        try:
            with Client(self._access) as client:
                entries = ask(client)
        except StoreError as error:
            raise PeerGone(f"cannot read the addresses of savers from etcd: {error}") from error
        facts = (getattr(entry, "fact", None) for entry in entries)
        return [fact for fact in facts if isinstance(fact, SaverAddress)]


class Announcement:
    """``routine(now)`` keeps the saver's address in etcd, on this agent's lease."""

    def __init__(self, me: SaverAddress, driver: Driver, store: Store) -> None:
        self._me = me
        self._driver = driver
        self._store = store
        self._told = 0  # the create_revision of the node's record at the last write
        self._busy = False

    def routine(self, now: float) -> float:
        state = self._driver.state
        own, guard = state.registration.own, state.guard
        written = own is not None and own.created == self._told
        if guard is None or self._busy or written:
            return now + (_LOOK_S if written else _AGAIN_S)
        self._busy = True

        def answered(answer: object) -> None:
            self._busy = False
            if isinstance(answer, Applied):
                self._told = guard.created

        self._store.transact((guard,), (Put(_FOLDER + self._me.node, self._me, leased=True),), answered)
        return now + _AGAIN_S
