"""What a leader knows from the nodes' telemetry, what it keeps for its successor, and how often it hears from
nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd.core import gathered
from elasticd.core.facts import (
    Extent,
    ForgottenNodes,
    NodeLedger,
    NodeTelemetry,
    Phase,
    Progress,
    SlotTime,
    Summary,
)
from elasticd.core.gathered import KEPT_MAX, Gathered, hear, restore, summarize
from elasticd.core.ledger import Kind
from elasticd.etcd import records
from elasticd.etcd.names import NAME_MAX
from tests.bench.scale import counted
from tests.core.build import life, round

RUN = 7


def telemetry(name: str, productive_s: float | None, *, run: int = RUN, number: int = 1) -> NodeTelemetry:
    slots = (SlotTime(0, {"productive": productive_s}),) if productive_s is not None else ()
    ledger = NodeLedger(name, 100.0, slots, run) if productive_s is not None else None
    return NodeTelemetry(name, life(name, number), ledger=ledger)


def known(**productive_s: float) -> Gathered:
    it = Gathered(RUN, restored=True)
    for name, s in productive_s.items():
        it = hear(it, telemetry(name, s))
    return it


def test_the_time_of_all_nodes_is_the_sum_of_what_each_told_last() -> None:
    it = known(a=10.0, b=5.0)
    it = hear(it, telemetry("a", 12.0))
    assert it.spent["productive"] == pytest.approx(17.0)
    assert [(ledger.node, ledger.slots[0].spent) for ledger in it.ledgers] == [
        ("a", {"productive": 12.0}),
        ("b", {"productive": 5.0}),
    ]


def test_a_summary_keeps_what_is_not_told_again_and_ignores_ledgers_of_other_runs() -> None:
    it = hear(known(a=10.0), replace(telemetry("a", None), progress=Progress("a", 3)))
    it = hear(it, telemetry("a", 99.0, run=RUN + 1))
    told = it.nodes["a"]
    assert told.progress == Progress("a", 3) and told.ledger is not None
    assert it.spent["productive"] == 10.0 and told.ledger.run == RUN


def test_the_progress_of_a_node_s_earlier_agent_is_dropped_and_its_ledger_is_kept_for_the_next() -> None:
    it = hear(known(a=10.0), replace(telemetry("a", None), progress=Progress("a", 3)))
    again = replace(telemetry("a", None, number=2), asks=True)
    kept = gathered.kept_for(it, again.node)
    assert kept is not None and kept.slots[0].spent == {"productive": 10.0}
    it = hear(it, again)
    assert it.nodes["a"].progress is None and it.nodes["a"].ledger == kept


def test_a_new_leader_goes_on_from_the_summary_and_what_nodes_tell_it_is_newer() -> None:
    first = known(a=10.0, b=5.0, c=1.0)
    _, summary = summarize(first, "a", {"a", "b"}, 200.0)
    assert not summary.final and summary.spent["productive"] == 16.0
    second = hear(Gathered(RUN), telemetry("b", 6.0))
    second = restore(second, summary)
    assert second.restored and second.spent["productive"] == pytest.approx(10.0 + 6.0 + 1.0)
    assert hear(second, telemetry("a", 11.0)).spent["productive"] == pytest.approx(18.0)


@pytest.mark.parametrize("kept", [None, Summary(RUN + 1, 100.0, {"productive": 5.0}, {"productive": 5.0})])
def test_nothing_is_taken_from_the_summary_of_another_run(kept: Summary | None) -> None:
    it = restore(Gathered(RUN), kept)
    assert it.restored and it.spent["productive"] == 0.0 and len(it.nodes) == 0


def test_a_summary_of_a_large_job_has_the_leader_s_own_node_and_lost_ones_and_is_bounded() -> None:
    it = known(**{f"n{n:04}": 1.0 for n in range(1000)})
    there = set(it.nodes) - {f"n{n:04}" for n in range(100, 300)}
    it, summary = summarize(it, "n0500", there, 200.0)
    names = [told.node for told in summary.nodes]
    assert names[0] == "n0500" and len(names) == KEPT_MAX
    assert not there.intersection(names[1:])
    lost = 200 - (KEPT_MAX - 1)
    assert summary.gone["productive"] == lost and summary.spent["productive"] == 1000.0
    assert len(it.nodes) == 1000 - lost, "nothing grows with the nodes that come and go"
    second = restore(Gathered(RUN), summary)
    for name in there:
        second = hear(second, telemetry(name, 1.0))
    assert second.spent["productive"] == pytest.approx(1000.0), "no time is lost with a leader"


def test_the_time_of_nodes_that_come_back_counts_once_also_if_they_had_no_room_in_the_summary() -> None:
    names = [f"n{n:03}" for n in range(200)]
    it, summary = summarize(known(**dict.fromkeys(names, 100.0)), "n000", {"n000"}, 200.0)
    assert summary.gone["productive"] == (200 - KEPT_MAX) * 100.0
    back = telemetry("n199", None, number=2)
    assert gathered.kept_for(it, back.node) == telemetry("n199", 100.0).ledger
    it = hear(it, back)
    assert it.spent["productive"] == pytest.approx(20_000.0), "a new agent of the node has told no ledger yet"
    for name in names:
        it = hear(it, telemetry(name, 101.0))
    it, summary = summarize(it, "n000", set(names), 201.0)
    assert summary.spent["productive"] == 20_200.0 and summary.gone["productive"] == 0.0
    assert len(it.forgotten) == 0


@pytest.mark.parametrize("early", [0, 100, 200])
def test_the_time_of_nodes_that_come_back_under_another_leader_counts_once(early: int) -> None:
    """``early``: so many nodes report to the new leader before it has read the first leader's summary."""
    names = [f"n{n:03}" for n in range(200)]
    first, summary = summarize(known(**dict.fromkeys(names, 100.0)), "n000", {"n000"}, 200.0)
    left = records.decode("forgotten", records.encode("forgotten", gathered.to_keep(first)))
    assert isinstance(left, ForgottenNodes)
    assert len(left.spent) == 200 - KEPT_MAX
    second = Gathered(RUN)
    for name in names[:early]:
        second = hear(second, replace(telemetry(name, 110.0), last=True))
    second = restore(second, summary, left)
    assert second.ended == early
    assert second.spent["productive"] == pytest.approx(20_000.0 + early * 10.0)
    for name in names[early:]:
        second = hear(second, telemetry(name, 110.0))
    second, summary = summarize(second, "n001", set(names), 201.0)
    assert summary.spent["productive"] == pytest.approx(22_000.0) and summary.gone["productive"] == 0.0
    assert gathered.to_keep(second).spent == {}


def test_a_new_agent_of_a_node_that_an_earlier_leader_forgot_continues_its_time() -> None:
    first, summary = summarize(known(**{f"n{n:03}": 100.0 for n in range(200)}), "n000", {"n000"}, 200.0)
    second = restore(Gathered(RUN), summary, gathered.to_keep(first))
    kept = gathered.kept_for(second, "n199")
    assert kept is not None and kept.run == RUN and kept.slots[0].spent == {"productive": 100.0}


def test_what_leaders_forget_fits_into_a_value_of_etcd() -> None:
    spent = dict.fromkeys(map(str, Kind), 12_345_678.123)
    names = (f"{n:0>{NAME_MAX}}" for n in range(gathered.FORGOTTEN_MAX))
    full = ForgottenNodes(RUN, dict.fromkeys(names, spent))
    assert len(records.encode("forgotten", full)) < 1.4e6


def test_a_summary_of_a_small_job_has_all_nodes_without_their_paces() -> None:
    _, summary = summarize(known(a=10.0, b=5.0), "a", {"a", "b"}, 200.0)
    assert [told.node for told in summary.nodes] == ["a", "b"]
    assert all(told.paces is None for told in summary.nodes)


def test_the_end_is_whole_once_all_members_of_the_last_round_have_told_their_last() -> None:
    over = round(3, {"a": 2, "b": 2}, Phase.ENDED)
    it = hear(known(a=1.0, b=1.0), replace(telemetry("a", 2.0), last=True))
    assert not gathered.is_whole(it, over) and gathered.is_whole(it, None)
    assert gathered.is_whole(hear(it, replace(telemetry("b", 2.0), last=True)), over)


def test_nodes_that_have_told_their_last_are_counted_until_they_are_back_or_forgotten() -> None:
    names = [f"n{n:03}" for n in range(200)]
    it = known(**dict.fromkeys(names, 1.0))
    for name in names[:100] * 2:
        it = hear(it, replace(telemetry(name, 2.0), last=True))
    assert it.ended == 100
    it = hear(it, telemetry("n000", 2.0, number=2))
    assert it.ended == 99
    it, _ = summarize(it, "n000", {"n000"}, 200.0)
    assert 0 < it.ended == sum(told.last for told in it.nodes.values()) < KEPT_MAX
    for name in names:
        it = hear(it, telemetry(name, 3.0, number=2))
    assert it.ended == 0


@pytest.mark.parametrize(
    ("nodes", "within_s"), [(1, 0.0), (64, 0.0), (1000, 0.0), (2000, 2.0), (10_000, 10.0)]
)
def test_the_nodes_of_a_large_job_tell_their_last_one_after_the_other(nodes: int, within_s: float) -> None:
    assert gathered.end_within_s(nodes) == within_s


def test_whether_the_end_is_whole_costs_the_leader_no_more_in_a_large_job() -> None:
    costs = []
    for nodes in (10, 1000):
        it = known(**{f"n{n:05}": 1.0 for n in range(nodes)})
        over = replace(round(3, {}, Phase.ENDED), extent=Extent(nodes, nodes, 0, 1, "d"))
        with counted() as count:
            assert not gathered.is_whole(it, over)
        costs.append(count())
    assert 0 < costs[1] <= costs[0]


@pytest.mark.parametrize(("nodes", "every_s"), [(1, 1.0), (100, 1.0), (1000, 2.0), (10_000, 20.0)])
def test_the_leader_hears_of_a_bounded_number_of_nodes_a_second(nodes: int, every_s: float) -> None:
    assert gathered.tell_every_s(nodes) == every_s


@pytest.mark.parametrize("slots", [1, 8, 64, KEPT_MAX * 8])
def test_the_summaries_of_a_day_fill_no_etcd(slots: int) -> None:
    """They fill neither etcd's database nor its raft log, which keeps many of them in memory."""
    times = tuple(SlotTime(n, {"productive": 123456.789, "restarting": 12.345}, 10_000) for n in range(slots))
    told = NodeTelemetry("node", "i" * 32, ledger=NodeLedger("node", 1e9, times, RUN))
    summary = Summary(RUN, 1e9, nodes=(told,))
    written = 86_400 / gathered.summarize_every_s(summary) * len(records.encode("summary", summary))
    assert written < 100e6


def test_what_a_node_costs_the_leader_does_not_grow_with_the_nodes() -> None:
    few, many = (known(**{f"n{n:05}": 1.0 for n in range(count)}) for count in (10, 1000))
    costs = []
    for it in (few, many):
        with counted() as count:
            hear(it, telemetry("n00005", 2.0))
        costs.append(count())
    assert 0 < costs[1] <= 1.5 * costs[0]
