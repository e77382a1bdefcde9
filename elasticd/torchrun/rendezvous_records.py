"""The records of a rendezvous in etcd, and their encoding: plain JSON, never pickle.

Keys below ``/elasticd.torchrun/<run id>/``: ``nodes/<node>``, on the node's lease, holds a ``NodeRecord``;
``round`` holds a ``RendezvousRound``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import quote

import msgspec

from elasticd.etcd.validity import check

VERSION = 1


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A live node. ``after``: the newest round that the node has left; it waits for a later round until it is
    a member of one. ``address``, ``port``: where it already listens, in case it hosts the store of the next
    round. ``pid`` and ``host`` are for people."""

    after: int
    address: str
    port: int
    pid: int = 0
    host: str = ""
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Seat:
    """A node's place in a round. The index of the seat is the node's rank."""

    node: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class RendezvousClosed:
    """Why no node may join any more. ``by``: the node that closed the rendezvous; ``at``: seconds since the
    epoch. ``failed``: its workers failed for good, so the other nodes cannot continue either."""

    by: str
    at: float
    failed: bool = False


@dataclass(frozen=True, slots=True)
class RendezvousRound:
    """The numbered life of one world. Numbers only grow. The node in the first seat hosts the store."""

    number: int
    seats: tuple[Seat, ...] = ()
    formed_at: float = 0.0
    closed: RendezvousClosed | None = None
    version: int = VERSION

    def rank_of(self, node: str) -> int | None:
        for rank, seat in enumerate(self.seats):
            if seat.node == node:
                return rank
        return None


class CorruptError(ValueError):
    """A value in etcd that elasticd did not write."""


def encode(record: NodeRecord | RendezvousRound) -> bytes:
    return msgspec.json.encode(record)


Record = TypeVar("Record", NodeRecord, RendezvousRound)


# The decoders are made before any thread starts: msgspec crashes if two threads make the first decoder of a
# class at the same time.
_DECODERS: Final[dict[type[Any], msgspec.json.Decoder[Any]]] = {
    kind: msgspec.json.Decoder(kind) for kind in (NodeRecord, RendezvousRound)
}


def decode(kind: type[Record], value: bytes, key: str) -> Record:
    """Decode a value that ``encode`` made. Raises ``CorruptError``, with the key, for any other value."""
    try:
        record: Record = _DECODERS[kind].decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptError(f"the value of {key} in etcd is not a {kind.__name__}: {error}") from error
    if record.version > VERSION:
        raise CorruptError(
            f"{key} in etcd was written by a newer elasticd (format {record.version}, this one knows "
            f"{VERSION}): use one version on all nodes"
        )
    try:
        check(record)
        seats: tuple[Seat, ...] = record.seats if isinstance(record, RendezvousRound) else ()
        if len({seat.node for seat in seats}) < len(seats):
            raise ValueError("a node has two seats")
    except ValueError as error:
        raise CorruptError(f"the value of {key} in etcd cannot be true: {error}") from error
    return record


def prefix_of(run_id: str) -> str:
    """Return the prefix of a run's keys. Prefixes of different run ids never overlap, whatever characters
    the ids contain."""
    return f"/elasticd.torchrun/{quote(run_id, safe='')}/"
