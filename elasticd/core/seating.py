"""Form a world: decide which slots of which nodes take part, and with which ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from elasticd.core import shortage
from elasticd.core.facts import (
    Drained,
    Limits,
    Member,
    Node,
    Quarantine,
    RankRange,
    Round,
    Spec,
    UnitWithin,
)


def usable_slots(node: Node, quarantines: Iterable[Quarantine], now: float) -> tuple[int, ...]:
    """Return the node's slots that are not in quarantine at ``now``."""
    out = {q.slot for q in quarantines if q.node == node.name and q.until > now}
    return tuple(s for s in node.slots if s not in out) if out else node.slots


def available(node: Node, last: Round | None) -> bool:
    """Whether the node may get work: it is not leaving, and no worker of ``last`` runs there."""
    if node.draining:
        return False
    return last is None or node.released >= last.number or _seat(node, last) is None


def candidates(nodes: Iterable[Node], spec: Spec, round: Round | None, *, live: bool = False) -> list[Node]:
    """Return the nodes that may be in the next round, each with the slots that can get work. ``live``:
    members of ``round`` count although they have not released it."""
    offers = (candidate(node, spec, round, live=live) for node in nodes)
    return [node for node in offers if node is not None]


def candidate(node: Node, spec: Spec, round: Round | None, *, live: bool = False) -> Node | None:
    """Return the node with the slots that can get work; None if the node may not be in the next round.

    Where workers keep their process, the slots with a waiting worker can get work. ``live``: so can the slots
    in ``round``.
    """
    if node.draining or (spec.drain and is_drained(node, spec)):
        return None
    if not (live or available(node, round)):
        return None
    if not spec.inplace:
        return node
    there = set(node.ready)
    if live and (seat := _seat(node, round)) is not None:
        there.update(seat.slots)
    slots = tuple(slot for slot in node.slots if slot in there)
    return node if slots == node.slots else replace(node, slots=slots)


def is_drained(node: Node, spec: Spec) -> bool:
    """Whether the operator asked the node to leave."""
    return Drained(node.name, node.incarnation) in spec.drained


def _seat(node: Node, round: Round | None) -> Member | None:
    return round.member(node.name, node.incarnation) if round is not None else None


def room(node: Node, limits: Limits, quarantines: Iterable[Quarantine], now: float) -> int:
    """Return how many workers of this candidate can be in one world. Where a unit is within a node, only
    whole units count."""
    places = min(len(usable_slots(node, quarantines, now)), node.most or len(node.slots))
    return _in_one_world(places, limits)


def rooms(nodes: Iterable[Node], limits: Limits) -> int:
    """Return the sum of ``room`` of many candidates, without quarantines."""
    sizes = Counter([(len(node.slots), node.most) for node in nodes])
    return sum(
        count * _in_one_world(min(size, most or size), limits) for (size, most), count in sizes.items()
    )


def _in_one_world(places: int, limits: Limits) -> int:
    """Return how many of so many places of a node can be in one world."""
    return places - places % limits.unit if limits.within is UnitWithin.NODE else places


def order(nodes: Sequence[Node], last: Round | None) -> list[Node]:
    """Return the survivors of ``last`` in their old order, then the newcomers in the given order."""
    if last is None or not last.members:
        return list(nodes)
    there = {node.name: node for node in nodes}
    before = [(there.get(m.node), m.incarnation) for m in last.members]
    survivors = [node for node, life in before if node is not None and node.incarnation == life]
    if len(survivors) == len(nodes):
        return survivors
    return [*survivors, *(node for node in nodes if _seat(node, last) is None)]


_Holding = Mapping[str, tuple[int, ...]]


def form(
    nodes: Sequence[Node],
    last: Round | None,
    limits: Limits,
    quarantines: Sequence[Quarantine],
    now: float,
    holding: Callable[[Sequence[Node]], _Holding] | None = None,
) -> tuple[Member, ...]:
    """Return the largest world that ``limits`` allow, and that has memory for the job's sharded state. It may
    be smaller than ``limits.min``. The rest is as for ``form_in_any_memory``."""
    members = form_in_any_memory(nodes, last, limits, quarantines, now, holding)
    while members and (fewer := shortage.with_room(nodes, members)) is not None:
        # Of fewer workers, each has more of the state. So the next turn may leave out more of them.
        nodes, members = fewer, form_in_any_memory(fewer, last, limits, quarantines, now, holding)
    return members


def form_in_any_memory(
    nodes: Sequence[Node],
    last: Round | None,
    limits: Limits,
    quarantines: Sequence[Quarantine],
    now: float,
    holding: Callable[[Sequence[Node]], _Holding] | None = None,
) -> tuple[Member, ...]:
    """Return the largest world that ``limits`` allow. It may be smaller than ``limits.min``.

    ``nodes``: the available nodes, newcomers in order of arrival. Survivors keep their order, so rank 0 stays
    where it is while its node lives; only nodes that share a unit with another node come last. A node's ranks
    are contiguous. If there are too many slots, those with the newest state come first, then those of the
    last round; whole units are compared by their best slots. A unit of ``last`` that is whole is not divided
    to complete another. ``holding``: tells which slots hold the newest state; None: ``newest_holders``.
    """
    ordered = order(nodes, last)
    out = {q.node for q in quarantines}
    usable = [node.slots for node in ordered]
    for number in [number for number, node in enumerate(ordered) if node.name in out] if out else ():
        usable[number] = usable_slots(ordered[number], quarantines, now)
    chosen: Iterable[tuple[int, Sequence[int]]]
    if _are_all_in(ordered, usable, last, limits):
        chosen = ((number, slots) for number, slots in enumerate(usable) if slots)
    else:
        chosen = _best(ordered, usable, last, limits, (holding or newest_holders)(ordered))
    return seat(((ordered[n].name, ordered[n].incarnation, slots) for n, slots in chosen), last)


def _are_all_in(
    nodes: Sequence[Node], usable: Sequence[Sequence[int]], last: Round | None, limits: Limits
) -> bool:
    """Whether ``_best`` chooses all usable slots, in the order of the nodes: there is a place for each, and
    no unit is divided between nodes. Of a large job this is known sooner than what is best."""
    sizes = list(map(len, usable))
    workers, unit = sum(sizes), limits.unit
    spares = [node for node, size in zip(nodes, sizes, strict=True) if 0 < node.most < size]
    if spares or limits.largest(workers) != workers:
        return False
    if unit == 1:
        return True
    begin = [member.base_rank for member in last.members] if last is not None else []
    return not any(count % unit for count in (*sizes, *begin))


def _best(
    nodes: Sequence[Node],
    usable: Sequence[tuple[int, ...]],
    last: Round | None,
    limits: Limits,
    holding: _Holding,
) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the number of each node in the world, and its slots."""
    offers = [_by_merit(node, slots, holding, last) for node, slots in zip(nodes, usable, strict=True)]
    if limits.unit == 1:
        return _best_slots(offers, limits)
    return _best_units(offers, [_seat(node, last) for node in nodes], limits)


def left_out(
    nodes: Sequence[Node], round: Round, limits: Limits, quarantines: Sequence[Quarantine], now: float
) -> tuple[RankRange, ...]:
    """Return the ranks of a live round whose workers are not in the next round, if nothing else happens.

    ``nodes``: as for ``form``, with the slots in ``round``. What waiting workers hold does not count: the
    workers of ``round`` will hold a newer state. If the workers that stay make no world by themselves, they
    wait for others, and keep the state if there is memory for it.
    """
    formed = form(nodes, round, limits, quarantines, now, lambda nodes: {})
    if not formed and not shortage.has_none_for_one_state(nodes):
        return ()
    return ranks_without(round.members, formed)


def ranks_without(members: Iterable[Member], others: Iterable[Member]) -> tuple[RankRange, ...]:
    """Return the ranks of the members whose slots are not among the others'."""
    seats = {(other.node, other.incarnation): other.slots for other in others}
    both = [(member, seats.get((member.node, member.incarnation), ())) for member in members]
    out = [
        rank
        for member, kept in both
        if kept != member.slots
        for rank, slot in enumerate(member.slots, member.base_rank)
        if slot not in kept
    ]
    return _ranges(out)


def _ranges(ranks: Iterable[int]) -> tuple[RankRange, ...]:
    """Return the ranges of ranks that ascend."""
    found: list[RankRange] = []
    for rank in ranks:
        if found and found[-1].end == rank:
            found[-1] = RankRange(found[-1].first, rank + 1)
        else:
            found.append(RankRange(rank, rank + 1))
    return tuple(found)


def workers_at_hand(
    nodes: Sequence[Node], last: Round | None, limits: Limits, quarantines: Sequence[Quarantine], now: float
) -> int:
    """Return the number of workers that could take part, up to ``limits.max``, whether or not they make whole
    units."""
    return size(form_in_any_memory(nodes, last, Limits(1, limits.max), quarantines, now))


_Offer = tuple[Sequence[int], ...]  # the slots of a node by merit, the best first


def _best_slots(offers: Sequence[_Offer], limits: Limits) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the number of each node in the world, and its slots."""
    chosen: list[list[int]] = [[] for _ in offers]
    places = limits.largest(sum(len(slots) for offer in offers for slots in offer))
    for merit in range(_MERITS):
        for slots, offer in zip(chosen, offers, strict=True):
            taken = offer[merit][:places]
            slots.extend(taken)
            places -= len(taken)
    return ((number, slots) for number, slots in enumerate(chosen) if slots)


class _Place(NamedTuple):
    merit: int  # 0 is the best
    node: int
    slot: int


def _best_units(
    offers: Sequence[_Offer], seats: Sequence[Member | None], limits: Limits
) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the number of each node in the world, and its slots. A unit is a run of ranks, so nodes that
    share a unit follow each other, behind the others. ``seats``: of each node in the last round."""
    offered = [
        [_Place(merit, number, slot) for merit, slots in enumerate(offer) for slot in slots]
        for number, offer in enumerate(offers)
    ]
    units = _intact_units(offered, seats, limits)
    taken = {(place.node, place.slot) for unit in units for place in unit}
    left: list[_Place] = []
    for number, of_node in enumerate(offered):
        places = [place for place in of_node if (number, place.slot) not in taken]
        units += _whole_units(places, limits.unit)
        left += places[len(places) - len(places) % limits.unit :]
    if limits.within is UnitWithin.ANY:
        units += _whole_units(left, limits.unit)
    units.sort(key=lambda unit: sorted(place.merit for place in unit))
    chosen: dict[int, list[int]] = {}
    sharing: set[int] = set()
    for unit in units[: limits.largest(len(units) * limits.unit) // limits.unit]:
        for place in unit:
            chosen.setdefault(place.node, []).append(place.slot)
        nodes = {place.node for place in unit}
        sharing |= nodes if len(nodes) > 1 else set()
    return ((number, chosen[number]) for number in sorted(chosen, key=lambda n: (n in sharing, n)))


def _intact_units(
    offered: Sequence[Sequence[_Place]], seats: Sequence[Member | None], limits: Limits
) -> list[list[_Place]]:
    """Return the units of the last round whose slots are all offered, in the order of their ranks."""
    found: dict[int, list[_Place]] = {}
    for places, seat in zip(offered, seats, strict=True):
        if seat is not None:
            for place in places:
                if place.slot in seat.slots:
                    found.setdefault(seat.rank_of(place.slot) // limits.unit, []).append(place)
    on_any = limits.within is UnitWithin.ANY
    return [
        unit
        for _, unit in sorted(found.items())
        if len(unit) == limits.unit and (on_any or len({place.node for place in unit}) == 1)
    ]


def _whole_units(places: Sequence[_Place], unit: int) -> list[list[_Place]]:
    return [list(places[i : i + unit]) for i in range(0, len(places) - len(places) % unit, unit)]


def seat(nodes: Iterable[tuple[str, str, Sequence[int]]], last: Round | None = None) -> tuple[Member, ...]:
    """Return the members with consecutive ranks. ``nodes``: a node's name, its incarnation and its slots. Who
    has the same seat as in ``last`` is the same object."""
    members: list[Member] = []
    before = last.by_node if last is not None else {}
    ascending: dict[tuple[int, ...], tuple[int, ...]] = {}  # most nodes have the same slots
    rank = 0
    for name, incarnation, given in nodes:
        slots = ascending.get(key := tuple(given)) or ascending.setdefault(key, tuple(sorted(key)))
        old = before.get(name)
        seat = incarnation, slots, rank, len(members)
        if old is None or (old.incarnation, old.slots, old.base_rank, old.place) != seat:
            old = Member(name, *seat)
        members.append(old)
        rank += len(slots)
    return tuple(members)


def newest_holders(nodes: Iterable[Node]) -> Mapping[str, tuple[int, ...]]:
    """Return the slots that hold the newest whole state, by node; empty if no slot holds one."""
    aged = [(node.age, node) for node in nodes if node.age is not None]
    newest = max((age for age, _ in aged), default=None)
    return {node.name: node.holders for age, node in aged if age == newest}


_MERITS = 3


def _by_merit(
    node: Node, usable: tuple[int, ...], holding: Mapping[str, tuple[int, ...]], last: Round | None
) -> _Offer:
    """Return the slots that the node offers: those with the newest state, those that were in the last round,
    and the rest. Of more slots than may be in one world, the node offers the best."""
    held = holding.get(node.name, ())
    before = _seat(node, last)
    seated = before.slots if before is not None else ()
    parts: _Offer
    if usable == held:
        parts = (usable, (), ())
    elif not held and usable == seated:
        parts = ((), usable, ())
    elif not held and not seated:
        parts = ((), (), usable)
    else:
        parts = (
            [slot for slot in usable if slot in held],
            [slot for slot in usable if slot in seated and slot not in held],
            [slot for slot in usable if slot not in seated and slot not in held],
        )
    places = node.most or len(usable)
    if places >= len(usable):
        return parts
    best = []
    for part in parts:
        best.append(part[:places])
        places -= len(best[-1])
    return tuple(best)


def size(members: Iterable[Member]) -> int:
    """Return the number of workers."""
    return sum(len(m.slots) for m in members)
