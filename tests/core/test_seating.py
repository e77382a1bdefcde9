"""Forming worlds: who takes part, with which ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.core import seating, shortage
from elasticd.core.age import Age
from elasticd.core.facts import Limits, Member, Node, Phase, Quarantine, RankRange, UnitWithin
from elasticd.core.state_memory import StateMemory
from tests.core.build import NOW, node, round

ANY = Limits(1, 1000)


def ranks(members: tuple[Member, ...]) -> dict[str, list[int]]:
    return {m.node: [m.rank_of(s) for s in m.slots] for m in members}


def test_ranks_are_contiguous_within_a_node_and_follow_the_order_of_arrival() -> None:
    formed = seating.form([node("b", 2), node("a", 3)], None, ANY, (), NOW)
    assert ranks(formed) == {"b": [0, 1], "a": [2, 3, 4]}


def test_survivors_keep_their_order_and_newcomers_come_last() -> None:
    last = round(4, {"c": 1, "a": 1, "b": 1}, Phase.CLOSING)
    nodes = [node(n, 1, released=4) for n in ("new", "b", "c")]
    assert ranks(seating.form(nodes, last, ANY, (), NOW)) == {"c": [0], "b": [1], "new": [2]}


def test_where_places_are_few_those_come_first_that_hold_the_newest_state_and_then_those_that_were_in() -> (
    None
):
    last = round(4, {"a": 2, "b": 2}, Phase.CLOSING)
    nodes = [
        replace(node("a", 3, released=4), age=Age(4, 8), holders=(0, 1)),
        replace(node("b", 3, released=4), age=Age(4, 9), holders=(1,)),
        replace(node("new", 1), age=Age(2, 99), holders=(0,)),  # the node was left behind
    ]

    def chosen(places: int) -> dict[str, tuple[int, ...]]:
        return {m.node: m.slots for m in seating.form(nodes, last, Limits(1, places), (), NOW)}

    assert chosen(1) == {"b": (1,)}
    assert chosen(3) == {"a": (0, 1), "b": (1,)}
    assert chosen(4) == {"a": (0, 1), "b": (0, 1)}
    assert chosen(7) == {"a": (0, 1, 2), "b": (0, 1, 2), "new": (0,)}


def test_a_restarted_agent_is_a_newcomer() -> None:
    last = round(4, {"a": 1, "b": 1}, Phase.CLOSING)
    nodes = [node("a", 1, life_number=2), node("b", 1, released=4)]
    assert list(ranks(seating.form(nodes, last, ANY, (), NOW))) == ["b", "a"]


def test_a_world_is_cut_at_max_in_the_middle_of_a_node() -> None:
    formed = seating.form([node("a", 3), node("b", 3), node("c", 3)], None, Limits(1, 4), (), NOW)
    assert ranks(formed) == {"a": [0, 1, 2], "b": [3]}
    assert formed[1].slots == (0,)


def test_a_world_may_come_out_smaller_than_min_for_the_leader_to_judge() -> None:
    assert seating.form([node("a", 2)], None, Limits(5, 8), (), NOW).workers == 2
    assert seating.form([], None, Limits(5, 8), (), NOW) == ()


def test_a_quarantined_slot_is_left_out_until_its_time_has_come() -> None:
    out = (Quarantine("a", 1, NOW + 10, 1),)
    nodes = [node("a", 3), node("b", 1)]
    before = seating.form(nodes, None, ANY, out, NOW + 9.9)
    assert before[0].slots == (0, 2)
    assert ranks(before) == {"a": [0, 1], "b": [2]}
    assert seating.form(nodes, None, ANY, out, NOW + 10)[0].slots == (0, 1, 2)


def test_a_node_with_every_slot_in_quarantine_is_no_member() -> None:
    out = tuple(Quarantine("a", s, NOW + 10, 1) for s in range(2))
    assert ranks(seating.form([node("a", 2), node("b", 1)], None, ANY, out, NOW)) == {"b": [0]}


def test_a_quarantine_is_of_one_node_only() -> None:
    assert seating.usable_slots(node("b", 2), (Quarantine("a", 0, NOW + 10, 1),), NOW) == (0, 1)


def units(members: tuple[Member, ...], unit: int) -> list[list[str]]:
    """Return the nodes of each unit's workers, in rank order."""
    places = [m.node for m in members for _ in m.slots]
    return [places[i : i + unit] for i in range(0, len(places), unit)]


def test_a_world_has_whole_units_only_and_a_unit_is_on_one_node_where_it_fits() -> None:
    nodes = [node("a", 5), node("b", 4), node("c", 3)]
    formed = seating.form(nodes, None, Limits(4, 12, unit=4), (), NOW)
    assert units(formed, 4) == [["b"] * 4, ["a"] * 4, ["a", "c", "c", "c"]]
    within = seating.form(nodes, None, Limits(4, 12, unit=4, within=UnitWithin.NODE), (), NOW)
    assert units(within, 4) == [["a"] * 4, ["b"] * 4]


def test_a_unit_that_no_node_has_room_for_is_on_neighbouring_nodes() -> None:
    nodes = [node(name, 2) for name in "abcde"]
    formed = seating.form(nodes, None, Limits(4, 20, unit=4), (), NOW)
    assert units(formed, 4) == [["a", "a", "b", "b"], ["c", "c", "d", "d"]]
    assert seating.form(nodes, None, Limits(4, 20, unit=4, within=UnitWithin.NODE), (), NOW) == ()


def test_a_unit_that_lost_a_worker_waits_and_the_others_go_on() -> None:
    last = round(4, {"a": 4, "b": 4}, Phase.CLOSING)
    limits = Limits(4, 8, unit=4)
    left = [node("a", [0, 1, 3], released=4), node("b", 4, released=4)]
    assert units(seating.form(left, last, limits, (), NOW), 4) == [["b"] * 4]
    back = [node("a", 4, released=4), node("b", 4, released=4)]
    assert units(seating.form(back, last, limits, (), NOW), 4) == [["a"] * 4, ["b"] * 4]


def test_a_unit_that_is_whole_is_not_divided_to_complete_another() -> None:
    last = round(4, {"a": 4}, Phase.CLOSING)
    left = replace(node("a", [0, 2, 3], released=4), age=Age(4, 9), holders=(0, 2, 3))
    (member,) = seating.form([left], last, Limits(2, 4, unit=2), (), NOW)
    assert member.slots == (2, 3), "the worker of slot 0 waits for its unit"

    last = round(4, {"a": 2, "b": 2, "c": 2, "d": 2}, Phase.CLOSING)
    nodes = [node("a", 1, released=4), *(node(name, 2, released=4) for name in "bcd")]
    formed = seating.form(nodes, last, Limits(4, 8, unit=4), (), NOW)
    assert units(formed, 4) == [["c", "c", "d", "d"]]


def test_the_units_that_hold_the_newest_state_come_first() -> None:
    old = replace(node("a", 2), age=Age(4, 8), holders=(0, 1))
    new = replace(node("b", 2), age=Age(4, 9), holders=(1,))
    assert units(seating.form([old, new], None, Limits(2, 2, unit=2), (), NOW), 2) == [["b", "b"]]


def test_a_world_has_the_largest_of_the_sizes_that_are_listed() -> None:
    limits = Limits(2, 8, sizes=(2, 4, 8))
    sizes = [seating.form([node("a", n)], None, limits, (), NOW).workers for n in range(1, 11)]
    assert sizes == [0, 2, 2, 4, 4, 4, 4, 8, 8, 8]
    assert [n for n in range(10) if limits.allows(n)] == [2, 4, 8]
    assert (limits.least, replace(limits, min=3).least) == (2, 4)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"min": 3, "unit": 2}, "min is 3, which is no multiple of a unit of 2 workers"),
        ({"max": 7, "unit": 2}, "max is 7, which is no multiple of a unit of 2 workers"),
        ({"unit": 0}, "has no worker"),
        ({"sizes": (3,), "unit": 2}, "a size is 3"),
        ({"sizes": (4, 2)}, "do not ascend"),
        ({"sizes": (16,)}, "none of the sizes is between 2 and 8 workers"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(Limits(2, 8), **wrong)


def test_a_node_is_available_once_it_has_released_the_last_round_unless_it_drains() -> None:
    last = round(4, {"a": 1, "b": 1}, Phase.CLOSING)
    assert seating.available(node("new"), last)
    assert seating.available(node("a", released=4), last)
    assert not seating.available(node("a", released=3), last), "its workers of the round may still run"
    assert seating.available(node("a", released=0, life_number=2), last), "a new agent has no old workers"
    assert not seating.available(node("new", draining=True), last)
    assert not seating.available(node("new", draining=True), None)
    assert seating.available(node("a"), None)


names = st.sampled_from("abcdef")
nodes_ = st.lists(
    st.builds(
        node,
        names,
        st.lists(st.integers(0, 7), max_size=5, unique=True).map(sorted),
        life_number=st.integers(1, 2),
    ),
    max_size=6,
    unique_by=lambda n: n.name,
)
quarantines_ = st.lists(
    st.builds(Quarantine, names, st.integers(0, 7), st.floats(NOW - 10, NOW + 10), st.integers(1, 5)),
    max_size=6,
)
limits_ = st.builds(
    lambda least, more, unit, within: Limits(least * unit, (least + more) * unit, unit, within),
    st.integers(1, 6),
    st.integers(0, 12),
    st.sampled_from((1, 1, 2, 3, 4)),
    st.sampled_from(UnitWithin),
)


@given(st.lists(st.tuples(nodes_, limits_, quarantines_), min_size=1, max_size=6))
def test_after_any_history_ranks_are_dense_below_max_and_survivors_keep_their_order(
    history: list[tuple[list[Node], Limits, list[Quarantine]]],
) -> None:
    last = None
    for number, (nodes, limits, quarantines) in enumerate(history, start=1):
        formed = seating.form(nodes, last, limits, quarantines, NOW)
        assert formed == seating.form(nodes, last, limits, quarantines, NOW)
        all_ranks = [m.rank_of(s) for m in formed for s in m.slots]
        assert all_ranks == list(range(len(all_ranks)))
        usable = [len(seating.usable_slots(n, quarantines, NOW)) for n in nodes]
        if limits.within is UnitWithin.NODE:
            usable = [n - n % limits.unit for n in usable]
            assert not any(len(m.slots) % limits.unit for m in formed), "each unit is on one node"
        assert formed.workers == limits.largest(sum(usable)), "no smaller than it could be"
        by_name = {n.name: n for n in nodes}
        for m in formed:
            assert m.slots and set(m.slots) <= set(by_name[m.node].slots)
            assert m.incarnation == by_name[m.node].incarnation
            assert not [q for q in quarantines if q.node == m.node and q.slot in m.slots and q.until > NOW]
        if last is not None:
            _require_no_divided_unit(last.members, formed, nodes, limits, quarantines)
        if last is not None and limits.unit == 1:
            seats = [(m.node, m.incarnation) for m in last.members]
            now_at = [(m.node, m.incarnation) for m in formed]
            assert [s for s in now_at if s in seats] == [s for s in seats if s in now_at]
            assert now_at[: len([s for s in now_at if s in seats])] == [s for s in seats if s in now_at]
        last = replace(round(number, {}, Phase.CLOSING), members=formed)


spared_ = st.lists(
    st.builds(
        lambda node, most: replace(node, slots=tuple(reversed(node.slots)), most=most),
        st.builds(node, names, st.integers(0, 4), life_number=st.integers(1, 2)),
        st.sampled_from((0, 0, 0, 2)),
    ),
    max_size=6,
    unique_by=lambda n: n.name,
)


@settings(max_examples=300)
@given(spared_, spared_, limits_, limits_, quarantines_)
def test_where_there_is_a_place_for_all_the_world_is_the_one_that_merits_would_choose(
    before: list[Node], nodes: list[Node], then: Limits, limits: Limits, quarantines: list[Quarantine]
) -> None:
    last = replace(round(4, {}, Phase.CLOSING), members=seating.form(before, None, then, (), NOW))
    formed = seating.form(nodes, last, limits, quarantines, NOW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seating, "_are_all_in", lambda *anything: False)
        assert formed == seating.form(nodes, last, limits, quarantines, NOW)


@given(nodes_, nodes_)
def test_survivors_are_in_the_order_of_their_seats_and_newcomers_in_that_of_their_arrival(
    before: list[Node], nodes: list[Node]
) -> None:
    last = replace(round(4, {}, Phase.CLOSING), members=seating.form(before, None, ANY, (), NOW))
    seats = [(m.node, m.incarnation) for m in last.members]
    places = {place: number for number, place in enumerate(seats)}
    expected = sorted(nodes, key=lambda n: places.get((n.name, n.incarnation), len(seats)))
    ordered, found = seating.order(nodes, last)
    assert ordered == expected and found == [last.member(n.name, n.incarnation) for n in expected]
    assert seating.order(nodes, None) == (nodes, [None] * len(nodes))


@given(nodes_, limits_)
def test_the_rooms_of_many_nodes_are_the_sum_of_the_rooms_of_each(nodes: list[Node], limits: Limits) -> None:
    nodes = [replace(n, most=number % 3) for number, n in enumerate(nodes)]
    assert seating.rooms(nodes, limits) == sum(seating.room(n, limits, (), NOW) for n in nodes)


@pytest.mark.parametrize(
    ("sizes", "limits", "out"),
    [
        ({"a": 4}, Limits(1, 1), (RankRange(1, 4),)),
        ({"a": 2, "b": 2}, Limits(1, 3), (RankRange(3, 4),)),
        ({"a": 3, "b": 3}, Limits(2, 4, unit=2), (RankRange(4, 6),)),
        ({"a": 2, "b": 2, "c": 2}, Limits(1, 6, sizes=(1, 4)), (RankRange(4, 6),)),
        ({"a": 2, "b": 2}, Limits(1, 4), ()),
    ],
)
def test_a_smaller_world_leaves_out_the_last_ranks_or_units(
    sizes: dict[str, int], limits: Limits, out: tuple[RankRange, ...]
) -> None:
    nodes = [node(name, slots) for name, slots in sizes.items()]
    last = round(4, sizes)
    assert seating.left_out(nodes, last, limits, (), NOW) == out


@pytest.mark.parametrize(("memory", "out"), [(0, ()), (10, ()), (9, (RankRange(0, 2),))])
def test_a_worker_too_few_for_a_unit_keeps_the_state_if_there_is_memory(
    memory: int, out: tuple[RankRange, ...]
) -> None:
    stays = replace(node("a", 1), state=StateMemory(own=10, unit=2), memory=memory)
    last = round(4, {"a": 1, "b": 1})
    assert seating.left_out([stays], last, Limits(2, 2, unit=2), (), NOW) == out


def test_slots_in_quarantine_and_leaving_nodes_are_left_out_even_if_a_waiting_node_holds_a_state() -> None:
    last = round(4, {"a": 2, "b": 2, "c": 2})
    waits = replace(node("d", 1), ready=(0,), age=Age(4, 8), holders=(0,))
    quarantine = Quarantine("a", 0, NOW + 9, 1)
    out = seating.left_out([node("a"), node("c"), waits], last, Limits(1, 3), (quarantine,), NOW)
    assert out == (RankRange(0, 1), RankRange(2, 4))


def _require_no_divided_unit(
    before: tuple[Member, ...],
    formed: tuple[Member, ...],
    nodes: list[Node],
    limits: Limits,
    quarantines: list[Quarantine],
) -> None:
    """Require of each whole unit that all its workers continue, or none."""

    def places(members: tuple[Member, ...]) -> list[tuple[str, str, int]]:
        return [(m.node, m.incarnation, slot) for m in members for slot in m.slots]

    usable = {
        (n.name, n.incarnation, slot) for n in nodes for slot in seating.usable_slots(n, quarantines, NOW)
    }
    seated = places(before)
    for start in range(0, len(seated) - limits.unit + 1, limits.unit):
        unit = set(seated[start : start + limits.unit])
        if limits.within is UnitWithin.ANY or len({name for name, _, _ in unit}) == 1:
            assert not unit <= usable or len(unit & {*places(formed)}) in (0, limits.unit)


# ---------------------------------------------------------------- memory for a sharded state

GB = 10**9


def with_memory(name: str, slots: int, memory: int, state: StateMemory | None = None) -> Node:
    return replace(node(name, slots, released=4), memory=memory, state=state)


def sizes(nodes: list[Node], limits: Limits = ANY) -> dict[str, int]:
    return {m.node: len(m.slots) for m in seating.form(nodes, None, limits, (), NOW)}


@pytest.mark.parametrize(
    ("state", "workers", "each"),
    [
        (StateMemory(96), 4, 24),
        (StateMemory(96), 5, 20),
        (StateMemory(64, 32, 1), 4, 24),
        (StateMemory(64, 32, 2), 4, 32),
        (StateMemory(64, 32, 2), 2, 48),  # there is one other worker to keep a copy
        (StateMemory(64, 32, 2), 1, 64),
        (StateMemory(96, 48, 1, unit=2), 4, 48),  # each shard has a replica already
        (StateMemory(96, 48, 2, unit=2), 4, 60),
        (StateMemory(64, 32, 1, replicated=5), 4, 29),
        (StateMemory(96, 48, 0, unit=2), 3, 32),  # no whole units, so all workers hold one state together
    ],
)
def test_a_worker_holds_its_part_of_the_state_and_of_the_copies(
    state: StateMemory, workers: int, each: int
) -> None:
    assert state.of_each(workers) == each


def test_nodes_whose_workers_have_no_room_for_a_sharded_state_form_no_world() -> None:
    state = StateMemory(96 * GB)
    nodes = [with_memory(name, 1, 24 * GB, state) for name in "abc"]
    assert sizes(nodes) == {}
    assert shortage.find(nodes, seating.form_in_any_memory(nodes, None, ANY, (), NOW), ANY) == (
        3,
        4,
        96 * GB,
        24 * GB,
    )
    assert sizes([*nodes, with_memory("new", 1, 24 * GB)]) == {"a": 1, "b": 1, "c": 1, "new": 1}


def test_a_node_of_which_the_memory_is_not_known_has_room() -> None:
    nodes = [with_memory("a", 1, 24 * GB, StateMemory(96 * GB)), with_memory("b", 3, 0)]
    assert sizes(nodes) == {"a": 1, "b": 3}
    assert sizes([with_memory("a", 1, 0, StateMemory(96 * GB))]) == {"a": 1}


def test_a_node_with_too_little_memory_for_all_its_slots_takes_part_with_some() -> None:
    state = StateMemory(60 * GB)
    nodes = [with_memory("a", 1, 24 * GB, state), with_memory("b", 1, 24 * GB), with_memory("c", 8, 24 * GB)]
    assert sizes(nodes) == {"a": 1, "b": 1, "c": 1}
    assert sizes([*nodes[:2], with_memory("c", 8, 60 * GB)]) == {"a": 1, "b": 1, "c": 8}


@pytest.mark.parametrize(
    ("limits", "need"),
    [(Limits(1, 8), 5), (Limits(2, 8, 2), 6), (Limits(2, 8, sizes=(2, 8)), 8), (Limits(1, 3), 5)],
)
def test_the_workers_that_are_needed_make_a_world_that_the_limits_know(limits: Limits, need: int) -> None:
    nodes = [with_memory(name, 1, 20 * GB, StateMemory(96 * GB)) for name in "ab"]
    found = shortage.find(nodes, seating.form_in_any_memory(nodes, None, limits, (), NOW), limits)
    assert found is not None and (found.have, found.need) == (2, need)


def test_the_larger_world_has_room_beside_what_each_worker_has_whole() -> None:
    known = StateMemory(80 * GB, replicated=4 * GB)
    nodes = [with_memory("a", 1, 20 * GB, known), with_memory("b", 1, 20 * GB, StateMemory(84 * GB))]
    found = shortage.find(nodes, seating.form_in_any_memory(nodes, None, ANY, (), NOW), ANY)
    assert found == (2, 5, 88 * GB, 20 * GB)


def test_no_number_of_units_is_enough_where_a_unit_has_no_room() -> None:
    nodes = [with_memory(name, 2, 24 * GB, StateMemory(96 * GB, unit=2)) for name in "abcd"]
    limits = Limits(2, 8, 2)
    assert sizes(nodes, limits) == {}
    found = shortage.find(nodes, seating.form_in_any_memory(nodes, None, limits, (), NOW), limits)
    assert found == (8, 0, 384 * GB, 12 * GB)


def _state_memory(in_use: int, kept: int, redundancy: int, replicated: int) -> StateMemory:
    return StateMemory(in_use + kept, kept, redundancy, replicated=replicated)


@given(
    slots=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    memory=st.lists(st.integers(0, 40), min_size=5, max_size=5),
    state=st.builds(
        _state_memory, st.integers(0, 99), st.integers(0, 50), st.integers(0, 2), st.integers(0, 9)
    ),
    most=st.integers(1, 12),
)
def test_the_world_is_the_largest_of_those_with_room(
    slots: list[int], memory: list[int], state: StateMemory, most: int
) -> None:
    nodes = [with_memory(f"n{i}", n, memory[i], state) for i, n in enumerate(slots)]
    found = sizes(nodes, Limits(1, most))
    world = sum(found.values())
    for i in range(len(slots)):
        assert not memory[i] or found.get(f"n{i}", 0) * state.of_each(max(1, world)) <= memory[i]
    for workers in range(world + 1, min(sum(slots), most) + 1):
        each = state.of_each(workers) or 1
        room = sum(min(n, memory[i] // each) if memory[i] else n for i, n in enumerate(slots))
        assert room < workers
