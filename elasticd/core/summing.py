"""The one order in which the gradients of virtual ranks are added up.

Adding floating-point numbers in another order gives another sum. So the order is that of a binary
tree over the virtual ranks, whatever the world; a worker adds only what is a whole subtree:

    ((0 + 1) + (2 + 3)) + (4 + 5)       six virtual ranks
    (0 + 1) | (2 + 3) | (4 + 5)         what three workers hand in
    (0 + 1), 2 | 3, (4 + 5)             what two workers hand in

So a worker hands in no more than about twice the logarithm of how many virtual ranks it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pile:
    """Subtrees of neighbouring virtual ranks are laid on a pile one by one, and the topmost two are
    added up for as long as they are the two halves of a subtree, the upper one to the lower.

    ``sums``: how often, after each was laid there. ``left``: what the pile is in the end; of a whole
    world it is one. ``height``: the most that lies there at once, of those that were added to nothing.
    """

    sums: tuple[int, ...]
    left: tuple[range, ...]
    height: int


def pile_up(subtrees: Iterable[range], virtual_ranks: int) -> Pile:
    """Of a tree over so many virtual ranks. The subtrees follow each other."""
    pile: list[range] = []
    sums: list[int] = []
    height = 0
    for subtree in subtrees:
        pile.append(subtree)
        count = 0
        while len(pile) > 1 and _are_halves(pile[-2], pile[-1], virtual_ranks):
            upper = pile.pop()
            pile[-1] = range(pile[-1].start, upper.stop)
            count += 1
        sums.append(count)
        height = max(height, len(pile))
    return Pile(tuple(sums), tuple(pile), height)


def _are_halves(left: range, right: range, virtual_ranks: int) -> bool:
    """The left half is a power of two, and starts at a multiple of twice that; the right one may end
    early where the tree does."""
    whole = 2 * len(left)
    end = min(left.start + whole, virtual_ranks)
    return whole & (whole - 1) == 0 and left.start % whole == 0 and right == range(left.stop, end)
