"""The handover of the training state: workers that are not in the next round give it to others.

Workers that keep their process hold the state in memory. While one of them stays in the job, new workers get
the state from it. If all of them leave, their round lives on until other nodes are ready. Then a round
without steps passes the state on. Its members are the heirs, which are the workers of the next round, and the
leaving workers.

Of a sharded model, each worker holds a part only. Workers that leave with a planned end of their round give
their parts to the others at their last commit. If the limits change again before the next round, further
workers may leave: they give their parts in a round without steps, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from elasticd.core import seating
from elasticd.core.facts import Member, Node, Round

_Place = tuple[str, int]  # a node and a slot


def may_come(round: Round, nodes: Iterable[Node]) -> bool:
    """Whether there are nodes that could take over the state, once their workers are ready."""
    return any(n.slots and not n.draining and not round.member(n.name, n.incarnation) for n in nodes)


def members(
    round: Round, nodes: Mapping[str, Node], heirs: Sequence[Member], unit: int = 1
) -> tuple[Member, ...]:
    """Return the members of the handover round, which comes before the heirs train; empty if there is nothing
    to hand over.

    The leaving nodes come last, since the first member hosts the store. A leaving node may not know yet that
    it must leave. ``round``: the last round, which is over. ``unit``: the workers that hold one model
    together, if there are such units.
    """
    holding = seating.newest_holders(nodes.values())
    given = _have_given(round, nodes)
    if not any(set(heir.slots) & set(holding.get(heir.node, ())) for heir in heirs):
        having = {**holding, **_parts_of_the_same_state(nodes, holding)}
        able = ((name, slots) for name, slots in having.items() if _can_give(round, nodes[name]))
        spared = given | {(heir.node, slot) for heir in heirs for slot in heir.slots}
        left = {name: tuple(s for s in slots if (name, s) not in spared) for name, slots in able}
        giving = {name: slots for name, slots in left.items() if slots}
    else:
        giving = _parts_left_out(round, nodes, heirs, unit)
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


def _parts_of_the_same_state(nodes: Mapping[str, Node], holding: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the slots of other nodes that may have parts of the newest sharded state, which the nodes of
    ``holding`` have."""
    newest = next((nodes[name].age for name in holding), None)
    return {
        name: node.holders
        for name, node in nodes.items()
        if node.sharded and node.age is not None and newest is not None
        if node.age.may_share_state_with(newest)
    }


def _parts_left_out(
    round: Round, nodes: Mapping[str, Node], heirs: Sequence[Member], unit: int
) -> dict[str, tuple[int, ...]]:
    """Return the slots with a part of a sharded state that are not among the heirs, and have not given the
    part away. A worker that was not in the last round has no part, or gave it away before."""
    there = {
        (name, slot)
        for name, member in round.by_node.items()
        if (node := nodes.get(name)) is not None and node.sharded and node.incarnation == member.incarnation
        if _can_give(round, node)
        for slot in node.holders
        if slot in member.slots
    } - _have_given(round, nodes)
    if not there:
        return {}
    taking = {(heir.node, slot) for heir in heirs for slot in heir.slots}
    out = {place for rank, place in _places(round) if round.leaves_out(rank)}
    kept = {place for _, place in _places(round)} - out
    if round.planned and kept and kept <= there and _have_all_entered(round, nodes, kept):
        there -= out  # they have given their parts at the last commit
    elif unit > 1 and _is_whole_unit_among(taking & there, round, unit):
        return {}
    giving: dict[str, tuple[int, ...]] = {}
    for name, slot in sorted(there - taking):
        giving[name] = (*giving.get(name, ()), slot)
    return giving


def _have_all_entered(round: Round, nodes: Mapping[str, Node], kept: Iterable[_Place]) -> bool:
    """Return whether the workers at these places have agreed on the state in this round. Workers that are
    asked to leave before their world has formed leave at once, so such a round has no last commit."""
    ages = (nodes[name].age for name, _ in kept)
    return all(age is not None and age.agreed == round.number for age in ages)


def _have_given(round: Round, nodes: Mapping[str, Node]) -> set[_Place]:
    """Return the places of the workers that have given their parts in a handover round, if all other workers
    of the round wait for the next one. The parts may make no whole state; another handover would not help."""
    if not (round.handover and round.planned):
        return set()
    wait = {
        (name, slot)
        for name, member in round.by_node.items()
        if (node := nodes.get(name)) is not None and node.incarnation == member.incarnation
        for slot in node.ready
    }
    out = {place for rank, place in _places(round) if round.leaves_out(rank)}
    kept = {place for _, place in _places(round)} - out
    return out if kept and kept <= wait else set()


def _places(round: Round) -> Iterator[tuple[int, _Place]]:
    """Yield the ranks and places of the round's workers."""
    for member in round.members:
        for rank, slot in enumerate(member.slots, member.base_rank):
            yield rank, (member.node, slot)


def _is_whole_unit_among(places: set[_Place], round: Round, unit: int) -> bool:
    there = Counter(rank // unit for rank, place in _places(round) if place in places)
    return unit in there.values()


def _can_give(round: Round, node: Node) -> bool:
    """Whether the node's workers have left the round, and live."""
    member = round.member(node.name, node.incarnation)
    return (member is None or node.released >= round.number) and node.fenced < round.number
