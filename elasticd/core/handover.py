"""Where all who hold the state leave at once: who comes after them, and who passes it on to these.

Workers that keep their process have the state in memory. While one of them stays in the job, whoever
joins gets it from there. If all of them are to leave, their round lives on until others are ready; then
a round that makes no step takes the state over: all the heirs, and one of those that leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from elasticd.core import world
from elasticd.core.facts import Member, Node, Round


def may_come(round: Round, nodes: Iterable[Node]) -> bool:
    """Whether there are nodes that could take over, once their workers are ready."""
    return any(n.slots and not n.draining and not round.member(n.name, n.incarnation) for n in nodes)


def members(round: Round, nodes: Mapping[str, Node], heirs: Sequence[Member]) -> tuple[Member, ...]:
    """Those of the round that hands over, before the heirs train; none if there is nothing to hand over.
    The one that gives comes last, since the first hosts the store. It may not know yet that it is to
    leave. ``round``: the last, which is over."""
    holding = world.newest_holders(nodes.values())
    if any(set(heir.slots) & set(holding.get(heir.node, ())) for heir in heirs):
        return ()
    rank = sum(len(heir.slots) for heir in heirs)
    for name, slots in holding.items():
        node = nodes[name]
        member = round.member(name, node.incarnation)
        there = member is None or node.released >= round.number
        if there and node.fenced < round.number:
            return (*heirs, Member(name, node.incarnation, slots[:1], rank))
    return ()
