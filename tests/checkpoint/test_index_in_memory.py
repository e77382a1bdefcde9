"""The index of a state in memory comes from a node that has a valid one."""

from __future__ import annotations

import contextlib

import pytest

from elasticd.checkpoint.client import memory_tier
from elasticd.checkpoint.client.memory_tier import SaverQueries
from elasticd.checkpoint.client.resuming import _with_index
from elasticd.checkpoint.format.manifest import Index, encode_index, shard_name
from elasticd.checkpoint.replication.replicas import WholeState

GOOD = encode_index(Index([shard_name(0)], {}, {}, {}))


@pytest.mark.parametrize("bad", [b"{", encode_index(Index([], {}, {}, {}))])
def test_a_node_whose_index_is_not_valid_counts_as_lost_and_the_next_one_is_asked(
    bad: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Peer(contextlib.nullcontext[None]):
        def __enter__(self) -> Peer:  # type: ignore[override]
            return self

        def index(self, path: str, name: str) -> bytes:
            return {"a": bad, "b": GOOD}[str(self.enter_result)]

    monkeypatch.setattr(memory_tier, "PeerSaver", Peer)
    monkeypatch.setattr(SaverQueries, "_savers", lambda self, nodes: {node: node for node in nodes})
    choice = WholeState("step-0000000001-r1-0000000a.1", 1, 1, (("a", "b"),))
    left, index, lost = _with_index(SaverQueries("", "/checkpoints"), choice, "")
    assert left is not None and left.holders == (("b",),) and index == GOOD and lost.startswith("a: ")
    none, _, lost = _with_index(SaverQueries("", "/checkpoints"), WholeState("x", 1, 1, (("a",),)), "")
    assert none is None and lost.startswith("a: ")
