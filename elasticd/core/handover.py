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

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter

from elasticd.core import seating
from elasticd.core.age import Age
from elasticd.core.facts import Members, Node, Round

_Slots = Mapping[str, tuple[int, ...]]  # some slots of nodes, by the node's name; no node without a slot


def may_come(round: Round, nodes: Iterable[Node]) -> bool:
    """Whether there are nodes that could take over the state, once their workers are ready."""
    return any(n.slots and not n.draining and not round.member(n.name, n.incarnation) for n in nodes)


def members(
    round: Round,
    nodes: Mapping[str, Node],
    heirs: Members,
    newest: Age | None,
    parted: Collection[str],
    unit: int = 1,
) -> Members:
    """Return the members of the handover round, which comes before the heirs train; empty if there is nothing
    to hand over.

    The leaving nodes come last, since the first member hosts the store. A leaving node may not know yet that
    it must leave. ``round``: the last round, which is over. ``newest``: the age of the newest state that
    workers hold. ``parted``: the nodes that have left the round with all their parts of a sharded state, on
    which the workers of the round had agreed. ``unit``: the workers that hold one model together, if there
    are such units.
    """
    if newest is None:
        return Members()
    beside = heirs.slots_by_node
    hold = any(nodes[n].age == newest and _both(nodes[n].holders, slots) for n, slots in beside.items())
    never_began = newest.agreed < round.number and not (round.planned or round.handover)
    if hold and not never_began:
        giving = _parts_left_out(round, nodes, beside, parted, unit)
    else:
        # The state is in workers that leave, or is older than the last round, which failed before it began to
        # train. So workers that were not in that round may have parts, too.
        holding = {} if hold else seating.newest_holders(nodes.values())
        having = {**holding, **_parts_of_the_same_state(nodes, newest)}
        able = {name: slots for name, slots in having.items() if _can_give(round, nodes[name])}
        giving = _without(_without(able, _have_given(round, nodes)), beside)
    if not giving:
        return Members()
    # Other workers of a leaving node may be heirs, if the next round leaves out only the slots with the
    # state.
    leaving = [
        (name, nodes[name].incarnation, (*beside.get(name, ()), *slots)) for name, slots in giving.items()
    ]
    if beside.keys().isdisjoint(giving):
        return seating.seat(leaving, heirs, first=heirs)
    others = [(heir.node, heir.incarnation, heir.slots) for heir in heirs if heir.node not in giving]
    return seating.seat([*others, *leaving], heirs)


def _parts_of_the_same_state(nodes: Mapping[str, Node], newest: Age) -> _Slots:
    """Return the slots of the nodes that may have parts of the newest sharded state, which has this age."""
    return {
        name: node.holders
        for name, node in nodes.items()
        if node.sharded and node.age is not None
        if node.age.may_share_state_with(newest)
    }


def _parts_left_out(
    round: Round, nodes: Mapping[str, Node], heirs: _Slots, parted: Collection[str], unit: int
) -> _Slots:
    """Return the slots with a part of a sharded state that are not among the heirs, and have not given the
    part away. A worker that was not in the last round has no part, or gave it away before."""
    seats, out = round.indexed.slots_by_node, _left_out(round)
    going, staying = _without(seats, heirs), _without(seats, out)
    if not going:
        return {}
    # Workers that are asked to leave before their world has formed leave at once. Such a round has no last
    # commit, at which those that the round left out gave their parts.
    if round.planned and staying and staying.keys() <= {*parted}:
        giving = _without(going, out)
    else:
        there = _without(_parts(round, nodes, seats), _have_given(round, nodes))
        giving = _without(there, heirs)
        if unit > 1 and _has_a_whole_unit(_without(there, giving), round, unit):
            return {}
    return giving


def _parts(round: Round, nodes: Mapping[str, Node], seats: _Slots) -> _Slots:
    """Return those of the seats in the round whose workers have left the round with a part of a sharded
    state."""
    number, members = round.number, round.by_node
    return {
        name: both
        for name, slots in seats.items()
        if (node := nodes.get(name)) is not None and node.incarnation == members[name].incarnation
        if node.sharded and node.fenced < number <= node.released
        if (both := slots if slots == node.holders else _both(node.holders, slots))
    }


def _have_given(round: Round, nodes: Mapping[str, Node]) -> _Slots:
    """Return the places of the workers that have given their parts in a handover round, if all other workers
    of the round wait for the next one. The parts may make no whole state; another handover would not help."""
    if not (round.handover and round.planned):
        return {}
    there = [(member, nodes.get(name)) for name, member in round.by_node.items()]
    wait = {n.name: n.ready for m, n in there if n is not None and n.incarnation == m.incarnation}
    out = _left_out(round)
    kept = _without(round.indexed.slots_by_node, out)
    return out if kept and not _without(kept, wait) else {}


def _left_out(round: Round) -> _Slots:
    """Return the slots of the ranks that the next round will probably leave out."""
    members, out = round.members, dict[str, tuple[int, ...]]()
    for ranks in round.left_out:
        first = bisect_right(members, ranks.first, key=attrgetter("base_rank")) - 1
        end = bisect_left(members, ranks.end, key=attrgetter("base_rank"))
        some = members[first:end]
        out.update(map(attrgetter("node", "slots"), some[1:-1]))  # of these, all ranks are in the range
        for member in (some[0], some[-1]) if len(some) > 1 else some:
            begin = member.base_rank
            slots = member.slots[max(0, ranks.first - begin) : ranks.end - begin]
            out[member.node] = (*out[member.node], *slots) if member.node in out else slots
    return out


def _has_a_whole_unit(places: _Slots, round: Round, unit: int) -> bool:
    members = [(round.by_node[name], slots) for name, slots in places.items()]
    there = Counter(member.rank_of(slot) // unit for member, slots in members for slot in slots)
    return unit in there.values()


def _without(places: _Slots, others: _Slots) -> _Slots:
    """Return those of the places that are not among the others."""
    if not others:
        return places
    if places == others:
        return {}
    left = {name: slots for name, slots in places.items() if others.get(name, ()) != slots}
    for name in left.keys() & others.keys():
        left[name] = tuple([slot for slot in left[name] if slot not in others[name]])
        if not left[name]:
            del left[name]
    return left


def _both(slots: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([slot for slot in slots if slot in others])


def _can_give(round: Round, node: Node) -> bool:
    """Whether the node's workers have left the round, and live."""
    member = round.member(node.name, node.incarnation)
    return (member is None or node.released >= round.number) and node.fenced < round.number
