"""How telemetry reaches the leader, what the leader keeps in etcd, and what is known at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from elasticd.core import agent
from elasticd.core.facts import (
    Fact,
    ForgottenNodes,
    Leadership,
    Limits,
    NodeLedger,
    NodeTelemetry,
    Paces,
    Phase,
    SlotPace,
    SlotTime,
    Spec,
    Summary,
)
from elasticd.core.gathered import PROBE_S, Gathered
from elasticd.core.leader import View
from elasticd.core.ports import Answer, Applied, Entry, Guard, Heard, Listing, Put, Seen, StillThere, Write
from elasticd.core.round_parts import PartSizes, without_parts
from elasticd.daemon import gathering
from elasticd.daemon.gathering import Gathering, LedgerFound, PacesTold, Told
from tests.core.build import life, node, round, view

ME = agent.Identity("a", life("a"), "127.0.0.1", (0, 1), "host", 1)
SPEC = Spec(Limits(2, 8), Limits(2, 8), "job.py", "f")
RUN = 5


class Etcd:
    """An etcd that may have a summary, and keeps what is written."""

    def __init__(self, summary: Summary | None = None) -> None:
        self.facts: dict[str, Fact] = {"summary": summary} if summary is not None else {}
        self.written: list[Summary] = []
        self.keys: list[list[str]] = []
        self.guards: list[tuple[Guard, ...]] = []

    def watch(self, key: str, seen: Callable[[Seen], None], *, prefix: bool = False) -> Callable[[], None]:
        there = (Entry(key, self.facts[key], 9, 9),) if key in self.facts else ()
        seen(Listing(there, 9))
        return lambda: None

    def transact(
        self, guards: tuple[Guard, ...], writes: tuple[Write, ...], answer: Callable[[Answer], None]
    ) -> None:
        self.facts |= {put.key: put.fact for put in writes if isinstance(put, Put)}
        self.keys.append([write.key for write in writes])
        if "summary" in self.keys[-1]:
            self.written.append(cast(Summary, self.facts["summary"]))
        self.guards.append(guards)
        answer(Applied(10))


class Link:
    """Keeps the messages for the leader."""

    def __init__(self) -> None:
        self.told: list[NodeTelemetry] = []
        self.flushed = False
        self.heard: Callable[[Heard], None] = lambda heard: None

    def listen(self, heard: Callable[[Heard], None]) -> None:
        self.heard = heard

    def tell(self, told: NodeTelemetry, leader: Leadership | None) -> None:
        self.told.append(told)

    def flush(self, within_s: float, spread_s: float = 0.0) -> bool:
        self.flushed = True
        return True


def state(*, leads: bool, alone: bool = False, over: bool = False, large: bool = False) -> agent.AgentState:
    phase = Phase.ENDED if over else Phase.LIVE
    whole = replace(round(3, {"a": 2, "b": 2, "c": 2}, phase), since=1001.0)
    known = without_parts(whole, PartSizes(members=1 if large else 64))
    leader = Leadership("a" if leads else "b", life("a" if leads else "b"), "127.0.0.1", 1234, "secret")
    config = agent.AgentConfig(600.0, alone=alone)
    return replace(
        agent.AgentState(ME, SPEC, config, 0),
        seen={
            "spec": Entry("spec", SPEC, RUN, RUN),
            "round": Entry("round", known, 1, 2),
            "leader": Entry("leader", leader, 3, 3),
        },
        registration=agent_joined(),
    )


def agent_joined() -> Any:
    empty = agent.AgentState(ME, SPEC, agent.AgentConfig(600.0), 0).registration
    return replace(empty, joined=True, own=Entry("nodes/a", node("a"), 2, 2))


def registered(*names: str) -> View:
    return view(SPEC, round(3, dict.fromkeys(names, 2)), [node(name) for name in names])


def ledger(name: str, productive_s: float, at: float = 1002.0) -> NodeLedger:
    return NodeLedger(name, at, (SlotTime(0, {"productive": productive_s}),), RUN)


def telemetry(name: str, productive_s: float, **more: Any) -> NodeTelemetry:
    return NodeTelemetry(name, life(name), ledger=ledger(name, productive_s), **more)


def leading(etcd: Etcd, **how: bool) -> tuple[Gathering, list[Told], agent.AgentState]:
    its, posted = state(leads=True, **how), list[Told]()
    made = Gathering(its, cast(Any, etcd), Link())
    made.begin(posted.append)
    made.attend(its, registered("a", "b", "c"), 1000.0)
    return made, posted, its


def test_an_agent_that_does_not_lead_tells_its_leader_and_takes_nothing_from_others() -> None:
    its, link = state(leads=False), Link()
    made = Gathering(its, cast(Any, Etcd()), link)
    made.begin(lambda news: None)
    made.attend(its, None, 1000.0)
    made.tell(ledger=ledger("a", 4.0))
    assert link.told[-1].ledger == ledger("a", 4.0) and link.told[-1].asks
    assert made.hear((telemetry("b", 1.0),)) is None and made.summary(1000.0) is None


def test_the_leader_takes_only_what_the_registered_agent_of_a_node_tells() -> None:
    made, _, _ = leading(Etcd())
    stranger = telemetry("x", 1.0)
    before = replace(telemetry("b", 1.0), incarnation=life("b", 0))
    heard = made.hear((stranger, before, telemetry("c", 3.0)))
    assert made.known is not None and sorted(made.known.nodes) == ["a", "c"]
    assert heard is not None and heard.again == ("x", "b", "c")
    heard = made.hear((telemetry("c", 4.0),))
    assert heard is not None and heard.again == ()


def test_paces_are_passed_on_once() -> None:
    made, posted, _ = leading(Etcd())
    paces = Paces("b", life("b"), 3, 1, (SlotPace(0, 2, 0.1),))
    for _ in range(3):
        made.hear((telemetry("b", 1.0, paces=paces),))
    assert [news for news in posted if isinstance(news, PacesTold)] == [PacesTold((paces,))]


def test_agents_are_given_the_ledgers_that_earlier_agents_of_their_nodes_left() -> None:
    kept = Summary(RUN, 900.0, nodes=(telemetry("a", 7.0), telemetry("b", 8.0)))
    made, posted, _ = leading(Etcd(kept))
    assert LedgerFound(ledger("a", 7.0)) in posted, "the leader's own node continues, too"
    heard = made.hear((NodeTelemetry("b", life("b"), asks=True), NodeTelemetry("c", life("c"), asks=True)))
    assert heard is not None and heard.looked_up == ("b", "c") and heard.kept == (ledger("b", 8.0),)


def test_an_agent_finds_its_ledger_in_the_leader_s_answer() -> None:
    its, link, posted = state(leads=False), Link(), list[Told]()
    Gathering(its, cast(Any, Etcd()), link).begin(posted.append)
    link.heard(Heard(1.0))
    assert posted == []
    link.heard(Heard(1.0, ("a", "b"), (ledger("b", 8.0),)))
    link.heard(Heard(1.0, ("a",), (ledger("a", 7.0),)))
    assert posted == [LedgerFound(None), LedgerFound(ledger("a", 7.0))]


def test_the_summary_is_written_rarely_by_the_leader_alone() -> None:
    etcd = Etcd()
    made, _, its = leading(etcd)
    for n in range(100):  # ten seconds
        made.hear((telemetry("b", 1.0 + n // 50),))
        made.attend(its, registered("a", "b", "c"), 1001.0 + n / 10)
    assert 9 <= len(etcd.written) <= 11 and etcd.keys[-1] == ["summary"]
    assert etcd.written[-1].spent["productive"] == 2.0 and not etcd.written[-1].final
    assert set(etcd.guards) == {(StillThere("leader", 3),)}, "a deposed leader cannot write"


def test_while_a_large_summary_waits_a_small_write_would_notice_a_full_etcd() -> None:
    etcd, names = Etcd(), [f"n{n}" for n in range(50)]
    made, _, its = leading(etcd)
    made.hear([telemetry(name, 1.0) for name in names])  # not registered
    made.attend(its, registered("a", *names), 1001.0)
    slots = tuple(SlotTime(slot, {"productive": 1.0}) for slot in range(8))
    made.hear([NodeTelemetry(n, life(n), ledger=NodeLedger(n, 1002.0, slots, RUN)) for n in names])
    etcd.keys.clear()
    due = [at for at in range(1002, 1302) if made.wake_at is not None]
    for at in due:
        made.attend(its, registered("a", *names), float(at))
    summaries, probes = (sum(key in keys for keys in etcd.keys) for key in ("summary", "room"))
    assert 3 <= summaries <= 5, "1 kB in a second"
    assert 300 / PROBE_S - summaries - 5 <= probes <= 300 / PROBE_S


def test_what_a_leader_has_forgotten_is_written_when_it_changes_and_its_successor_counts_it_once() -> None:
    etcd, names = Etcd(), ["a", *(f"n{n:03}" for n in range(200))]
    first, _, its = leading(etcd)
    first.attend(its, registered(*names), 1000.0)
    first.hear([telemetry(name, 10.0) for name in names])
    for at in (1020.0, 1120.0):
        first.attend(its, registered("a"), at)
    assert ["forgotten" in keys for keys in etcd.keys][-2:] == [True, False]
    second, _, its = leading(etcd)
    second.attend(its, registered(*names), 1160.0)
    second.hear([telemetry(name, 11.0) for name in names])
    second.attend(its, registered(*names), 1280.0)
    assert etcd.written[-1].spent["productive"] == pytest.approx(11.0 * len(names))
    assert etcd.facts["forgotten"] == ForgottenNodes(RUN)


def test_the_summary_of_a_run_of_one_node_with_its_own_etcd_is_not_written() -> None:
    etcd = Etcd()
    made, _, its = leading(etcd, alone=True)
    made.tell(ledger=ledger("a", 1.0))
    made.attend(its, registered("a"), 1010.0)
    assert etcd.written == [] and made.summary(1010.0) is not None, "commands ask the agent"


def test_a_leader_that_is_deposed_forgets_and_tells_the_next() -> None:
    etcd, link = Etcd(), Link()
    its = state(leads=True)
    made = Gathering(its, cast(Any, etcd), link)
    made.begin(lambda news: None)
    made.attend(its, registered("a", "b"), 1000.0)
    made.tell(ledger=ledger("a", 4.0))
    assert link.told == [] and made.known is not None
    made.attend(state(leads=False), None, 1001.0)
    assert made.known is None and link.told[-1].ledger == ledger("a", 4.0)


def test_a_leader_that_is_deposed_while_it_hears_forgets_that_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, _ = leading(Etcd())
    deposing = threading.Thread(target=lambda: made.attend(state(leads=False), None, 1001.0))

    def hear(known: Gathered, told: NodeTelemetry) -> Gathered:
        deposing.start()
        deposing.join(0.2)  # the other thread waits for this call to end
        return known

    monkeypatch.setattr(gathering.gathered, "hear", hear)
    made.hear((telemetry("b", 3.0),))
    deposing.join()
    assert made.known is None


def test_at_the_end_the_leader_collects_the_last_of_all_members_once() -> None:
    etcd = Etcd()
    made, _, _its = leading(etcd)
    for name, s in (("b", 2.0), ("c", 3.0)):
        made.hear((telemetry(name, s, last=True),))
    ledgers, spent = made.farewell(state(leads=True, over=True), ledger("a", 1.0), 1003.0, known=True)
    assert [one.node for one in ledgers] == ["a", "b", "c"] and spent["productive"] == 6.0
    (last,) = [summary for summary in etcd.written if summary.final]
    assert last.spent["productive"] == 6.0 and len(last.nodes) == 3


@pytest.mark.parametrize("large", [True, False])
def test_the_other_agents_read_the_end_from_the_leader_s_summary_unless_the_job_is_large(large: bool) -> None:
    nodes = tuple(telemetry(name, s) for name, s in (("a", 0.5), ("b", 2.0), ("c", 3.0)))
    etcd = Etcd(Summary(RUN, 1003.0, {"productive": 5.5}, {}, nodes, final=True))
    its, link = state(leads=False, over=True, large=large), Link()
    made = Gathering(its, cast(Any, etcd), link)
    made.begin(lambda news: None)
    made.attend(its, None, 1002.0)
    ledgers, spent = made.farewell(its, ledger("a", 1.0), 1003.0, known=True)
    assert link.told[-1].last and link.told[-1].ledger == ledger("a", 1.0) and link.flushed
    assert [one.node for one in ledgers] == (["a"] if large else ["a", "b", "c"])
    assert spent == {} if large else spent["productive"] == 6.0, "with this node's own last record"


def test_an_agent_that_the_job_refuses_waits_for_no_leader_and_tells_no_ledger() -> None:
    its, link = (
        replace(state(leads=False), registration=replace(agent_joined(), joined=False, own=None)),
        Link(),
    )
    made = Gathering(its, cast(Any, Etcd()), link)
    made.begin(lambda news: None)
    made.attend(its, None, 1002.0)
    ledgers, _ = made.farewell(its, ledger("a", 1.0), 1003.0, known=False)
    assert not link.flushed and link.told[-1].ledger is None and [one.node for one in ledgers] == ["a"]


def test_a_leader_whose_members_do_not_answer_ends_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "FAREWELL_S", 0.05)
    etcd = Etcd()
    made, _, _its = leading(etcd)
    ledgers, _ = made.farewell(state(leads=True, over=True), ledger("a", 1.0), 1003.0, known=True)
    assert [one.node for one in ledgers] == ["a"] and etcd.written[-1].final
