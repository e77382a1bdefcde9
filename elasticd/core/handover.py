"""The handover of the state when all nodes or slots that hold it leave at once.

Workers that keep their process hold the state in memory. While one of them stays in the job, new workers get
the state from it. If all of them leave, their round lives on until other nodes are ready. Then a round
without steps passes the state on. Its members are the heirs, which are the workers of the next round, and the
leaving workers: of a sharded model, each of them holds a part only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from elasticd.core import seating
from elasticd.core.facts import Member, Node, Round


def may_come(round: Round, nodes: Iterable[Node]) -> bool:
    """Whether there are nodes that could take over the state, once their workers are ready."""
    return any(n.slots and not n.draining and not round.member(n.name, n.incarnation) for n in nodes)


def members(round: Round, nodes: Mapping[str, Node], heirs: Sequence[Member]) -> tuple[Member, ...]:
    """Return the members of the handover round, which comes before the heirs train; empty if there is nothing
    to hand over.

    The leaving nodes come last, since the first member hosts the store. A leaving node may not know yet that
    it must leave. ``round``: the last round, which is over.
    """
    holding = seating.newest_holders(nodes.values())
    if any(set(heir.slots) & set(holding.get(heir.node, ())) for heir in heirs):
        return ()
    giving = {name: slots for name, slots in holding.items() if _can_give(round, nodes[name])}
    if not giving:
        return ()
    # Other workers of a leaving node may be heirs, if the next round leaves out only the slots with the
    # state.
    beside = {heir.node: heir.slots for heir in heirs}
    others = [(heir.node, heir.incarnation, heir.slots) for heir in heirs if heir.node not in giving]
    leaving = [
        (name, nodes[name].incarnation, (*beside.get(name, ()), *slots)) for name, slots in giving.items()
    ]
    return seating.seat([*others, *leaving])


def _can_give(round: Round, node: Node) -> bool:
    """Whether the node's workers have left the round, and live."""
    member = round.member(node.name, node.incarnation)
    return (member is None or node.released >= round.number) and node.fenced < round.number
