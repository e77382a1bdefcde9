"""Which workers hand the state over if no worker that holds the state stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from elasticd.core import handover, seating
from elasticd.core.age import Age
from elasticd.core.facts import Member, Members, Node, Phase, RankRange, Round
from elasticd.core.leader.roll import Mark, Registered, Roll
from elasticd.core.persistent_map import PersistentMap
from tests.core.build import life, members, node, round, spec

LAST = round(4, {"a": 2}, Phase.CLOSING)
HEIRS = members({"b": 2})


def holding(name: str, *slots: int, step: int = 9, draining: bool = True, fenced: int = 0) -> Node:
    one = node(name, 2, released=4, draining=draining, fenced=fenced)
    return replace(one, ready=(0, 1), age=Age(4, step), holders=slots)


def _passing(last: Round, nodes: Mapping[str, Node], heirs: Members, unit: int = 1) -> Members:
    newest = max((n.age for n in nodes.values() if n.age is not None), default=None)
    return handover.members(last, nodes, heirs, newest, _parted(last, nodes), unit)


def _parted(last: Round, nodes: Mapping[str, Node]) -> PersistentMap[Member]:
    registered = {name: Registered(one, 1, 0.0) for name, one in nodes.items()}
    return Roll().follow(spec(), last, PersistentMap(registered), PersistentMap(), PersistentMap())[
        Mark.PARTED
    ]


def passing(*nodes: Node) -> tuple[Member, ...]:
    return _passing(LAST, {n.name: n for n in nodes}, HEIRS)


@pytest.mark.parametrize(
    "draining", [True, False], ids=["it knows that it leaves", "it has yet to hear of it"]
)
@pytest.mark.parametrize("slots", [(1,), (0, 1)])
def test_holders_give_the_state_to_all_heirs(draining: bool, slots: tuple[int, ...]) -> None:
    assert passing(node("b"), holding("a", *slots, draining=draining)) == (
        *HEIRS,
        Member("a", life("a"), slots, 2, 1),
    )


def test_of_a_sharded_model_all_leaving_nodes_give_their_parts() -> None:
    assert passing(node("b"), holding("a", 0, 1), holding("c", 0)) == (
        *HEIRS,
        Member("a", life("a"), (0, 1), 2, 1),
        Member("c", life("c"), (0,), 4, 2),
    )


def test_an_heir_that_holds_the_newest_state_needs_no_giver() -> None:
    assert passing(holding("b", 0, draining=False), holding("a", 0, 1)) == ()


def test_no_worker_gives_a_state_older_than_an_heir_s() -> None:
    assert passing(holding("b", 0, draining=False, step=10), holding("a", 0, 1)) == ()


def test_whose_workers_were_fenced_has_nothing_to_give() -> None:
    assert passing(node("b"), holding("a", 0, fenced=4)) == ()


def test_without_a_held_state_there_is_no_handover() -> None:
    assert passing(node("b"), node("a", released=4, draining=True)) == ()


def test_a_slot_that_is_left_out_gives_the_state_to_the_heirs_beside_it_on_its_node() -> None:
    """The straggler's worker is the last that holds the state. The node is in the round once."""
    heirs = Members((Member("a", life("a"), (0,), 0), Member("b", life("b"), (0, 1), 1, 1)))
    nodes = {n.name: n for n in (node("b"), holding("a", 1, draining=False))}
    passing = _passing(LAST, nodes, heirs)
    assert passing == (Member("b", life("b"), (0, 1), 0), Member("a", life("a"), (0, 1), 2, 1))


# ---------------------------------------------------------------- parts of a sharded model


def parts(name: str, *slots: int, agreed: int = 4, released: int = 4) -> Node:
    """Return a node of which each slot holds a part."""
    age = Age(agreed, 9)
    return replace(node(name, 2, released=released), ready=slots, age=age, holders=slots, sharded=True)


def giving(
    heirs: dict[str, int], *nodes: Node, out: int | None = None, unit: int = 1
) -> list[tuple[str, tuple[int, ...]]]:
    """Return which slots hand over, in a round of three nodes with two slots each. ``out``: ranks from this
    one on were to leave."""
    left_out = (RankRange(out, 6),) if out is not None else ()
    last = round(4, {"a": 2, "b": 2, "c": 2}, Phase.CLOSING, planned=out is not None)
    chosen = members(heirs)
    found = _passing(replace(last, left_out=left_out), {n.name: n for n in nodes}, chosen, unit)
    out_of = {(r, m.node) for m in found for r in m.slots} - {(r, m.node) for m in chosen for r in m.slots}
    return sorted((name, slot) for slot, name in out_of)


ALL = parts("a", 0, 1), parts("b", 0, 1), parts("c", 0, 1)


@pytest.mark.parametrize(
    "age", [Age(4, 8), Age(3, 9)], ids=["a commit behind", "its round ended before it agreed on the state"]
)
def test_all_that_may_have_a_part_of_the_newest_state_give_it(age: Age) -> None:
    behind = replace(parts("c", 0, 1), age=age)
    assert giving({"d": 2}, *ALL[:2], behind, node("d")) == [
        (name, slot) for name in ("a", "b", "c") for slot in (0, 1)
    ]


def test_an_heir_that_has_a_part_keeps_it() -> None:
    heir = replace(parts("c", 0, 1), age=Age(4, 8))
    assert giving({"c": 1}, *ALL[:2], heir) == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 1)]


def test_a_part_of_an_older_state_is_not_given() -> None:
    older = replace(parts("c", 0, 1), age=Age(3, 7))
    assert {name for name, _ in giving({"d": 2}, *ALL[:2], older, node("d"))} == {"a", "b"}


def test_a_worker_that_gave_its_part_at_the_last_commit_gives_nothing_more() -> None:
    assert giving({"a": 2}, *ALL, out=2) == []


def test_a_worker_that_should_have_stayed_and_is_left_out_gives_its_part() -> None:
    assert giving({"a": 1}, *ALL, out=2) == [("a", 1)]


def test_a_worker_asked_to_leave_before_its_world_formed_gives_its_part() -> None:
    entered, early = parts("a", 0, 1), parts("b", 0, 1, agreed=3)
    assert giving({"a": 2, "b": 2}, entered, early, parts("c", 0, 1, agreed=3), out=4) == [("c", 0), ("c", 1)]


def test_a_part_given_to_a_worker_that_has_ended_is_given_again() -> None:
    assert giving({"a": 1}, parts("a", 0), *ALL[1:], out=2) == [("b", 0), ("b", 1), ("c", 0), ("c", 1)]


def test_after_an_unplanned_end_all_parts_count() -> None:
    assert giving({"a": 2, "b": 1}, *ALL[:2]) == [("b", 1)]


def test_a_unit_that_is_whole_has_all_parts() -> None:
    assert giving({"a": 2, "b": 2}, *ALL[:2], parts("c", 0), unit=2) == []
    assert giving({"a": 1, "b": 1}, parts("a", 0), *ALL[1:2], unit=2) == [("b", 1)]


def test_a_worker_of_an_earlier_round_gives_nothing_and_neither_does_one_that_still_trains() -> None:
    assert giving({"a": 2, "b": 2}, *ALL[:2], parts("d", 0, 1)) == []
    assert giving({"a": 2, "b": 2}, *ALL[:2], parts("c", 0, 1, released=3)) == []


def test_after_a_round_that_never_began_to_train_workers_of_the_round_before_give_their_parts() -> None:
    """Round 4 had only workers of node a, and ended before they had agreed on the state."""
    last = round(4, {"a": 2}, Phase.CLOSING)
    heir, other = parts("a", 0, agreed=3), parts("c", 0, agreed=3)
    older = replace(parts("d", 0), age=Age(2, 7))
    found = _passing(last, {n.name: n for n in (heir, other, older)}, members({"a": 2}), unit=2)
    assert [(m.node, m.slots) for m in found] == [("a", (0, 1)), ("c", (0,))]


def test_a_worker_that_gave_before_a_handover_is_not_called_again() -> None:
    """Six nodes become four, and two before the round has ended. Only c and d have yet to give."""
    last = replace(
        round(4, dict.fromkeys("abcdef", 1), Phase.CLOSING, planned=True), left_out=(RankRange(4, 6),)
    )
    nodes = {name: replace(parts(name, 0), slots=(0,)) for name in "abcdef"}
    heirs = members({"a": 1, "b": 1})
    passing = _passing(last, nodes, heirs)
    assert [m.node for m in passing] == ["a", "b", "c", "d"]
    passed = round(5, {}, Phase.CLOSING, planned=True)
    passed = replace(passed, members=passing, handover=True, left_out=seating.ranks_without(passing, heirs))
    nodes |= {m.node: replace(nodes[m.node], released=5) for m in passing}
    assert _passing(passed, nodes, heirs) == ()


def test_a_planned_end_before_its_round_began_calls_nobody_of_an_earlier_round() -> None:
    last = replace(
        round(5, {"a": 1, "b": 1, "c": 1}, Phase.CLOSING, planned=True), left_out=(RankRange(2, 3),)
    )
    nodes = {name: replace(parts(name, 0, agreed=4, released=5), slots=(0,)) for name in "abc"}
    nodes["d"] = replace(parts("d", 0, agreed=4, released=4), slots=(0,), draining=True)
    assert [m.node for m in _passing(last, nodes, members({"a": 1, "b": 1}))] == ["a", "b", "c"]


def test_parts_that_make_no_whole_state_are_passed_on_once() -> None:
    """Workers of a unit have died, and the parts of the others are not enough. The next round begins without
    a state."""
    heirs = members({"b": 2})
    done = round(4, {"b": 2, "a": 2}, Phase.CLOSING, planned=True)
    done = replace(done, handover=True, left_out=(RankRange(2, 4),))
    waits = replace(node("b", 2, released=4), ready=(0, 1))
    assert _passing(done, {"a": parts("a", 0, 1), "b": waits}, heirs) == ()
    one_has_died = replace(waits, ready=(0,))
    assert _passing(done, {"a": parts("a", 0, 1), "b": one_has_died}, heirs) != ()
