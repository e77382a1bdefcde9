"""The gradients of virtual ranks are added up in one order, whichever workers have them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticd.data.dealing import deal
from elasticd.data.summing import plan_sums


def tree(first: int, end: int) -> str:
    """Add up in the simplest way: cut at the largest power of two, and add up both parts."""
    if end - first == 1:
        return str(first)
    half = 1
    while half * 2 < end - first:
        half *= 2
    return f"({tree(first, first + half)}+{tree(first + half, end)})"


def added_up(parts: list[tuple[range, str]], virtual_ranks: int) -> list[str]:
    pile: list[str] = []
    how = plan_sums([subtree for subtree, _ in parts], virtual_ranks)
    for (_, text), sums in zip(parts, how.sums, strict=True):
        pile.append(text)
        for _ in range(sums):
            upper = pile.pop()
            pile[-1] = f"({pile[-1]}+{upper})"
    assert len(pile) == len(how.left)
    return pile


def subtrees_of(block: range, virtual_ranks: int) -> tuple[range, ...]:
    """Return the sums that the worker with this block of virtual ranks sends."""
    return plan_sums((range(v, v + 1) for v in block), virtual_ranks).left


@given(st.integers(1, 70), st.integers(1, 80))
def test_in_a_world_of_any_size_the_sum_is_that_of_one_tree(virtual_ranks: int, world: int) -> None:
    handed_in: list[tuple[range, str]] = []
    for block in deal(virtual_ranks, world):
        leaves = [(range(v, v + 1), str(v)) for v in block]
        mine = subtrees_of(block, virtual_ranks)
        handed_in += zip(mine, added_up(leaves, virtual_ranks), strict=True)
    assert added_up(handed_in, virtual_ranks) == [tree(0, virtual_ranks)]


@given(st.integers(1, 200), st.data())
def test_a_worker_hands_in_and_holds_few(virtual_ranks: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, virtual_ranks - 1))
    block = range(first, data.draw(st.integers(first + 1, virtual_ranks)))
    plan = plan_sums((range(v, v + 1) for v in block), virtual_ranks)
    assert [v for subtree in plan.left for v in subtree] == list(block)
    assert len(plan.left) <= plan.height <= 2 * len(block).bit_length()


def test_one_virtual_rank_for_each_worker_is_handed_in_as_it_is() -> None:
    assert subtrees_of(range(3, 4), 8) == (range(3, 4),)
    assert subtrees_of(range(4, 8), 8) == (range(4, 8),)
    assert subtrees_of(range(3, 8), 8) == (range(3, 4), range(4, 8))
    assert subtrees_of(range(4, 7), 7) == (range(4, 7),), "where the tree ends, a half may be short"
    assert subtrees_of(range(0), 8) == ()
