"""Another node holds copies of a node's shards, and the newest whole state is chosen."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.checkpoint.replication.replicas import Offer, WholeState, holders, newest_whole
from elasticd.core.checkpoint_names import age_of, folder_name

placements = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=24)  # the node of each rank


def held(nodes: list[str], name: str, round: int, step: int, *, replicated: bool = True) -> list[Offer]:
    """Return the offers of all nodes after a world has handed over a step."""
    at: dict[str, set[int]] = {}
    keeper = holders(nodes) if replicated else {}
    for rank, node in enumerate(nodes):
        at.setdefault(node, set()).add(rank)
        if node in keeper:
            at.setdefault(keeper[node], set()).add(rank)
    return [Offer(node, name, round, step, len(nodes), frozenset(ranks)) for node, ranks in at.items()]


@given(placements)
def test_every_node_is_held_by_one_other_and_holds_for_one(nodes):
    keeper = holders(nodes)
    if len(set(nodes)) == 1:
        assert not keeper
    else:
        assert keeper.keys() == set(nodes) and all(node != by for node, by in keeper.items())
        assert set(Counter(keeper.values()).values()) == {1}


@given(placements, st.data())
def test_any_one_node_may_be_lost(nodes, data):
    lost = data.draw(st.sampled_from(sorted(set(nodes))))
    left = [o for o in held(nodes, "s", 1, 7) if o.node != lost]
    choice = newest_whole(left)
    if len(set(nodes)) == 1:
        assert choice is None
    else:
        assert choice is not None and choice.step == 7
        assert all(lost not in some and some for some in choice.holders)


offers = st.lists(
    st.builds(
        lambda node, name, ranks: Offer(
            node, f"{name[0]}.{name[1]}.{name[2]}", name[0], name[1], name[2], frozenset(ranks)
        ),
        st.sampled_from("abc"),
        st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 3)),
        st.sets(st.integers(0, 2), max_size=3),
    ),
    max_size=10,
)


@given(offers, st.tuples(st.integers(0, 3), st.integers(0, 4)), st.randoms())
def test_the_chosen_state_is_the_newest_that_is_whole(offered, least, random):
    def whole(name: str) -> bool:
        some = [o for o in offered if o.name == name]
        return set(range(some[0].world)) <= frozenset().union(*(o.ranks for o in some))

    candidates = [o for o in offered if whole(o.name) and o.age >= least]
    choice = newest_whole(offered, least)
    shuffled = offered[:]
    random.shuffle(shuffled)
    assert newest_whole(shuffled, least) == choice
    if not candidates:
        assert choice is None
        return
    assert choice is not None and (choice.round, choice.step) == max(o.age for o in candidates)[:2]
    for rank, nodes in enumerate(choice.holders):
        assert set(nodes) == {o.node for o in offered if o.name == choice.name and rank in o.ranks}


@pytest.mark.parametrize("order", [(9, 10), (10, 9)])
def test_of_two_saves_of_one_step_the_later_is_newer(order):
    names = [folder_name(7, 2, "0000000a", save) for save in order]
    both = [offer for name in names for offer in held(["a", "b"], name, 2, 7)]
    newest, older = (folder_name(7, 2, "0000000a", save) for save in (10, 9))
    choice = newest_whole(both)
    assert choice is not None and choice.name == newest
    assert newest_whole((o for o in both if o.name == older), age_of(newest)) is None


@given(placements)
def test_a_half_handed_over_step_leaves_the_one_before(nodes):
    newer = [o for o in held(nodes, "new", 2, 8) if 0 not in o.ranks]
    choice = newest_whole([*held(nodes, "old", 2, 7), *newer])
    assert choice is not None and choice.name == "old"


def test_offers_that_contradict_each_other_are_not_believed():
    liars = [Offer("a", "s", 1, 7, 2, frozenset({0})), Offer("b", "s", 1, 8, 2, frozenset({1}))]
    assert newest_whole(liars) is None


def test_a_choice_goes_on_without_a_holder_for_as_long_as_it_is_whole():
    choice = WholeState("s", 1, 7, (("a", "b"), ("b",)))
    assert choice.without("a") == WholeState("s", 1, 7, (("b",), ("b",)))
    assert choice.without("b") is None
