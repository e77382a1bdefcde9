"""What the nodes of a rendezvous write into etcd, and how: plain JSON, never pickle.

Keys below ``/elasticd.torchrun/<run id>/``: ``nodes/<node>`` on the node's lease holds a
``NodeRecord``; ``round`` holds a ``RendezvousRound``.
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
    """A node that lives. ``after``: the newest round it has left behind; it is waiting for a
    newer one until it is a member of one. ``address`` and ``port``: where it already listens for
    the store of the next round, should it be the one to host it. ``pid`` and ``host`` are for
    people."""

    after: int
    address: str
    port: int
    pid: int = 0
    host: str = ""
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Seat:
    """A node's part in a round; its place among the seats is its rank."""

    node: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class RendezvousClosed:
    """Why no node may join any more. ``by``: the node that closed it; ``at``: seconds since the
    epoch. ``failed``: its workers failed for good, so that the others cannot go on either."""

    by: str
    at: float
    failed: bool = False


@dataclass(frozen=True, slots=True)
class RendezvousRound:
    """The numbered life of one world. The number only grows. The first seat hosts the store."""

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
    """A value that is not what elasticd writes."""


def encode(record: NodeRecord | RendezvousRound) -> bytes:
    return msgspec.json.encode(record)


Record = TypeVar("Record", NodeRecord, RendezvousRound)


# Made before there are threads: msgspec crashes where two of them are the first to decode a class.
_DECODERS: Final[dict[type[Any], msgspec.json.Decoder[Any]]] = {
    kind: msgspec.json.Decoder(kind) for kind in (NodeRecord, RendezvousRound)
}


def decode(kind: type[Record], value: bytes, key: str) -> Record:
    """Raises ``CorruptError``, naming the key, for anything that ``encode`` did not make."""
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
    """The keys of one run id, whatever characters it has, never overlap those of another."""
    return f"/elasticd.torchrun/{quote(run_id, safe='')}/"
