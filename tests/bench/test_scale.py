"""An event of one node costs the leader as much in a large job as in a small one. An event of all nodes costs
a few lines of Python for each node. Lines are counted, so a busy machine does not matter."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import pytest

from elasticd.checkpoint.replication.replicas import Offer, newest_whole
from elasticd.core.facts import Limits
from elasticd.core.gathered import HEARD_PER_S
from elasticd.daemon.config import Command, CommandKind, RunConfig
from elasticd.daemon.leader_link import telemetry_messages
from elasticd.daemon.leader_link.telemetry_messages import Tell
from elasticd.daemon.meter import Meter
from elasticd.daemon.observer import Observer
from elasticd.daemon.publish import Publisher
from elasticd.daemon.timekeeper import Timekeeper
from tests.bench.scale import (
    END,
    FORMING,
    HANDOVER,
    JUDGED,
    LOST,
    OF_ALL_NODES,
    OF_ONE_NODE,
    PERIOD,
    POLICY,
    REFORMING,
    RENEWAL_BYTES,
    RESIZE,
    SHARDS,
    TAKEOVER,
    UNITS,
    WORKERS,
    Leader,
    Missing,
    Planning,
    _event,
    _quiet_minute,
    _told,
    counted,
    plan_of_a_checkpoint,
    play,
    scale,
)

FEW, MANY = 100, 500  # the rounds of both sizes have their members in parts
LINES_A_NODE = {  # of a node with 8 workers
    PERIOD: 22,
    JUDGED: 28,
    FORMING: 27,
    REFORMING: 24,
    UNITS: 40,
    RESIZE: 25,
    HANDOVER: 40,
    TAKEOVER: 30,
    END: 2,
}


@cache
def operations(nodes: int, kind: str) -> float:
    return _event(kind, _played(nodes).costs[kind].ops)


@cache
def _played(nodes: int) -> Leader:
    return play(nodes, counting=True)


@pytest.mark.parametrize("kind", OF_ONE_NODE)
def test_an_event_of_one_node_costs_as_much_in_a_job_of_ten_times_the_nodes(kind: str) -> None:
    assert operations(MANY, kind) < 1.1 * operations(FEW, kind)


@pytest.mark.parametrize("kind", OF_ALL_NODES)
def test_an_event_of_all_nodes_costs_a_few_lines_a_node(kind: str) -> None:
    more = operations(MANY, kind) - operations(FEW, kind)
    assert more / (MANY - FEW) < LINES_A_NODE[kind]


@pytest.mark.parametrize("shards", SHARDS[:2])
def test_a_plan_of_a_checkpoint_costs_rank_0_a_few_lines_and_bytes_a_rank_and_the_others_nothing(
    shards: int,
) -> None:
    """Nor is there a cost for each pair of rank and tensor: this state has 870 tensors."""

    def cost(ranks: int) -> tuple[int, Planning]:
        with counted() as count:
            plan = plan_of_a_checkpoint(ranks, shards)
        return count(), plan

    (few, small), (many, large) = cost(800), cost(4000)
    assert many - few < 30 * 3200
    assert large.received - small.received <= 24 * 3200 and large.given - small.given < 75 * 3200
    assert large.share <= small.share


def test_a_survey_of_the_states_in_memory_costs_a_few_lines_a_rank() -> None:
    """Each node offers the shards of its own ranks, and of another node's."""

    def cost(nodes: int) -> int:
        world = nodes * WORKERS
        offers = [
            Offer(
                f"n{n}",
                "step-7",
                1,
                7,
                world,
                frozenset((n * WORKERS + i) % world for i in range(2 * WORKERS)),
            )
            for n in range(nodes)
        ]
        with counted() as count:
            found = newest_whole(offers)
        assert found is not None and {len(nodes) for nodes in found.holders} == {2}
        return count()

    assert cost(500) - cost(100) < 10 * 400 * WORKERS


class _NoView:
    live = False


def published(nodes: int) -> int:
    """Return the operations in which the agent that leads makes its status and sets its metrics."""
    leader = Leader(nodes)
    leader.form()
    driver = cast(Any, leader.driver)
    limits, command = Limits(8, 8 * nodes), Command(CommandKind.SCRIPT, "train.py")
    config = RunConfig("job", leader.names[0], "127.0.0.1", limits, 8, command, "f", etcd="http://etcd")
    store, nothing = cast(Any, leader.etcd), cast(Any, None)
    meter = Meter(config, driver, store, lambda slot, after: ())
    keeper = Timekeeper(leader.driver.state, 0.0, lambda round: (), lambda slot, after: ())
    publisher = Publisher(
        config,
        driver,
        store,
        lambda round: (),
        cast(Any, _NoView()),
        meter,
        nothing,
        nothing,
        keeper,
        nothing,
        nothing,
        nothing,
        Observer(lambda round: {}, lambda: 0.0),
    )
    leader.etcd.work()
    publisher._status((), 1_000_001.0)
    with counted() as count:
        meter._update_job(publisher._status((), 1_000_002.0), 1_000_002.0)
    assert (
        meter.metrics.get("elasticd_members", "member") == meter.metrics.get("elasticd_world_nodes") == nodes
    )
    assert meter.metrics.get("elasticd_members", "lost") == 0
    return count()


def test_what_an_agent_publishes_each_second_costs_as_much_in_a_job_of_ten_times_the_nodes() -> None:
    assert published(MANY) < 1.5 * published(FEW)


def test_bytes_of_an_agent_when_a_node_is_lost_do_not_grow_with_the_nodes() -> None:
    few, many = (_played(nodes).etcd.bytes[LOST] / nodes for nodes in (FEW, MANY))
    assert many < 1.5 * few


def test_a_quiet_minute_costs_etcd_hardly_more_than_the_leases_and_no_more_in_a_large_job() -> None:
    few, many = (_quiet_minute(_played(nodes)) for nodes in (FEW, MANY))
    renewals = 60 / (POLICY.node_ttl_s / 3)
    assert many[0] < few[0] < 2.2 * renewals
    assert many[1] < few[1] < 2 * 2 * RENEWAL_BYTES * renewals, "the summary of a small job has all nodes"


@pytest.mark.parametrize("nodes", [100, 1000, 10_000, 100_000])
def test_the_leader_hears_a_bounded_number_of_bytes_however_large_the_job_is(nodes: int) -> None:
    """Bytes per second, of all nodes together: the nodes of a large job report less often."""
    leader = _played(MANY)
    messages, size = _told(leader, nodes)
    one = len(telemetry_messages.encoded(Tell((leader.telemetry(leader.round.members[-1], 1000),))))
    assert nodes * messages / 60 <= 2 * HEARD_PER_S and nodes * size / 60 < 1.3 * HEARD_PER_S * one


def test_all_figures_are_printed() -> None:
    lines = scale([25, 30], limit_s=600.0).splitlines()
    assert lines[0].split() == ["8", "workers", "a", "node", "25", "nodes", "30", "nodes"]
    assert len(lines) == 2 + len(OF_ONE_NODE) + len(OF_ALL_NODES) + 6 + 2 * len(SHARDS)
    assert all(sum(c.isdigit() for c in line) for line in lines[2:])


def test_a_figure_that_does_not_come_in_time_is_an_error() -> None:
    with pytest.raises(Missing, match="was not over in time"):
        scale([25], limit_s=0.0)
    with pytest.raises(Missing, match=f"the cost of {FORMING} is missing"):
        _event(FORMING, [])
