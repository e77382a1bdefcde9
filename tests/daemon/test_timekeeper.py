"""What slots are said to do, from a state made by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elasticd.core import agent
from elasticd.core.agent.state import Registration
from elasticd.core.facts import Limits, Phase, SlotProgress, Spec
from elasticd.core.ledger import Kind
from elasticd.core.lifecycle import Life
from elasticd.core.ports import Entry, Listing
from elasticd.daemon.config import Command, CommandKind, RunConfig
from elasticd.daemon.timekeeper import Timekeeper, not_at_work
from tests.core.build import crew, life, round

ME = agent.Identity("a", life("a"), "127.0.0.1", (0, 1), "host", 1)
NEW = agent.State(ME, Spec(Limits(2, 2), Limits(2, 2), "job.py", "f"), agent.AgentConfig(600.0), 0)


def state(phase: Phase, nodes: dict[str, int], **more: object) -> agent.State:
    seen = {"round": Entry("round", round(3, nodes, phase), 1, 2)}
    joined = replace(NEW, registration=Registration(joined=True), seen=seen)
    return replace(joined, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("phase", "nodes", "more", "kind"),
    [
        (Phase.WAITING, {}, {}, Kind.WAITING),
        (Phase.WAITING, {}, {"standbys": {0: Life.WAITING}}, Kind.WAITING),
        # Nobody waits for others who is not there yet.
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
    assert not_at_work(state(phase, nodes, **more), 0) is kind


def test_who_has_not_joined_yet_is_on_its_way() -> None:
    assert not_at_work(NEW, 0) is Kind.RENDEZVOUS


def test_the_time_of_a_spare_that_trains_is_told_too_and_by_the_next_agent() -> None:
    (member,) = (whole := round(3, {"a": 2})).members
    its = crew(whole, replace(member, slots=(0, 3)))
    me = replace(ME, slots=(0, 1, 2, 3))
    at_work = replace(state(Phase.LIVE, {"a": 2}), me=me, crew=its)
    heard: list[Any] = []

    def keeper(began_at: float) -> Timekeeper:
        return Timekeeper(
            RunConfig("job", "a", "127.0.0.1", Limits(2, 2), 4, Command(CommandKind.SCRIPT, "job.py"), "f"),
            cast(Any, SimpleNamespace(state=at_work)),
            cast(Any, SimpleNamespace(watch=lambda key, seen: heard.append(seen))),
            lambda slot, after: (),
            began_at,
        )

    first = keeper(1000.0)
    for now in (1000.0, 1001.0, 1011.0):
        steps = int(now - 1000.0)
        first.look([SlotProgress(slot, slot, 100 + slot, steps, now) for slot in (0, 3)], now)
    assert sorted(first.ledger.slots) == [0, 1, 3], "of those that nobody needs there is no time to tell"
    assert first.ledger.spent["productive"] == 2 * 10.0
    kept = first.ledger.record("a", 1011.0)
    second = keeper(1020.0)
    heard[-1](Listing((Entry("ledger/a", kept, 1, 2),), 1))
    second.look([SlotProgress(slot, slot, 200 + slot, 0, 0.0) for slot in (0, 3)], 1021.0)
    assert second.ledger.slots[3].spent[Kind.PRODUCTIVE] == 10.0


def test_workers_that_go_on_after_all_do_not_hang_until_the_round_ends() -> None:
    its = crew(round(3, {"a": 2, "b": 1}))
    at_work = replace(state(Phase.LIVE, {"a": 2, "b": 1}), crew=its)
    store = SimpleNamespace(watch=lambda key, seen: None)
    command = Command(CommandKind.SCRIPT, "job.py")
    keeper = Timekeeper(
        RunConfig("job", "a", "127.0.0.1", Limits(2, 2), 2, command, "f"),
        cast(Any, SimpleNamespace(state=at_work)),
        cast(Any, store),
        lambda slot, after: (),
        1000.0,
    )

    def look(now: float, steps: int, stepped_at: float) -> None:
        keeper.look([SlotProgress(slot, slot, 100 + slot, steps, stepped_at) for slot in (0, 1)], now)

    look(1001.0, 1, 1001.0)
    look(1010.0, 10, 1010.0)
    keeper.hung(3, 1070.0)
    for now in (1070.0, 1075.0):
        look(now, 10, 1010.0)
    spent = keeper.ledger.spent
    assert (spent["productive"], spent["hung"]) == (2 * 9.0, 2 * 65.0)
    look(1080.5, 11, 1080.0)
    look(1090.0, 20, 1090.0)
    spent = keeper.ledger.spent
    assert (spent["productive"], spent["hung"]) == (2 * 18.5, 2 * 70.5)
