"""Choose the slots of a world: the slots with the newest state first, then those of the last round, in whole
units. Of a large job, nearly all nodes offer slots that are equally good, so they are compared by node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple

from elasticd.core.facts import Limits, Member, Node, UnitWithin

Offer = tuple[Sequence[int], ...]  # the slots of a node by merit, the best first
_MERITS = 3


def by_merit(node: Node, usable: tuple[int, ...], held: tuple[int, ...], seated: tuple[int, ...]) -> Offer:
    """Return the slots that the node offers: those with the newest state, those that were in the last round,
    and the rest. Of more slots than may be in one world, the node offers the best."""
    parts: Offer
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


def best_slots(offers: Sequence[Offer], limits: Limits) -> Iterator[tuple[int, Sequence[int]]]:
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


def best_units(
    offers: Sequence[Offer], seats: Sequence[Member | None], limits: Limits
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


def _units_of_one_merit(number: int, offer: Offer, seat: Member | None, unit: int) -> _Units | None:
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
