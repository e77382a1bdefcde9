"""When the leader concludes from what nodes tell of workers that stand still."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elasticd.core.facts import Cause, Hang, Phase, Stall
from elasticd.core.hang import Doing, Look, Patience, Why, allowance
from elasticd.core.ports import Changes, Entry, Put
from elasticd.daemon.stalls import Stalls
from tests.core.build import node, round, spec, view

ALLOWED = allowance([0.1] * 10, 10, Patience())


class Leader:
    """Of a round of two nodes, each with one worker."""

    def __init__(self, phase: Phase, *, released: bool) -> None:
        self.round = round(5, {"a": 1, "b": 1}, phase, closing=Cause.GREW, planned=True)
        self.written: list[Any] = []
        self.watches: dict[str, Any] = {}
        nodes = [node("a", 1, released=5 if released else 4), node("b", 1, released=4)]
        driver = SimpleNamespace(
            state=SimpleNamespace(leads=Entry("leader", None, 1, 1), round=self.round),
            view=view(spec(), self.round, nodes),
        )
        store = SimpleNamespace(watch=self.watch, transact=lambda _, writes, __: self.written.extend(writes))
        self.stalls = Stalls(driver, store)  # type: ignore[arg-type]
        self.stalls.lead(0.0)

    def watch(self, key: str, seen: Any, **how: Any) -> Any:
        self.watches[key] = seen
        return lambda: None

    def hears_of_b(self, doing: Doing, still_s: float) -> None:
        assert ALLOWED is not None
        look = Look("b", 0, 1, 70, still_s, doing, "job.py:7")
        stall = Stall("b", self.round.members[1].incarnation, 5, (look,), ALLOWED)
        self.watches["stalls/"](Changes((Entry("stalls/b", stall, 2, 2),)))
        self.stalls.lead(0.0)

    @property
    def verdicts(self) -> list[Hang]:
        return [write.fact for write in self.written if isinstance(write, Put)]


@pytest.mark.parametrize("phase", [Phase.LIVE, Phase.CLOSING])
def test_one_that_does_not_leave_its_round_is_judged_by_those_that_have_not_left_it(phase: Phase) -> None:
    leader = Leader(phase, released=True)
    leader.hears_of_b(Doing.ASLEEP, 3599.0)
    assert not leader.verdicts
    leader.hears_of_b(Doing.ASLEEP, 3601.0)
    (hang,) = leader.verdicts
    assert (hang.verdict.why, hang.asks) == (Why.ASLEEP, False)


def test_only_who_is_stopped_is_judged_while_a_node_has_not_told() -> None:
    leader = Leader(Phase.LIVE, released=False)
    leader.hears_of_b(Doing.ASLEEP, 3601.0)
    assert not leader.verdicts
    leader.hears_of_b(Doing.STOPPED, 10.0)
    (hang,) = leader.verdicts
    assert hang.asks
