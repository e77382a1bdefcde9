"""Who passes the state on where nobody who holds it stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd.core import handover
from elasticd.core.age import Age
from elasticd.core.facts import Member, Node, Phase
from tests.core.build import life, members, node, round

LAST = round(4, {"a": 2}, Phase.CLOSING)
HEIRS = members({"b": 2})


def holding(name: str, *slots: int, step: int = 9, draining: bool = True, fenced: int = 0) -> Node:
    one = node(name, 2, released=4, draining=draining, fenced=fenced)
    return replace(one, ready=(0, 1), age=Age(4, step), holders=slots)


def passing(*nodes: Node) -> tuple[Member, ...]:
    return handover.members(LAST, {n.name: n for n in nodes}, HEIRS)


@pytest.mark.parametrize(
    "draining", [True, False], ids=["it knows that it leaves", "it has yet to hear of it"]
)
@pytest.mark.parametrize("slots", [(1,), (0, 1)])
def test_those_that_hold_the_state_give_it_to_all_heirs(draining: bool, slots: tuple[int, ...]) -> None:
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


def test_an_heir_that_holds_the_newest_state_needs_nobody() -> None:
    assert passing(holding("b", 0, draining=False), holding("a", 0, 1)) == ()


def test_nobody_gives_what_is_older_than_what_an_heir_has() -> None:
    assert passing(holding("b", 0, draining=False, step=10), holding("a", 0, 1)) == ()


def test_whose_workers_were_fenced_has_nothing_to_give() -> None:
    assert passing(node("b"), holding("a", 0, fenced=4)) == ()


def test_where_nobody_holds_anything_nothing_is_passed_on() -> None:
    assert passing(node("b"), node("a", released=4, draining=True)) == ()


def test_a_slot_that_is_left_out_gives_the_state_to_the_heirs_beside_it_on_its_node() -> None:
    """Its straggler was the last to hold the state. The node is in the round once."""
    heirs = (Member("a", life("a"), (0,), 0), Member("b", life("b"), (0, 1), 1, 1))
    nodes = {n.name: n for n in (node("b"), holding("a", 1, draining=False))}
    passing = handover.members(LAST, nodes, heirs)
    assert passing == (Member("b", life("b"), (0, 1), 0), Member("a", life("a"), (0, 1), 2, 1))
