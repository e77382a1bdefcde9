"""When the timekeeper reads the workers' pages, and which round it is told to count as hung."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from elasticd.core import agent
from elasticd.core.facts import Hang, Limits, Phase, SlotProgress, Spec
from elasticd.core.hang.hang_messages import HangChanged
from elasticd.core.hang.judging import Doing, Look, Patience, Verdict, Why
from elasticd.core.lifecycle import Life
from elasticd.core.ports import Entry
from elasticd.daemon.hangs import Hangs
from elasticd.daemon.timekeeper import LOOK_S, Timekeeper
from tests.core.build import crew, life, round

ME = agent.Identity("a", life("a"), "127.0.0.1", (0, 1), "host", 1)
NEW = agent.AgentState(ME, Spec(Limits(2, 2), Limits(2, 2), "job.py", "f"), agent.AgentConfig(600.0), 0)


class Pages:
    def __init__(self) -> None:
        self.reads = 0

    def progress(self, round: int) -> tuple[SlotProgress, ...]:
        self.reads += 1
        return tuple(SlotProgress(slot, slot, 100 + slot, 5, 999.0) for slot in (0, 1))


def test_the_pages_are_read_when_what_the_ledger_depends_on_changes_and_by_the_timer() -> None:
    pages = Pages()
    whole = round(3, {"a": 2})
    state = replace(NEW, crew=crew(whole), seen={"round": Entry("round", whole, 1, 2)})
    keeper = Timekeeper(state, 1000.0, pages.progress, lambda slot, after: (999.0,))
    keeper.attend(state, (0, 0.0), 1000.0)
    assert pages.reads == 1
    # events that do not concern the timekeeper: the lease is kept, reports are written, other keys change
    for n in range(100):
        state = replace(state, etcd=replace(state.etcd, lease_until=1005.0 + n))
        state = replace(state, seen={**state.seen, "leader": Entry("leader", None, n, n)})
        keeper.attend(state, (0, 0.0), 1000.0 + n / 1000)
    assert pages.reads == 1
    assert state.crew is not None
    for changed in (
        replace(state, crew=replace(state.crew, workers={0: Life.TRAINING, 1: Life.FAILED})),
        replace(state, standbys={1: Life.STARTING}),
        replace(state, seen={"round": Entry("round", replace(whole, phase=Phase.CLOSING), 1, 3)}),
    ):
        before = pages.reads
        keeper.attend(changed, (0, 0.0), 1000.2)
        assert pages.reads == before + 1
        keeper.attend(changed, (0, 0.0), 1000.2)
        assert pages.reads == before + 1
    before = pages.reads
    keeper.attend(changed, (3, 1000.3), 1000.3)
    assert pages.reads == before + 1, "the round hangs"
    keeper.attend(changed, (3, 1000.3), 1000.3 + LOOK_S)
    assert pages.reads == before + 2, "the time has come"


def test_a_round_that_the_leader_finds_to_hang_counts_as_hung_on_every_node() -> None:
    nothing = SimpleNamespace(now=lambda: 50.0, steps=lambda known: ())
    hangs = Hangs(Patience(), cast(Any, nothing), cast(Any, None))
    there = Verdict(Why.ASLEEP, (Look("b", 0, 2, 100, 60.0, Doing.ASLEEP, "job.py:7"),))
    hangs.handle(HangChanged(Hang(3, there, asks=True)), NEW, 1000.0, lambda reason: None)
    assert hangs.hung == (0, 0.0), "the leader only asks"
    hangs.handle(HangChanged(Hang(3, there)), NEW, 1001.0, lambda reason: None)
    assert hangs.hung == (3, 1001.0)
    hangs.handle(HangChanged(None), NEW, 1002.0, lambda reason: None)
    assert hangs.hung == (3, 1001.0)
