"""The keys of one job: transactions on its facts, and facts as they are read."""

from __future__ import annotations

from typing import Any

from elasticd.core.ports import Delete, Entry, Guard, Put, StillThere, Unchanged, Write
from elasticd.etcd import kv, records
from elasticd.etcd.kv import KeyValue


def transaction(root: bytes, guards: tuple[Guard, ...], writes: tuple[Write, ...], lease: int) -> Any:
    """Return the request to apply the writes if the guards hold. ``root``: the job's prefix. ``lease``: for
    leased puts. Raises ValueError if etcd could never apply the writes: one key written twice, or a fact
    under the wrong key."""
    _check_disjoint(writes)
    return kv.txn_request([_compare(root, g) for g in guards], [_operation(root, w, lease) for w in writes])


def entry(root: bytes, item: KeyValue) -> Entry | None:
    """Return the fact under a key of the job; None for a key that elasticd does not know. Raises BadRecord,
    NewerRecord."""
    key = item.key.removeprefix(root).decode(errors="replace")
    if item.value is None:
        return Entry(key, None, item.revision, 0) if records.fact_type(key) else None
    fact = records.decode(key, item.value)
    return None if fact is None else Entry(key, fact, item.revision, item.created)


def _compare(root: bytes, guard: Guard) -> Any:
    match guard:
        case Unchanged(key, revision):
            return kv.if_unchanged(root + key.encode(), revision)
        case StillThere(key, created):
            return kv.if_created(root + key.encode(), created)


def _operation(root: bytes, write: Write, lease: int) -> Any:
    match write:
        case Put(key, fact, leased):
            return kv.put_op(root + key.encode(), records.encode(key, fact), lease if leased else 0)
        case Delete(key, prefix):
            return kv.delete_op(root + key.encode(), prefix=prefix)


def _check_disjoint(writes: tuple[Write, ...]) -> None:
    """Raise ValueError for writes that etcd refuses: a key that is put and written again."""
    puts = [w.key for w in writes if isinstance(w, Put)]
    if len(set(puts)) < len(puts):
        raise ValueError("a transaction cannot put the same key twice")
    for delete in (w for w in writes if isinstance(w, Delete)):
        if any(key.startswith(delete.key) if delete.prefix else key == delete.key for key in puts):
            raise ValueError(f"a transaction cannot put what it deletes, {delete.key!r}")
