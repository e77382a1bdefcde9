"""Forming worlds: who takes part, with which ranks."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elasticd.core import world
from elasticd.core.age import Age
from elasticd.core.facts import Limits, Member, Node, Phase, Quarantine
from tests.core.build import NOW, node, round

ANY = Limits(1, 1000)


def ranks(members: tuple[Member, ...]) -> dict[str, list[int]]:
    return {m.node: [m.rank_of(s) for s in m.slots] for m in members}


def test_ranks_are_contiguous_within_a_node_and_follow_the_order_of_arrival() -> None:
    formed = world.form([node("b", 2), node("a", 3)], None, ANY, (), NOW)
    assert ranks(formed) == {"b": [0, 1], "a": [2, 3, 4]}


def test_survivors_keep_their_order_and_newcomers_come_last() -> None:
    last = round(4, {"c": 1, "a": 1, "b": 1}, Phase.CLOSING)
    nodes = [node(n, 1, released=4) for n in ("new", "b", "c")]
    assert ranks(world.form(nodes, last, ANY, (), NOW)) == {"c": [0], "b": [1], "new": [2]}


def test_where_places_are_few_those_come_first_that_hold_the_newest_state_and_then_those_that_were_in() -> (
    None
):
    last = round(4, {"a": 2, "b": 2}, Phase.CLOSING)
    nodes = [
        replace(node("a", 3, released=4), age=Age(4, 8), holders=(0, 1)),
        replace(node("b", 3, released=4), age=Age(4, 9), holders=(1,)),
        replace(node("new", 1), age=Age(2, 99), holders=(0,)),  # it was left behind
    ]

    def chosen(places: int) -> dict[str, tuple[int, ...]]:
        return {m.node: m.slots for m in world.form(nodes, last, Limits(1, places), (), NOW)}

    assert chosen(1) == {"b": (1,)}
    assert chosen(3) == {"a": (0, 1), "b": (1,)}
    assert chosen(4) == {"a": (0, 1), "b": (0, 1)}
    assert chosen(7) == {"a": (0, 1, 2), "b": (0, 1, 2), "new": (0,)}


def test_a_restarted_agent_is_a_newcomer() -> None:
    last = round(4, {"a": 1, "b": 1}, Phase.CLOSING)
    nodes = [node("a", 1, life_number=2), node("b", 1, released=4)]
    assert list(ranks(world.form(nodes, last, ANY, (), NOW))) == ["b", "a"]


def test_a_world_is_cut_at_max_in_the_middle_of_a_node() -> None:
    formed = world.form([node("a", 3), node("b", 3), node("c", 3)], None, Limits(1, 4), (), NOW)
    assert ranks(formed) == {"a": [0, 1, 2], "b": [3]}
    assert formed[1].slots == (0,)


def test_a_world_may_come_out_smaller_than_min_for_the_leader_to_judge() -> None:
    assert world.size(world.form([node("a", 2)], None, Limits(5, 8), (), NOW)) == 2
    assert world.form([], None, Limits(5, 8), (), NOW) == ()


def test_a_quarantined_slot_is_left_out_until_its_time_has_come() -> None:
    out = (Quarantine("a", 1, NOW + 10, 1),)
    nodes = [node("a", 3), node("b", 1)]
    before = world.form(nodes, None, ANY, out, NOW + 9.9)
    assert before[0].slots == (0, 2)
    assert ranks(before) == {"a": [0, 1], "b": [2]}
    assert world.form(nodes, None, ANY, out, NOW + 10)[0].slots == (0, 1, 2)


def test_a_node_with_every_slot_in_quarantine_is_no_member() -> None:
    out = tuple(Quarantine("a", s, NOW + 10, 1) for s in range(2))
    assert ranks(world.form([node("a", 2), node("b", 1)], None, ANY, out, NOW)) == {"b": [0]}


def test_a_quarantine_is_of_one_node_only() -> None:
    assert world.usable_slots(node("b", 2), (Quarantine("a", 0, NOW + 10, 1),), NOW) == (0, 1)


def test_a_node_is_available_once_it_has_released_the_last_round_unless_it_drains() -> None:
    last = round(4, {"a": 1, "b": 1}, Phase.CLOSING)
    assert world.available(node("new"), last)
    assert world.available(node("a", released=4), last)
    assert not world.available(node("a", released=3), last), "its workers of the round may still run"
    assert world.available(node("a", released=0, life_number=2), last), "a new agent has no old workers"
    assert not world.available(node("new", draining=True), last)
    assert not world.available(node("new", draining=True), None)
    assert world.available(node("a"), None)


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
limits_ = st.tuples(st.integers(1, 6), st.integers(0, 12)).map(lambda p: Limits(p[0], p[0] + p[1]))


@given(st.lists(st.tuples(nodes_, limits_, quarantines_), min_size=1, max_size=6))
def test_whatever_the_history_a_world_is_dense_within_max_and_keeps_its_survivors_in_order(
    history: list[tuple[list[Node], Limits, list[Quarantine]]],
) -> None:
    last = None
    for number, (nodes, limits, quarantines) in enumerate(history, start=1):
        formed = world.form(nodes, last, limits, quarantines, NOW)
        assert formed == world.form(nodes, last, limits, quarantines, NOW)
        all_ranks = [m.rank_of(s) for m in formed for s in m.slots]
        assert all_ranks == list(range(len(all_ranks)))
        assert world.size(formed) == min(
            limits.max, sum(len(world.usable_slots(n, quarantines, NOW)) for n in nodes)
        ), "no smaller than it could be"
        by_name = {n.name: n for n in nodes}
        for m in formed:
            assert m.slots and set(m.slots) <= set(by_name[m.node].slots)
            assert m.incarnation == by_name[m.node].incarnation
            assert not [q for q in quarantines if q.node == m.node and q.slot in m.slots and q.until > NOW]
        if last is not None:
            seats = [(m.node, m.incarnation) for m in last.members]
            now_at = [(m.node, m.incarnation) for m in formed]
            assert [s for s in now_at if s in seats] == [s for s in seats if s in now_at]
            assert now_at[: len([s for s in now_at if s in seats])] == [s for s in seats if s in now_at]
        last = replace(round(number, {}, Phase.CLOSING), members=formed)
