"""The transactions of the agent that leads: what it writes alone, and what together with the leader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from elasticd.core import agent, leader
from elasticd.core.agent import AgentState
from elasticd.core.agent.crew import RELEASE_S
from elasticd.core.agent_messages import KeySeen, LeaseChanged, LeaveJob, Tag, Tick, Transact
from elasticd.core.facts import Budget, Cause, Limits, Node, Phase, Round
from elasticd.core.leader import View
from elasticd.core.ports import (
    Applied,
    Changes,
    Delete,
    Entry,
    Guard,
    LeaseExpired,
    Listing,
    Put,
    Refused,
    Write,
)
from elasticd.daemon.leading import LeaderAnswered, LeaderSaw
from tests.core.build import node, report
from tests.core.story import DELAY_S, StoryClock
from tests.sim.cluster import Cluster, Setup
from tests.sim.invariants import Invariants
from tests.sim.procs import Job, SimProcs

Apply = Callable[[tuple[Guard, ...], tuple[Write, ...], int], Applied | Refused]


class Recorded:
    """A job whose workers keep their process, and what it writes into etcd: the keys of each transaction.
    ``refuses``: whether etcd refuses these writes."""

    def __init__(self, slots: tuple[int, ...]) -> None:
        clock, sizes = StoryClock(), Limits(1, sum(slots))
        self.lines = clock.lines
        self.cluster = Cluster("leading", Setup(slots, sizes, job=Job(total_steps=200, inplace=True)), clock)
        self.cluster.network.fastest_s = self.cluster.network.slowest_s = DELAY_S
        self.invariants = Invariants(self.cluster)
        self.written: list[set[str]] = []
        self.refuses: Callable[[set[str]], bool] = lambda keys: False
        self._transact: Apply = self.cluster.etcd.transact
        self.cluster.etcd.transact = self._record  # type: ignore[method-assign]
        for number, many in enumerate(slots):
            self.cluster.join(f"n{number}", many)
        self.wait(lambda: self.invariants.steps >= 20)
        self.written.clear()

    def _record(self, guards: tuple[Guard, ...], writes: tuple[Write, ...], lease: int) -> Applied | Refused:
        keys = {write.key for write in writes}
        answer = Refused() if self.refuses(keys) else self._transact(guards, writes, lease)
        if isinstance(answer, Applied):
            self.written.append(keys)
        return answer

    @property
    def round(self) -> Round:
        assert self.cluster.round is not None
        return self.cluster.round

    def kill_a_worker(self, name: str) -> list[set[str]]:
        """Kill a worker. Return the keys of the transactions until the next round is live, but for the
        summary, for which nobody waits."""
        number = self.round.number
        self.cluster.agents[name].procs.workers[1].die(-9, "", primary=True)
        self.wait(lambda: self.round.number > number and self.round.phase is Phase.LIVE)
        return [keys for keys in self.written if keys != {"summary"}]

    def kill_and_begin_anew(self, name: str) -> None:
        """Kill a worker, and wait until the node has begun the next round."""
        self.kill_a_worker(name)
        driver = self.cluster.agents[name].driver
        self.wait(lambda: (crew := driver.state.crew) is not None and crew.round.number == self.round.number)

    def wait(self, done: Callable[[], bool]) -> None:
        assert self.cluster.clock.run(until=self.cluster.clock.now() + 60.0, done=done)


def test_a_round_of_one_node_ends_and_the_next_begins_in_one_transaction() -> None:
    job = Recorded((2,))
    assert job.kill_a_worker("n0") == [{"nodes/n0", "reports/n0", "round", "budget"}]
    assert job.round.failure is not None and job.round.cause is Cause.WORKER_FAILED


def leave_late(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    """Have workers take so long to leave their round."""
    leave = SimProcs.leave
    monkeypatch.setattr(
        SimProcs, "leave", lambda its, *how: its.host.clock.after(by_s, lambda: leave(its, *how))
    )


def test_a_round_of_one_node_closes_in_a_transaction_of_its_own_if_its_workers_take_long_to_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leave_late(monkeypatch, by_s=2 * RELEASE_S)
    closes, forms = Recorded((2,)).kill_a_worker("n0")
    assert closes == {"reports/n0", "round"}
    assert forms == {"nodes/n0", "round", "budget"}


def test_a_failure_is_charged_though_the_job_is_scaled_while_its_report_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leave_late(monkeypatch, by_s=0.8 * RELEASE_S)
    job = Recorded((2,))
    job.cluster.clock.after(0.4 * RELEASE_S, lambda: job.cluster.scale(Limits(1, 1)))
    job.kill_a_worker("n0")
    budget = job.cluster.etcd.fact("budget")
    assert job.round.cause is Cause.WORKER_FAILED and isinstance(budget, Budget) and budget.total == 1


def test_a_node_alone_begins_its_next_round_though_no_watch_brings_anything() -> None:
    """etcd's answers tell the agent and the leader what they wrote."""
    job = Recorded((2,))
    driver = job.cluster.agents["n0"].driver
    job.cluster.etcd.mute_watches()
    job.kill_and_begin_anew("n0")
    assert driver.view is not None and driver.view.round == job.round


def test_news_that_a_watch_brings_late_does_not_undo_what_the_leader_wrote() -> None:
    job = Recorded((2,))
    driver = job.cluster.agents["n0"].driver
    before = driver.state.seen["round"]
    job.kill_and_begin_anew("n0")
    seen = driver.view
    driver.handle(KeySeen(before), job.cluster.clock.now())
    assert driver.state.round == job.round and driver.view is seen


def test_news_of_what_agent_and_leader_know_change_nothing_and_are_passed_over() -> None:
    job = Recorded((2,))
    driver = job.cluster.agents["n0"].driver
    job.kill_and_begin_anew("n0")
    now = job.cluster.clock.now()
    before, view, leading = driver.state, driver.view, driver._leading
    assert leading._term is not None
    for entry in before.seen.values():
        assert before.knows(entry), entry.key
        assert agent.step(before, KeySeen(entry), now) == agent.step(before, Tick(), now)
        driver.handle(KeySeen(entry), now)
        assert driver.state is before and driver.view is view
        if entry.key in leading._term.shown:
            assert not leading.saw(LeaderSaw(leading._term.number, entry.key, Changes((entry,))), now)


def test_news_of_what_the_agent_knows_and_the_leader_does_not_lead_to_a_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Recorded((2,)).cluster.agents["n0"].driver
    term, entry = driver._leading._term, driver.state.seen["nodes/n0"]
    assert term is not None and driver.state.knows(entry)
    term.shown[entry.key] = entry.revision - 1
    decided: list[AgentState] = []
    monkeypatch.setattr(driver._leading, "lead", lambda state, now: decided.append(state))
    driver.handle(KeySeen(entry), 1e9)
    assert decided == [driver.state] and term.shown[entry.key] == entry.revision


def test_an_agent_does_not_know_what_it_has_given_up_or_knows_otherwise() -> None:
    job = Recorded((2,))
    driver = job.cluster.agents["n0"].driver
    job.kill_and_begin_anew("n0")
    state = driver.state
    record, told = state.seen["nodes/n0"], state.seen["reports/n0"]
    assert state.knows(record) and state.knows(told)
    for other in (
        replace(record, revision=record.revision - 1),
        replace(record, revision=record.revision + 1),
        replace(record, created=record.created - 1),  # the key was deleted and made again meanwhile
        replace(record, key="nodes/n7"),
        replace(record, revision=0),
    ):
        assert not state.knows(other)
    refused = replace(state, registration=replace(state.registration, reported=None))
    assert not refused.knows(told), "it may still be in etcd"
    lost = agent.step(state, LeaseChanged(LeaseExpired(0.0)), job.cluster.clock.now()).state
    assert not lost.registered and not lost.knows(record)
    assert agent.step(lost, KeySeen(record), job.cluster.clock.now()).state.registered


# ---------------------------------------------------------------- writes of the agent that wait


class Holding:
    """A leader that has asked for writes, and the two writes of its agent that wait. ``asked``: the tags of
    the agent's writes that were passed on to etcd."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = Recorded((2,)).cluster.agents["n0"].driver
        self.leading, term = self.driver._leading, self.driver._leading._term
        assert term is not None
        self.term = term
        self.first, self.second = (Transact(tag, (), (Delete(tag),)) for tag in (Tag.NODE, Tag.REPORT))
        assert not self.leading.hold(self.first), "nothing is under way"
        self.begin()
        assert self.leading.hold(self.first) and self.leading.hold(self.second)
        self.asked: list[str] = []
        monkeypatch.setattr(
            self.driver._store, "transact", lambda _, writes, __: self.asked.append(writes[0].key)
        )

    def begin(self) -> None:
        self.term.asked = (Delete("hang"),)


def test_writes_of_an_agent_wait_for_those_of_its_leader_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    holding = Holding(monkeypatch)
    leading = holding.leading
    assert not [*leading.let_go()]
    waiting = leading.let_go()
    holding.term.asked = ()
    later = Transact(Tag.SPEC, (), ())
    assert leading.hold(later), "it comes after those that wait"
    assert next(waiting) is holding.first
    holding.begin()
    assert not [*waiting], "the first was written together with what the leader asks for now"
    holding.term.asked = ()
    assert [*leading.let_go()] == [holding.second, later]


def test_writes_that_wait_are_made_once_the_leader_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    holding = Holding(monkeypatch)
    holding.driver.handle(LeaderAnswered(holding.term.number, Refused()), 1e9)
    assert holding.asked[:2] == [Tag.NODE, Tag.REPORT]


def test_writes_that_wait_are_made_once_the_agent_leads_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    holding = Holding(monkeypatch)
    led = holding.driver.state.seen["leader"]
    holding.driver.handle(KeySeen(replace(led, fact=None, revision=led.revision + 99)), 1e9)
    assert holding.asked[:2] == [Tag.NODE, Tag.REPORT]


def test_writes_that_wait_are_made_before_the_agent_leaves_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    holding = Holding(monkeypatch)
    holding.driver._perform(LeaveJob(3, "no memory"))
    assert holding.asked == [Tag.NODE, Tag.REPORT]


# ---------------------------------------------------------------- what the leader sees, and when


def test_the_leader_decides_nothing_while_a_late_listing_hides_what_it_wrote() -> None:
    """A watch that starts anew may list the keys before a write, and bring the list after the answer to that
    write."""
    job = Recorded((2,))
    driver, etcd = job.cluster.agents["n0"].driver, job.cluster.etcd
    before = {scope: etcd.listing(etcd.topic(scope, scope.endswith("/"))) for scope in ("nodes/", "budget")}
    job.kill_a_worker("n0")
    term = driver._leading._term
    assert term is not None
    job.wait(lambda: "budget" in term.written)
    etcd.mute_watches()
    for scope, listing in before.items():
        driver.handle(LeaderSaw(term.number, scope, listing), job.cluster.clock.now())
    assert term.view.budget == Budget() and not term.shows_what_is_written()
    for scope in before:
        entries = etcd.listing(etcd.topic(scope, scope.endswith("/"))).entries
        driver.handle(LeaderSaw(term.number, scope, Changes(entries)), job.cluster.clock.now())
    assert term.view.budget.charges and term.shows_what_is_written(), "what came after the list"


def test_the_leader_waits_for_the_other_nodes() -> None:
    """The leader's node releases the round before the other node does: no round forms with this release."""
    written = Recorded((2, 2)).kill_a_worker("n0")
    assert written[0] == {"reports/n0", "round"}
    assert [keys for keys in written[1:] if "round" in keys] == [{"round", "budget"}]


def test_if_etcd_refuses_both_the_agent_writes_alone_and_the_leader_decides_again() -> None:
    job = Recorded((2,))
    own = {"nodes/n0", "reports/n0"}
    refused = []

    def refuses(keys: set[str]) -> bool:
        """The leader no longer leads, for example."""
        refused.extend([keys] * (not refused and {*own, "round"} <= keys))
        return refused[-1:] == [keys]

    job.refuses = refuses
    written = [keys for keys in job.kill_a_worker("n0") if keys != {"nodes/n0"}]  # of a waiting worker
    assert written == [own, {"round"}, {"round", "budget"}]
    assert refused == [{*own, "round", "budget"}]
    said = [line for line in job.lines if "round 1 ends" in line or "restarts spent" in line]
    assert len(said) == 2, "each is said once"
    job.wait(lambda: job.round.phase is Phase.ENDED)
    assert job.invariants.steps == 200


# ---------------------------------------------------------------- what the leader foresees


def _view(*nodes: Node) -> View:
    entries = tuple(Entry(f"nodes/{one.name}", one, 7, 3) for one in nodes)
    return leader.see(View(), Listing(entries, 9), "nodes/", 1.0)


def test_the_leader_foresees_an_agent_s_release_and_report() -> None:
    before, released, told = _view(node("a"), node("b")), node("a", released=4), report("a", 4)
    foreseen = leader.foresee(before, (Put("nodes/a", released, leased=True), Put("reports/a", told)), 2.0)
    seen = leader.see(before, Changes((Entry("nodes/a", released, 10, 3),)), "nodes/", 2.0)
    seen = leader.see(seen, Changes((Entry("reports/a", told, 10, 10),)), "reports/", 2.0)
    assert foreseen == seen


@pytest.mark.parametrize(
    "write",
    [Put("nodes/c", node("c")), Delete("nodes/a"), Put("hang", report("a", 4))],
    ids=["a new node", "a node that goes", "another key"],
)
def test_other_writes_are_not_foreseen(write: Write) -> None:
    assert leader.foresee(_view(node("a")), (write,), 2.0) is None
