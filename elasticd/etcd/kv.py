"""Requests for keys, and their responses, as plain bytes. The whole package uses these functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from elasticd.etcd._client3 import rpc


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key in etcd. ``value`` is None if the key was deleted, at ``revision``."""

    key: bytes
    value: bytes | None
    revision: int
    created: int


@dataclass(frozen=True, slots=True)
class Range:
    """Sorted keys at ``revision``."""

    items: tuple[KeyValue, ...]
    revision: int


def prefix_end(prefix: bytes) -> bytes:
    """Return the end of the range of all keys that start with ``prefix``."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"


def range_request(key: bytes, *, prefix: bool = False, limit: int = 0, keys_only: bool = False) -> Any:
    return rpc.RangeRequest(
        key=key, range_end=prefix_end(key) if prefix else b"", limit=limit, keys_only=keys_only
    )


def range_result(response: Any) -> Range:
    return Range(tuple(key_value(kv) for kv in response.kvs), response.header.revision)


def key_value(kv: Any) -> KeyValue:
    return KeyValue(kv.key, kv.value, kv.mod_revision, kv.create_revision)


def event(event: Any) -> KeyValue:
    """Return the change in a watch event."""
    kv = event.kv
    return KeyValue(kv.key, None, kv.mod_revision, 0) if event.type == event.DELETE else key_value(kv)


def if_unchanged(key: bytes, revision: int) -> Any:
    """Compare the key's mod_revision; 0 means that the key does not exist."""
    return rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.MOD, key=key, mod_revision=revision)


def if_created(key: bytes, revision: int) -> Any:
    """Compare the key's create_revision."""
    return rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.CREATE, key=key, create_revision=revision)


def put_op(key: bytes, value: bytes, lease: int = 0) -> Any:
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, lease=lease))


def delete_op(key: bytes, *, prefix: bool = False) -> Any:
    return rpc.RequestOp(
        request_delete_range=rpc.DeleteRangeRequest(key=key, range_end=prefix_end(key) if prefix else b"")
    )


def txn_request(compares: Iterable[Any], operations: Iterable[Any]) -> Any:
    return rpc.TxnRequest(compare=list(compares), success=list(operations))
