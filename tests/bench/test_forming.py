"""The benchmark of forming a world prints a figure, or fails with the reason."""

from __future__ import annotations

import re

import pytest

from elasticd.core import round_parts
from elasticd.core.facts import Phase, Round
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.blocking_client import Client
from tests.bench.forming import WORKERS, Broken, _measure, forming
from tests.etcd.cluster import EtcdOnPorts


def test_the_bench_prints_figures() -> None:
    said = forming([2], tries=1, c10d_most=0, c10d_timeout_s=1.0)
    cpu = r"an agent \d+ ms, the leader \d+ ms, both \d+ ms; etcd \d+\.\d\d s"
    figures = rf"\d+\.\d\d s \(CPU: {cpu}\)"
    assert re.search(rf"2 agents: elasticd {figures}; again {figures}", said), said


def test_more_agents_than_one_part_has_form_a_world_and_each_reads_its_own_part() -> None:
    """Real agents on a real etcd, in which no single value has all members."""
    with EtcdOnPorts() as server, Client(EtcdAccess((server.endpoint,))) as client:
        took_s = _measure("fleet_main", server.endpoint, 100, 120.0, words=2)
        (job,) = client.jobs()
        found, bad = client.list(job)
    assert took_s is not None and not bad
    facts = {entry.key: entry.fact for entry in found.entries if entry.fact is not None}
    record = facts["round"]
    assert isinstance(record, Round) and (record.number, record.phase) == (2, Phase.LIVE)
    assert record.members == () and record.extent is not None and record.extent.parts == 2
    round = round_parts.whole(record, facts)
    assert round_parts.fits(round) and round.world_size == 100 * WORKERS


def test_a_fleet_that_cannot_run_is_a_reason_and_no_figure() -> None:
    with pytest.raises(Broken, match="cannot import name 'no_such_fleet'"):
        _measure("no_such_fleet", "127.0.0.1:1", 2, 5.0)


def test_agents_that_form_no_world_in_time_are_no_figure() -> None:
    """Their processes are killed, perhaps before they have read what they were sent."""
    with EtcdOnPorts() as server:
        assert _measure("fleet_main", server.endpoint, 2, 0.0, words=2) is None
