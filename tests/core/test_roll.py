"""The roll that is updated event by event equals a roll that is made anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.core import seating
from elasticd.core.age import Age
from elasticd.core.facts import (
    Cause,
    Drained,
    Limits,
    Node,
    Phase,
    Quarantine,
    Report,
    Round,
    Spec,
    Stall,
    UnitWithin,
)
from elasticd.core.hang.judging import Allowance, Doing, Look, in_groups
from elasticd.core.leader.roll import NOBODY, SHOWN_MAX, Mark, ReceivedStall, Registered, Roll, Standing
from elasticd.core.page_layout import Fatal
from elasticd.core.persistent_map import PersistentMap
from tests.core.build import NOW, exit, life, node, report, round, spec

NAMES = [f"n{i}" for i in range(6)]
ENDED = replace(exit(0, 0, 1), raised=True)
PHASES = [Phase.LIVE, Phase.CLOSING, Phase.WAITING]  # of the same round, in order
EXITS = st.sampled_from(
    [(), (ENDED,), (replace(ENDED, fatal=Fatal.BAD_DATA), ENDED), (replace(ENDED, astray=7),)]
)
registered = st.builds(
    lambda name, life_number, released, draining, ready, most, told, seen_at: Registered(
        replace(
            node(name, 3, released=released, draining=draining, life_number=life_number, fenced=released - 1),
            ready=ready,
            holders=ready,
            age=Age(released, 9) if ready else None,
            most=most,
            told=told,
        ),
        100 + len(name),
        seen_at,
    ),
    st.sampled_from(NAMES),
    st.integers(1, 2),
    st.integers(3, 6),
    st.booleans(),
    st.sampled_from([(), (0,), (0, 1, 2)]),
    st.integers(0, 2),
    st.integers(0, 3),
    st.floats(0, 10),
)
reports = st.builds(
    lambda name, number, life_number, exits, flags: replace(
        report(name, number, *exits, life_number=life_number), **dict.fromkeys(flags, True)
    ),
    st.sampled_from(NAMES),
    st.integers(4, 6),
    st.integers(1, 2),
    EXITS,
    st.sets(st.sampled_from(["finished", "returned", "checkpointed", "broken"])),
)
rounds = st.builds(
    lambda number, count, phase, anew: replace(
        round(number, dict.fromkeys(NAMES[:count], 2), phase, closing=Cause.GREW), anew=anew
    ),
    st.integers(4, 6),
    st.integers(0, 5),
    st.sampled_from([Phase.WAITING, Phase.LIVE, Phase.CLOSING]),
    st.booleans(),
)
specs = st.builds(
    lambda inplace, drained: replace(spec(1, 99), inplace=inplace, drain=drained),
    st.booleans(),
    st.sampled_from([(), (Drained("n1", life("n1")),)]),
)


def _stalled(name: str, incarnation: str, number: int, look: Look) -> ReceivedStall:
    stall = Stall(name, incarnation, number, (look,), Allowance(1.0, 1.0, 1.0, 1.0, 1.0))
    return ReceivedStall(stall, NOW, in_groups(stall.looks))


stalls = st.builds(
    lambda name, life_number, number, doing: _stalled(
        name, life(name, life_number), number, Look(name, 0, 0, 7, 5.0, doing)
    ),
    st.sampled_from(NAMES),
    st.integers(1, 2),
    st.integers(4, 6),
    st.sampled_from([Doing.STOPPED, Doing.WAITING]),
)
phases = st.sampled_from([Phase.WAITING, Phase.LIVE, Phase.CLOSING])
changes = st.lists(
    registered | reports | stalls | rounds | phases | specs | st.sampled_from(NAMES), max_size=12
)


@given(specs, rounds, changes)
def test_what_follows_event_by_event_is_what_a_new_roll_shows(
    wanted: Spec, live: Round, changes: list[Registered | Report | ReceivedStall | Round | Phase | Spec | str]
) -> None:
    nodes: PersistentMap[Registered] = PersistentMap()
    told: PersistentMap[Report] = PersistentMap()
    still: PersistentMap[ReceivedStall] = PersistentMap()
    roll = Roll()
    for change in changes:
        match change:
            case Registered(there):
                nodes = nodes.updated({there.name: change})
            case Report(name):
                told = told.updated({name: change})
            case ReceivedStall(stall):
                still = still.updated({stall.node: change})
            case Round():
                live = change
            case Phase() if PHASES.index(change) >= PHASES.index(live.phase):
                live = replace(live, phase=change)  # with the same members
            case Spec():
                wanted = change
            case str():
                nodes = nodes.updated({change: None})
        roll = roll.follow(wanted, live, nodes, told, still)
        anew = Roll().follow(wanted, live, nodes, told, still)
        assert {m: dict(roll[m]) for m in Mark} == {m: dict(anew[m]) for m in Mark}
        assert {m: roll.first.get(m) for m in Mark} == {m: anew.first.get(m) for m in Mark}
        assert {age: dict(held) for age, held in roll.holders.items()} == _holders(nodes)
        assert roll.places == anew.places and roll.came_at >= anew.came_at
        assert {s: roll.standing.get(s, 0) for s in Standing} == _standing(live, nodes)
        assert roll.follow(wanted, live, nodes, told, still) is roll


def _holders(nodes: PersistentMap[Registered]) -> dict[Age, dict[str, tuple[int, ...]]]:
    held: dict[Age, dict[str, tuple[int, ...]]] = {}
    for name, known in nodes.items():
        if known.node.age is not None:
            held.setdefault(known.node.age, {})[name] = known.node.holders
    return held


def _standing(round: Round, nodes: PersistentMap[Registered]) -> dict[Standing, int]:
    there = [known.node for known in nodes.values()]
    draining = [node for node in there if node.draining]
    runs = round.phase in (Phase.LIVE, Phase.CLOSING)
    members = [n for n in there if not n.draining and runs and round.member(n.name, n.incarnation)]
    return {
        Standing.MEMBER: len(members),
        Standing.WAITING: len(there) - len(members) - len(draining),
        Standing.DRAINING: len(draining),
    }


limits_ = st.builds(
    lambda most, unit, within: Limits(unit, most * unit, unit, within),
    st.integers(1, 20),
    st.sampled_from((1, 1, 2, 3)),
    st.sampled_from(UnitWithin),
)


@given(specs, rounds, st.lists(registered, max_size=6, unique_by=lambda r: r.node.name), limits_)
def test_the_size_of_the_next_world_is_that_of_the_world_that_would_be_formed(
    wanted: Spec, live: Round, there: list[Registered], limits: Limits
) -> None:
    wanted = replace(wanted, limits=limits)
    quarantines = [Quarantine("n0", 0, NOW + 5, 1), Quarantine("n2", 1, NOW - 5, 1)]
    nodes = PersistentMap({r.node.name: r for r in there})
    roll = Roll().follow(wanted, live, nodes, PersistentMap(), PersistentMap())
    known = [r.node for r in there]
    candidates = seating.candidates(known, wanted, live, live=live.phase is Phase.LIVE)
    formed = seating.form(candidates, live, limits, quarantines, NOW)
    assert formed.workers == roll.world_without(quarantines, NOW)


def members_of(count: int, *gone: str) -> Roll:
    names = [f"node-{n}" for n in range(count)]
    there: dict[str, Node] = {name: node(name) for name in names if name not in gone}
    nodes = PersistentMap({name: Registered(each, 1, 0.0) for name, each in there.items()})
    return Roll().follow(spec(), round(5, dict.fromkeys(names, 2)), nodes, PersistentMap(), PersistentMap())


def test_names_come_in_the_order_of_ranks_and_of_many_only_some_are_shown() -> None:
    few = members_of(12, "node-11", "node-2", "node-7")
    assert few.names(Mark.MISSING) == ("node-2", "node-7", "node-11")
    assert few.some(Mark.MISSING) == (("node-2", "node-7", "node-11"), 0)
    shown, more = members_of(100).some(Mark.HOLDING)
    assert (len(set(shown)), more) == (SHOWN_MAX, 100 - SHOWN_MAX)
    assert few.some(Mark.HOLDING, but=Mark.HOLDING) == ((), 0)
    assert few[Mark.FAILED] is NOBODY or not few[Mark.FAILED]


@pytest.mark.parametrize(
    ("one", "counts"),
    [
        pytest.param(report("node-0", 5, exit()), True, id="a failure"),
        pytest.param(report("node-0", 4, exit()), False, id="an older round's"),
        pytest.param(report("node-0", 6, exit()), False, id="a newer round's"),
        pytest.param(report("other", 5, exit()), False, id="not a member's"),
        pytest.param(report("node-0", 5, exit(), life_number=2), False, id="another incarnation's"),
        pytest.param(report("node-0", 5, exit(code=0), finished=True), False, id="a success"),
    ],
)
def test_only_failures_of_the_round_s_members_count(one: Report, counts: bool) -> None:
    roll = members_of(2)
    assert roll.spec is not None and roll.round is not None
    roll = roll.follow(roll.spec, roll.round, roll.nodes, PersistentMap({one.node: one}), roll.stalls)
    assert roll.reports_of(Mark.FAILED) == [one] * counts
    assert roll.first.get(Mark.FAILED) == (one.failure if counts else None)


@pytest.mark.parametrize(("finished", "needed"), [("node-0", ["node-0", "node-1"]), ("node-1", ["node-0"])])
def test_of_missing_finished_members_only_the_host_of_the_store_is_needed(
    finished: str, needed: list[str]
) -> None:
    roll = members_of(3, "node-0", "node-1")
    assert roll.spec is not None and roll.round is not None
    told = PersistentMap({finished: report(finished, 5, finished=True)})
    roll = roll.follow(roll.spec, roll.round, roll.nodes, told, roll.stalls)
    assert sorted(m.node for m in roll.needed(Mark.MISSING)) == needed
