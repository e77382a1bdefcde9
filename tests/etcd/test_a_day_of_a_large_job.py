"""The writes of a large job in a day do not fill etcd, even if etcd compacts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from elasticd.core.facts import Fact
from elasticd.core.gathered import summarize_every_s
from elasticd.core.ports import Applied, Delete, Put, Write
from elasticd.etcd._client3 import rpc
from elasticd.etcd.blocking_client import Client
from tests.bench.scale import Leader
from tests.etcd.cluster import EtcdOnPorts

NODES = 1000
DAY_S = 86_400
LOST_EVERY_S = 3600  # a node is lost once in this time, and the world forms again
QUOTA = 2 << 30  # bytes: etcd's default, which the manifests keep
AT_ONCE = 64  # writes in a transaction


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_day_of_a_thousand_nodes_fills_less_than_half_of_the_shipped_etcd() -> None:
    leader = Leader(NODES)
    writes: list[Mapping[str, Fact | None]] = []
    write = leader.etcd._write

    def noted(facts: Mapping[str, Fact | None]) -> None:
        writes.append(dict(facts))
        write(facts)

    leader.etcd._write = noted  # type: ignore[method-assign]
    with EtcdOnPorts() as etcd, Client(etcd.access) as client:
        leader.form()
        summary, said = leader.summary(), 0
        for _ in range(DAY_S // LOST_EVERY_S):
            leader.stay_quiet()
            leader.lose_a_node()
            for facts in writes:
                _put(client, facts)
            writes.clear()
            for _ in range(int(LOST_EVERY_S / summarize_every_s(summary))):
                said += 1
                _put(client, {"summary": replace(summary, at=summary.at + said)})
        assert said > DAY_S / 10 - 1
        assert not client.full()
        size = client._connection.call("status", rpc.StatusRequest()).dbSize
        print(f"{size / 1e6:.0f} MB after {said} summaries and {DAY_S // LOST_EVERY_S} lost nodes")
        assert size < QUOTA / 2


def _put(client: Client, facts: Mapping[str, Fact | None]) -> None:
    todo: list[Write] = [Put(k, fact) if fact is not None else Delete(k) for k, fact in facts.items()]
    for at in range(0, len(todo), AT_ONCE):
        assert isinstance(client.transact("day", (), tuple(todo[at : at + AT_ONCE])), Applied)
