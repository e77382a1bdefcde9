"""Form a world: decide which slots of which nodes take part, and with which ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum

from elasticd.core.facts import Drained, Limits, Member, Node, Quarantine, Round, Spec


def usable_slots(node: Node, quarantines: Iterable[Quarantine], now: float) -> tuple[int, ...]:
    """Return the node's slots that are not in quarantine at ``now``."""
    out = {q.slot for q in quarantines if q.node == node.name and q.until > now}
    return tuple(s for s in node.slots if s not in out)


def available(node: Node, last: Round | None) -> bool:
    """Whether the node may get work: it is not leaving, and no worker of ``last`` runs there."""
    if node.draining:
        return False
    if last is None or last.member(node.name, node.incarnation) is None:
        return True
    return node.released >= last.number


def candidates(nodes: Iterable[Node], spec: Spec, round: Round | None, *, live: bool = False) -> list[Node]:
    """Return the nodes that may be in the next round. ``live``: members of ``round`` count although they have
    not released it."""
    return [
        _offering(node, spec, round if live else None)
        for node in nodes
        if Drained(node.name, node.incarnation) not in spec.drain
        and (available(node, round) or (live and not node.draining and _seat(node, round)))
    ]


def _offering(node: Node, spec: Spec, live: Round | None) -> Node:
    """Return the node with the slots that can get work. Where workers keep their process, these are the slots
    in the live round and the slots with a waiting worker."""
    if not spec.inplace:
        return node
    member = _seat(node, live)
    there = set(node.ready) | set(member.slots if member else ())
    return replace(node, slots=tuple(slot for slot in node.slots if slot in there))


def _seat(node: Node, round: Round | None) -> Member | None:
    return round.member(node.name, node.incarnation) if round is not None else None


def order(nodes: Sequence[Node], last: Round | None) -> list[Node]:
    """Return the survivors of ``last`` in their old order, then the newcomers in the given order."""
    if last is None:
        return list(nodes)
    seats = {(m.node, m.incarnation): i for i, m in enumerate(last.members)}
    end = len(seats)
    return sorted(nodes, key=lambda n: seats.get((n.name, n.incarnation), end))


def form(
    nodes: Sequence[Node],
    last: Round | None,
    limits: Limits,
    quarantines: Sequence[Quarantine],
    now: float,
) -> tuple[Member, ...]:
    """Return the largest world of at most ``limits.max`` workers. It may be smaller than ``limits.min``.

    ``nodes``: the available nodes, newcomers in order of arrival. Survivors keep their order, so rank 0 stays
    where it is while its node lives. A node's ranks are contiguous. If there are too many slots, those with
    the newest state come first, then those of the last round.
    """
    ordered = order(nodes, last)
    chosen: dict[str, list[int]] = {node.name: [] for node in ordered}
    places = limits.max
    holding = newest_holders(ordered)
    merits = {
        node.name: [
            (slot, _merit(node, slot, holding, last)) for slot in usable_slots(node, quarantines, now)
        ]
        for node in ordered
    }
    for merit in reversed(_Merit):
        for node in ordered:
            mine = chosen[node.name]
            usable = [slot for slot, its in merits[node.name] if its is merit]
            room = min(places, (node.most or len(node.slots)) - len(mine))
            taken = usable[: max(0, room)]
            mine += taken
            places -= len(taken)
    return seat((node.name, node.incarnation, chosen[node.name]) for node in ordered if chosen[node.name])


def seat(nodes: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[Member, ...]:
    """Return the members with consecutive ranks. ``nodes``: a node's name, its incarnation and its slots."""
    members: list[Member] = []
    rank = 0
    for name, incarnation, slots in nodes:
        members.append(Member(name, incarnation, tuple(sorted(slots)), rank))
        rank += len(slots)
    return tuple(members)


def newest_holders(nodes: Iterable[Node]) -> Mapping[str, tuple[int, ...]]:
    """Return the slots that hold the newest whole state, by node; empty if no slot holds one."""
    aged = [(node.age, node) for node in nodes if node.age is not None]
    newest = max((age for age, _ in aged), default=None)
    return {node.name: node.holders for age, node in aged if age == newest}


class _Merit(IntEnum):
    """The preference of a slot when not all slots can be in the world."""

    NONE = 0
    SEATED = 1  # the slot was in the last round
    HOLDS = 2  # the slot has the newest state


def _merit(node: Node, slot: int, holding: Mapping[str, tuple[int, ...]], last: Round | None) -> _Merit:
    if slot in holding.get(node.name, ()):
        return _Merit.HOLDS
    before = last.member(node.name, node.incarnation) if last else None
    return _Merit.SEATED if before is not None and slot in before.slots else _Merit.NONE


def size(members: Iterable[Member]) -> int:
    """Return the number of workers."""
    return sum(len(m.slots) for m in members)
