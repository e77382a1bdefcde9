"""The state of a rendezvous in one etcd key, fenced by the key's revision, as torch's contract requires."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
)

from elasticd.etcd import kv
from elasticd.etcd.connection import Connection
from elasticd.etcd.errors import StoreError
from elasticd.torchrun import BACKEND


class EtcdV3RendezvousBackend(RendezvousBackend):
    """Torch's RendezvousBackend on etcd: ``get_state`` and ``set_state`` on one key; the token is the key's
    mod_revision.

    The value in etcd is JSON. A state that is JSON in canonical form is stored readably as ``{"state":
    ...}``, any other as ``{"base64": "..."}``.
    """

    def __init__(self, connection: Connection, key: bytes) -> None:
        self._connection = connection
        self._key = key

    @property
    def name(self) -> str:
        return BACKEND

    def get_state(self) -> tuple[bytes, Token] | None:
        try:
            response = self._connection.call("range", kv.range_request(self._key), idempotent=True)
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error
        items = kv.range_result(response).items
        if not items:
            return None
        return unwrap(items[0].value or b"", self._key), items[0].revision

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        if token is None:
            token = 0
        if isinstance(token, int):
            revision = self.replace(state, token)
            if revision:
                return state, revision, True
        current = self.get_state()
        return None if current is None else (*current, False)

    def replace(self, state: bytes, token: int, guards: Iterable[Any] = (), lease: int = 0) -> int:
        """Write the state if the token is current (0: no state yet) and all guards hold. Return the new
        token, or 0 if nothing was written. After RendezvousConnectionError the outcome is unknown."""
        request = kv.txn_request(
            [kv.if_unchanged(self._key, token), *guards],
            [kv.put_op(self._key, wrap(state), lease)],
        )
        try:
            response = self._connection.call("txn", request)
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error
        return int(response.header.revision) if response.succeeded else 0


def wrap(state: bytes) -> bytes:
    try:
        value = json.loads(state)
        if _canonical(value) == state:
            return _canonical({"state": value})
    except (ValueError, RecursionError):
        pass
    return _canonical({"base64": base64.b64encode(state).decode()})


def unwrap(value: bytes, key: bytes) -> bytes:
    """Return the state in a value that ``wrap`` made. Raises RendezvousStateError for any other value."""
    try:
        match json.loads(value):
            case {"base64": str(text)}:
                return base64.b64decode(text, validate=True)
            case {"state": state}:
                return _canonical(state)
            case _:
                raise ValueError("it is not what elasticd writes")
    except (ValueError, RecursionError, binascii.Error) as error:
        raise RendezvousStateError(
            f"the state of the rendezvous, {key.decode(errors='replace')} in etcd, is corrupt: {error}"
        ) from error


def _canonical(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
