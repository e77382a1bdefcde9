"""The kinds of time of slots, from a state made by the test."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from elasticd.core import agent
from elasticd.core.agent.agent_state import Registration
from elasticd.core.facts import Limits, NodeLedger, Phase, SlotProgress, Spec
from elasticd.core.ledger import Kind
from elasticd.core.lifecycle import Life
from elasticd.core.ports import Entry
from elasticd.core.timekeeping import Timekeeping, find, keep_time, not_at_work, start
from tests.core.build import crew, life, round

ME = agent.Identity("a", life("a"), "127.0.0.1", (0, 1), "host", 1)
NEW = agent.AgentState(ME, Spec(Limits(2, 2), Limits(2, 2), "job.py", "f"), agent.AgentConfig(600.0), 0)


def state(phase: Phase, nodes: dict[str, int], **more: object) -> agent.AgentState:
    seen = {"round": Entry("round", round(3, nodes, phase), 1, 2)}
    joined = replace(NEW, registration=Registration(joined=True), seen=seen)
    return replace(joined, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("phase", "nodes", "more", "kind"),
    [
        (Phase.WAITING, {}, {}, Kind.WAITING),
        (Phase.WAITING, {}, {"standbys": {0: Life.WAITING}}, Kind.WAITING),
        # A worker that still starts does not wait for others.
        (Phase.WAITING, {}, {"standbys": {0: Life.STARTING}}, Kind.RESTARTING),
        (Phase.LIVE, {"b": 2}, {"standbys": {0: Life.STARTING}}, Kind.RESTARTING),
        (Phase.LIVE, {"b": 2}, {"standbys": {1: Life.STARTING}}, Kind.IDLE),
        (Phase.LIVE, {"a": 1, "b": 1}, {}, Kind.RENDEZVOUS),
        (Phase.ENDED, {}, {"standbys": {0: Life.STARTING}}, Kind.IDLE),
    ],
)
def test_a_slot_without_a_worker_at_work_does_one_thing(
    phase: Phase, nodes: dict[str, int], more: dict[str, object], kind: Kind
) -> None:
    known = state(phase, nodes, **more)
    assert not_at_work(known, 0, known.alive) is kind


def test_a_node_that_has_not_joined_yet_spends_its_time_on_the_rendezvous() -> None:
    assert not_at_work(NEW, 0, frozenset()) is Kind.RENDEZVOUS


@dataclass
class Node:
    """One agent. All its workers make their steps together."""

    state: agent.AgentState
    began_at: float = 1000.0
    hung: tuple[int, float] = (0, 0.0)
    written: list[NodeLedger] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known: Timekeeping = start(self.state, self.began_at)

    def look(self, now: float, steps: int, stepped_at: float) -> None:
        assert self.state.crew is not None
        slots = self.state.crew.member.slots
        beats = [SlotProgress(slot, slot, 100 + slot, steps, stepped_at) for slot in slots]
        self.known, record = keep_time(self.known, self.state, beats, {}, self.hung, now)
        self.written += [record] if record is not None else []


def test_the_time_of_a_spare_that_trains_is_told_too_and_by_the_next_agent() -> None:
    (member,) = (whole := round(3, {"a": 2})).members
    its = crew(whole, replace(member, slots=(0, 3)))
    me = replace(ME, slots=(0, 1, 2, 3))
    at_work = replace(state(Phase.LIVE, {"a": 2}), me=me, crew=its)
    first = Node(at_work)
    for now in (1000.0, 1001.0, 1011.0):
        first.look(now, int(now - 1000.0), now)
    assert sorted(first.known.ledger.slots) == [0, 1, 3], "nobody needs the others"
    assert first.known.ledger.spent["productive"] == 2 * 10.0
    assert not first.written, "there may be a record of an earlier agent, which has not been read yet"
    kept = first.known.ledger.record("a", 1011.0)
    second = Node(at_work, 1020.0)
    second.known = find(second.known, kept)
    second.look(1021.0, 0, 0.0)
    assert second.known.ledger.slots[3].spent[Kind.PRODUCTIVE] == 10.0
    second.look(1022.0, 0, 0.0)
    assert [record.at for record in second.written] == [1021.0, 1022.0]
    assert find(second.known, second.written[-1]) == second.known, "its own record is nothing to go on from"


def test_workers_that_go_on_after_all_do_not_hang_until_the_round_ends() -> None:
    node = Node(replace(state(Phase.LIVE, {"a": 2, "b": 1}), crew=crew(round(3, {"a": 2, "b": 1}))))
    node.look(1001.0, 1, 1001.0)
    node.look(1010.0, 10, 1010.0)
    node.hung = (3, 1070.0)
    for now in (1070.0, 1075.0):
        node.look(now, 10, 1010.0)
    spent = node.known.ledger.spent
    assert (spent["productive"], spent["hung"]) == (2 * 9.0, 2 * 65.0)
    node.look(1080.5, 11, 1080.0)
    node.look(1090.0, 20, 1090.0)
    spent = node.known.ledger.spent
    assert (spent["productive"], spent["hung"]) == (2 * 18.5, 2 * 70.5)
