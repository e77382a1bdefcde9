"""What an agent and a leader read of a round whose members are in parts. Run with the real and the simulated
store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from elasticd.core import round_parts
from elasticd.core.facts import Cause, Phase, Round
from elasticd.core.ports import Delete, Listing, Put, Seen, Write
from elasticd.core.round_parts import PartSizes
from elasticd.daemon.round_watch import RoundWatch
from tests.core.build import life, round

from .conftest import Harness, Inbox
from .test_store import apply, entries

SIZES = PartSizes(members=3)
NAMES = [f"n{i}" for i in range(20)]


def of(number: int, names: list[str] = NAMES, phase: Phase = Phase.LIVE) -> Round:
    return round(number, dict.fromkeys(names, 2), phase, closing=Cause.GREW)


def writes(whole: Round, *, parts: bool = True) -> tuple[Write, ...]:
    record = round_parts.record_of(whole, SIZES)
    puts = round_parts.parts_of(whole, record)
    return (*(puts if parts else ()), Put("round", record))


def rounds(seen: Inbox) -> list[Round]:
    return [e.fact for e in entries(seen) if isinstance(e.fact, Round)]


def follow(harness: Harness, agent: str, node: str | None = None) -> tuple[Inbox, RoundWatch]:
    seen = harness.inbox()
    return seen, RoundWatch(harness.store(agent), seen, node)


def test_the_leader_reads_all_members_and_an_agent_its_own_seat_and_the_size(harness: Harness) -> None:
    whole = of(5)
    all_of_it, _ = follow(harness, "leader")
    seats = {name: follow(harness, "agents", name)[0] for name in NAMES[:4]}
    applied = apply(harness, "leader", *writes(whole))
    harness.until(lambda: all(rounds(seen) for seen in (all_of_it, *seats.values())))
    assert replace(rounds(all_of_it)[0], extent=None) == whole
    for name, seen in seats.items():
        mine = rounds(seen)[0]
        assert mine.member(name, life(name)) == whole.member(name, life(name))
        assert (mine.nodes, mine.world_size) == (20, 40) and len(mine.members) < 20
    assert [e.revision for e in entries(all_of_it)] == [applied.revision]


def test_parts_are_read_once_for_all_phases_of_a_round(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    store = harness.store("a")
    watch = store.watch

    def noted(key: str, seen: Callable[[Seen], None], *, prefix: bool = False) -> Callable[[], None]:
        asked.append(key)
        return watch(key, seen, prefix=prefix)

    monkeypatch.setattr(store, "watch", noted)
    seen, _ = follow(harness, "a", "n3")
    apply(harness, "b", *writes(of(5)))
    harness.until(lambda: rounds(seen))
    apply(harness, "b", *writes(of(5, phase=Phase.CLOSING), parts=False))
    harness.until(lambda: rounds(seen)[-1].phase is Phase.CLOSING)
    assert rounds(seen)[-1].member("n3", life("n3")) is not None
    assert [key.partition("/")[0] for key in asked] == ["round", "members"]


def test_a_round_whose_parts_are_missing_is_not_delivered_and_the_next_one_is(
    harness: Harness,
) -> None:
    seen, _ = follow(harness, "a", "n3")
    all_of_it, _ = follow(harness, "b")
    apply(harness, "c", *writes(of(5), parts=False))
    later = apply(harness, "c", Delete(round_parts.folder_of(5), prefix=True), *writes(of(6)))
    harness.until(lambda: rounds(seen) and rounds(all_of_it))
    for told in (seen, all_of_it):
        assert [r.number for r in rounds(told)] == [6]
        assert entries(told)[-1].revision == later.revision


def test_small_rounds_large_rounds_and_no_round_follow_each_other(harness: Harness) -> None:
    seen, watch = follow(harness, "a", "n0")
    harness.until(lambda: seen)
    assert isinstance(seen[0], Listing) and not seen[0].entries
    for number, names in ((1, NAMES[:2]), (2, NAMES), (3, NAMES[:1]), (4, NAMES[:9])):
        apply(harness, "b", *writes(of(number, names)))
        harness.until(lambda: number in [r.number for r in rounds(seen)])  # noqa: B023
        assert rounds(seen)[-1].nodes == len(names)
    apply(harness, "b", Delete("round"))
    harness.until(lambda: entries(seen)[-1].fact is None)
    watch.end()
    other, _ = follow(harness, "a", "n0")
    apply(harness, "b", *writes(of(7)))
    harness.until(lambda: rounds(other))
    assert rounds(seen)[-1].number == 4
