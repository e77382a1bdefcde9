"""Form a world: decide which slots of which nodes take part, and with which ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter, itemgetter
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
    if not spec.inplace or node.ready == node.slots:
        return node
    seat = _seat(node, round) if live else None
    there = {*node.ready, *(seat.slots if seat is not None else ())}
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
    survivors = [
        node
        for member in last.members
        if (node := there.get(member.node)) is not None and node.incarnation == member.incarnation
    ]
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
    seats = [_seat(node, last) for node in nodes]
    offers = [
        _by_merit(node, slots, holding.get(node.name, ()), seat.slots if seat is not None else ())
        for node, slots, seat in zip(nodes, usable, seats, strict=True)
    ]
    return _best_slots(offers, limits) if limits.unit == 1 else _best_units(offers, seats, limits)


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
    there = {other.node: other for other in others}
    found: list[RankRange] = []
    for member in members:
        other = there.get(member.node)
        kept = other.slots if other is not None and other.incarnation == member.incarnation else ()
        if not kept:
            found.append(RankRange(member.base_rank, member.base_rank + len(member.slots)))
        elif kept != member.slots:
            ranks = enumerate(member.slots, member.base_rank)
            found += [RankRange(rank, rank + 1) for rank, slot in ranks if slot not in kept]
    return _joined(found)


def _joined(ranges: Iterable[RankRange]) -> tuple[RankRange, ...]:
    """Return the ranges, which ascend, with those that follow each other as one."""
    found: list[RankRange] = []
    for ranks in ranges:
        if found and found[-1].end == ranks.first:
            found[-1] = RankRange(found[-1].first, ranks.end)
        else:
            found.append(ranks)
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
    chosen: dict[int, Sequence[int]] = {}
    places = limits.largest(sum([len(slots) for offer in offers for slots in offer]))
    for merit in range(_MERITS):
        for number, offer in enumerate(offers):
            if not places:
                break
            if taken := offer[merit][:places]:
                chosen[number] = (*chosen.get(number, ()), *taken)
                places -= len(taken)
    return ((number, chosen[number]) for number in sorted(chosen))


class _Units(NamedTuple):
    """Whole units that are equally good: one, or several on one node. ``merits``: of the slots of each unit,
    the best first, where 0 is the best. ``slots``: of all these units, by the number of the node."""

    merits: tuple[int, ...]
    units: int
    slots: Sequence[tuple[int, Sequence[int]]]


_Place = tuple[int, int]  # the merit of a slot, and the slot


def _best_units(
    offers: Sequence[_Offer], seats: Sequence[Member | None], limits: Limits
) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the number of each node in the world, and its slots. A unit is a run of ranks, so nodes that
    share a unit follow each other, behind the others. ``seats``: of each node in the last round."""
    intact: dict[int, _Units] = {}  # by the number of the first unit in the last round
    others: list[tuple[int, _Units]] = []  # by the number of the node
    uneven: dict[int, list[_Place]] = {}  # what the other nodes offer, by the number of the node
    for number, (offer, seat) in enumerate(zip(offers, seats, strict=True)):
        units = _units_of_one_merit(number, offer, seat, limits.unit)
        if units is None:
            uneven[number] = [(merit, slot) for merit, slots in enumerate(offer) for slot in slots]
        elif seat is not None:
            intact[seat.base_rank // limits.unit] = units
        else:
            others.append((number, units))
    intact |= _intact_units(uneven, seats, limits)
    whole, shared = _further_units(uneven, limits)
    units_of_all = [
        *(units for _, units in sorted(intact.items())),
        *(units for _, units in sorted([*others, *whole], key=itemgetter(0))),
        *shared,
    ]
    units_of_all.sort(key=attrgetter("merits"))
    return _first_of(units_of_all, limits)


def _first_of(ordered: Sequence[_Units], limits: Limits) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the number of each node in the largest world of the first of these units, and its slots."""
    chosen: dict[int, Sequence[int]] = {}
    sharing: set[int] = set()
    places = limits.largest(sum([units.units for units in ordered]) * limits.unit)
    for units in ordered:
        if not places:
            break
        taken = min(places, units.units * limits.unit)
        for number, slots in units.slots:
            chosen[number] = (*chosen.get(number, ()), *slots[:taken])
        if len(units.slots) > 1:
            sharing.update([number for number, _ in units.slots])
        places -= taken
    return ((number, chosen[number]) for number in sorted(chosen, key=lambda n: (n in sharing, n)))


def _units_of_one_merit(number: int, offer: _Offer, seat: Member | None, unit: int) -> _Units | None:
    """Return the units of a node whose slots are equally good, and are whole units already, or can be. None:
    the node is another one. Of a large job, nearly all nodes are like that."""
    filled = [(merit, slots) for merit, slots in enumerate(offer) if slots]
    if len(filled) != 1:
        return None
    merit, slots = filled[0]
    if len(slots) % unit:
        return None
    if seat is not None and (seat.base_rank % unit or slots != seat.slots):
        return None
    return _Units((merit,) * unit, len(slots) // unit, ((number, slots),))


def _intact_units(
    offered: dict[int, list[_Place]], seats: Sequence[Member | None], limits: Limits
) -> dict[int, _Units]:
    """Return the units of the last round whose slots are all offered, by their number, and take them out of
    ``offered``."""
    found: dict[int, list[tuple[int, list[_Place]]]] = {}
    for number, places in offered.items():
        if (seat := seats[number]) is not None:
            for unit, slots in _slots_by_unit(seat, limits.unit):
                if there := [place for place in places if place[1] in slots]:
                    found.setdefault(unit, []).append((number, there))
    on_any = limits.within is UnitWithin.ANY
    intact: dict[int, _Units] = {}
    for unit, parts in found.items():
        if sum([len(there) for _, there in parts]) == limits.unit and (on_any or len(parts) == 1):
            intact[unit] = _one_unit(parts)
            for number, there in parts:
                offered[number] = [place for place in offered[number] if place not in there]
    return intact


def _slots_by_unit(seat: Member, unit: int) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the number of each unit that has workers on the node, and their slots."""
    first, end = seat.base_rank, seat.base_rank + len(seat.slots)
    for number in range(first // unit, -(-end // unit)):
        yield number, seat.slots[max(0, number * unit - first) : (number + 1) * unit - first]


def _further_units(
    offered: Mapping[int, Sequence[_Place]], limits: Limits
) -> tuple[list[tuple[int, _Units]], list[_Units]]:
    """Return the units that can be on one node, with the node's number, and then those that several share."""
    whole: list[tuple[int, _Units]] = []
    left: list[tuple[int, _Place]] = []
    for number, places in offered.items():
        end = len(places) - len(places) % limits.unit
        whole += [
            (number, _one_unit([(number, places[begin : begin + limits.unit])]))
            for begin in range(0, end, limits.unit)
        ]
        left += [(number, place) for place in places[end:]]
    if limits.within is UnitWithin.NODE:
        return whole, []
    ends = range(limits.unit, len(left) + 1, limits.unit)
    return whole, [_one_unit(_by_number(left[end - limits.unit : end])) for end in ends]


def _by_number(places: Iterable[tuple[int, _Place]]) -> list[tuple[int, list[_Place]]]:
    return [(number, [place for _, place in run]) for number, run in groupby(places, itemgetter(0))]


def _one_unit(parts: Sequence[tuple[int, Sequence[_Place]]]) -> _Units:
    merits = sorted([merit for _, places in parts for merit, _ in places])
    return _Units(tuple(merits), 1, [(number, [slot for _, slot in places]) for number, places in parts])


def seat(nodes: Iterable[tuple[str, str, Sequence[int]]], last: Round | None = None) -> tuple[Member, ...]:
    """Return the members with consecutive ranks. ``nodes``: a node's name, its incarnation and its slots. Who
    has the same seat as in ``last`` is the same object."""
    members: list[Member] = []
    before = last.by_node if last is not None else {}
    ascending: dict[tuple[int, ...], tuple[int, ...]] = {}  # most nodes have the same slots
    rank = 0
    for place, (name, incarnation, given) in enumerate(nodes):
        slots = ascending.get(key := tuple(given)) or ascending.setdefault(key, tuple(sorted(key)))
        member = before.get(name)
        if (
            member is None
            or member.base_rank != rank
            or member.place != place
            or member.slots != slots
            or member.incarnation != incarnation
        ):
            member = Member(name, incarnation, slots, rank, place)
        members.append(member)
        rank += len(slots)
    return tuple(members)


def newest_holders(nodes: Iterable[Node]) -> Mapping[str, tuple[int, ...]]:
    """Return the slots that hold the newest whole state, by node; empty if no slot holds one."""
    aged = [((node.age.agreed, node.age.step), node) for node in nodes if node.age is not None]
    newest = max(map(itemgetter(0), aged), default=None)
    return {node.name: node.holders for age, node in aged if age == newest}


_MERITS = 3


def _by_merit(node: Node, usable: tuple[int, ...], held: tuple[int, ...], seated: tuple[int, ...]) -> _Offer:
    """Return the slots that the node offers: those with the newest state, those that were in the last round,
    and the rest. Of more slots than may be in one world, the node offers the best."""
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
