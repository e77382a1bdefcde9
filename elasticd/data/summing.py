"""The order in which the gradients of virtual ranks are added up.

Floating-point sums depend on the order. So the order is that of a binary tree over the virtual ranks,
whatever the world size, and a worker adds up whole subtrees only:

    ((0 + 1) + (2 + 3)) + (4 + 5)       six virtual ranks
    (0 + 1) | (2 + 3) | (4 + 5)         what three workers hand in
    (0 + 1), 2 | 3, (4 + 5)             what two workers hand in

A worker hands in at most about 2 log2(n) subtrees for n virtual ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SumPlan:
    """How to add up subtrees of neighbouring virtual ranks with a stack.

    The subtrees are pushed one by one. While the top two are the halves of one subtree, the upper is added to
    the lower. ``sums``: the number of additions after each push. ``left``: the subtrees left at the end; for
    a whole world it is one. ``height``: the greatest height of the stack after additions.
    """

    sums: tuple[int, ...]
    left: tuple[range, ...]
    height: int


def plan_sums(subtrees: Iterable[range], virtual_ranks: int) -> SumPlan:
    """Return the additions for contiguous subtrees of a tree over ``virtual_ranks``."""
    stack: list[range] = []
    sums: list[int] = []
    height = 0
    for subtree in subtrees:
        stack.append(subtree)
        count = 0
        while len(stack) > 1 and _are_halves(stack[-2], stack[-1], virtual_ranks):
            upper = stack.pop()
            stack[-1] = range(stack[-1].start, upper.stop)
            count += 1
        sums.append(count)
        height = max(height, len(stack))
    return SumPlan(tuple(sums), tuple(stack), height)


def _are_halves(left: range, right: range, virtual_ranks: int) -> bool:
    """Whether the two are the halves of one subtree.

    The left half's length is a power of two, and its start a multiple of twice the length. The right half may
    end early, at the end of the tree.
    """
    whole = 2 * len(left)
    end = min(left.start + whole, virtual_ranks)
    return whole & (whole - 1) == 0 and left.start % whole == 0 and right == range(left.stop, end)
