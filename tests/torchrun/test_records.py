"""What the nodes of a rendezvous read from etcd is validated before use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticd.torchrun.rendezvous_records import (
    CorruptError,
    NodeRecord,
    RendezvousClosed,
    RendezvousRound,
    Seat,
    decode,
    encode,
)

NODE = NodeRecord(after=1, address="10.0.0.1", port=29500, pid=7, host="h")
SEAT = Seat("a", "fd00::1", 29500)
ROUND = RendezvousRound(2, (SEAT, Seat("b", "node-b.local", 1)), 1.0, RendezvousClosed("a", 2.0))


@pytest.mark.parametrize("record", [NODE, ROUND])
def test_what_nodes_write_is_read(record: Any) -> None:
    assert decode(type(record), encode(record), "key") == record


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (replace(NODE, address="10.0.0.1\x1b[2J"), "address: .* is not an address"),
        (replace(NODE, port=65536), "port: 65536 is not between"),
        (replace(NODE, after=-1), "after: -1 is not between"),
        (replace(NODE, pid=2**40), "pid: .* is not between"),
        (replace(ROUND, number=-1), "number: -1 is not between"),
        (replace(ROUND, formed_at=1e300), "formed_at: .* is not between"),
        (replace(ROUND, seats=(SEAT, SEAT)), "a node has two seats"),
        (replace(ROUND, seats=(replace(SEAT, node="../a"),)), "seats: node: .* has a slash"),
    ],
)
def test_what_no_node_writes_is_refused_in_a_sentence(record: Any, says: str) -> None:
    with pytest.raises(CorruptError, match=f"the value of key in etcd cannot be true: {says}") as error:
        decode(type(record), encode(record), "key")
    assert str(error.value).isprintable()
