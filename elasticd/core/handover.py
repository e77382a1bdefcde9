"""Where all who hold the state leave at once: who comes after them, and who passes it on to these.

Workers that keep their process have the state in memory. While one of them stays in the job, whoever
joins gets it from there. If all of them are to leave, their round lives on until others are ready; then
a round that makes no step takes the state over: all the heirs, and one of those that leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from elasticd.core.facts import Cause, Member, Node, Round


def any_stays(members: Iterable[Member], round: Round) -> bool:
    """Whether a slot of ``round``, which is over, has the state and is among those of the next world."""
    if round.handover and round.closing is not Cause.NODE_DRAINED:
        return False  # it broke: who knows how far it got
    return any(
        mine is not None and set(mine.slots) & set(m.slots)
        for m in members
        for mine in [round.member(m.node, m.incarnation)]
    )


def may_come(round: Round, nodes: Iterable[Node]) -> bool:
    """Whether there are nodes that could take over, once their workers are ready."""
    return any(n.slots and not n.draining and not round.member(n.name, n.incarnation) for n in nodes)


def giver(round: Round, nodes: Mapping[str, Node], rank: int) -> Member | None:
    """One worker that has left ``round``, waits, and is about to leave the job; ``rank`` is what it gets."""
    for member in round.members:
        node = nodes.get(member.node)
        if node is None or node.incarnation != member.incarnation or not node.draining:
            continue
        waits = sorted(node.ready, key=lambda slot: slot not in member.slots)
        if waits and round.number <= node.released and node.fenced < round.number:
            return Member(node.name, node.incarnation, (waits[0],), rank)
    return None


def members(round: Round, nodes: Mapping[str, Node], heirs: Sequence[Member]) -> tuple[Member, ...]:
    """Those of the round that hands over, before the heirs train; none if there is nothing to hand over.
    The one that gives comes last, since the first hosts the store."""
    if not heirs or any_stays(heirs, round):
        return ()
    gives = giver(round, nodes, sum(len(m.slots) for m in heirs))
    return (*heirs, gives) if gives is not None else ()
