"""Choose the slots of a world: the slots with the newest state first, then those of the last round, in whole
units. Of a large job, nearly all nodes offer slots that are equally good, so they are compared by node."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, repeat
from operator import attrgetter, itemgetter

from elasticd.core.facts import Limits, Member, Node, UnitWithin

Offer = Sequence[tuple[int, Sequence[int]]]  # slots of a node, in runs of one merit, the best (0) first
_MERITS = 3


def offers_of(
    nodes: Sequence[Node],
    usable: Sequence[tuple[int, ...]],
    seats: Sequence[Member | None],
    holding: Mapping[str, tuple[int, ...]],
) -> list[Offer]:
    """Return what each node offers: the slots with the newest state, those that were in the last round, and
    the rest. Of more slots than may be in one world, a node offers the best."""
    held = map(holding.get, map(attrgetter("name"), nodes), repeat(()))
    seated = [seat.slots if seat is not None else () for seat in seats]
    most = map(attrgetter("most"), nodes)
    offers: list[Offer] = []
    for offering, alike in groupby(zip(usable, held, seated, most, strict=True)):
        offers += repeat(_offer(*offering), len([*alike]))
    return offers


def _offer(slots: tuple[int, ...], held: tuple[int, ...], seated: tuple[int, ...], most: int) -> Offer:
    runs: list[list[int]] = [[] for _ in range(_MERITS)]
    for slot in slots:
        runs[0 if slot in held else 1 if slot in seated else 2].append(slot)
    offer = [(merit, tuple(run)) for merit, run in enumerate(runs) if run]
    return _best_of(offer, most) if 0 < most < len(slots) else offer


def _best_of(offer: Offer, most: int) -> Offer:
    best = []
    for merit, slots in offer:
        if most:
            best.append((merit, slots[:most]))
            most -= len(best[-1][1])
    return best


def are_whole_units(offers: Sequence[Offer], seats: Sequence[Member | None], unit: int) -> bool:
    """Whether units can be chosen as slots are: the slots of each node are equally good, and are whole units
    already, or can be."""
    return all(map(_is_even, offers, seats, repeat(unit)))


def best_slots(offers: Sequence[Offer], limits: Limits) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the number of each node in the world, and its slots. Units are of one worker, or each node
    offers whole ones."""
    runs = [(merit, number, slots) for number, offer in enumerate(offers) for merit, slots in offer]
    runs.sort(key=itemgetter(0))
    chosen: dict[int, Sequence[int]] = {}
    ends = [*accumulate(map(len, map(itemgetter(2), runs)))]
    places = limits.largest(ends[-1] if ends else 0)
    whole = bisect_right(ends, places)
    for _, number, slots in runs[:whole]:
        chosen[number] = (*chosen[number], *slots) if number in chosen else slots
    if left := places - (ends[whole - 1] if whole else 0):
        _, number, slots = runs[whole]
        chosen[number] = (*chosen.get(number, ()), *slots[:left])
    return ((number, chosen[number]) for number in sorted(chosen))


# Whole units that are equally good, one or several on one node: the merits of the slots of each unit, the
# best first; the number of units; and the slots of all these units, by the number of the node.
_Units = tuple[tuple[int, ...], int, Sequence[tuple[int, Sequence[int]]]]
_Place = tuple[int, int]  # the merit of a slot, and the slot


def best_units(
    offers: Sequence[Offer], seats: Sequence[Member | None], limits: Limits
) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the number of each node in the world, and its slots. A unit is a run of ranks, so nodes that
    share a unit follow each other, behind the others. ``seats``: of each node in the last round."""
    intact: list[tuple[int, _Units]] = []  # with the number of the first unit in the last round
    others: list[tuple[int, _Units]] = []  # with the number of the node
    uneven: dict[int, list[_Place]] = {}  # what the other nodes offer, by the number of the node
    merits = [(merit,) * limits.unit for merit in range(_MERITS)]
    for number, (offer, seat) in enumerate(zip(offers, seats, strict=True)):
        if not _is_even(offer, seat, limits.unit):
            uneven[number] = [(merit, slot) for merit, slots in offer for slot in slots]
            continue
        ((merit, slots),) = offer
        units = merits[merit], len(slots) // limits.unit, ((number, slots),)
        if seat is not None:
            intact.append((seat.base_rank // limits.unit, units))
        else:
            others.append((number, units))
    intact += _intact_units(uneven, seats, limits)
    whole, shared = _further_units(uneven, limits)
    ordered = [*sorted(intact, key=itemgetter(0)), *sorted([*others, *whole], key=itemgetter(0))]
    units_of_all = [*(units for _, units in ordered), *shared]
    return _first_of(sorted(units_of_all, key=itemgetter(0)), limits)


def _is_even(offer: Offer, seat: Member | None, unit: int) -> bool:
    """Whether the node's slots are equally good, and are whole units already, or can be. Of a large job,
    nearly all nodes are like that."""
    if len(offer) != 1:
        return False
    slots = offer[0][1]
    return not len(slots) % unit and (seat is None or (not seat.base_rank % unit and slots == seat.slots))


def _first_of(ordered: Sequence[_Units], limits: Limits) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the number of each node in the largest world of the first of these units, and its slots."""
    chosen: dict[int, Sequence[int]] = {}
    sharing: set[int] = set()
    places = limits.largest(sum([count for _, count, _ in ordered]) * limits.unit)
    for _, count, parts in ordered:
        if not places:
            break
        taken = min(places, count * limits.unit)
        for number, slots in parts:
            some = slots[:taken]
            chosen[number] = (*chosen[number], *some) if number in chosen else some
        if len(parts) > 1:
            sharing.update([number for number, _ in parts])
        places -= taken
    alone = chosen.keys() - sharing
    return ((number, chosen[number]) for number in (*sorted(alone), *sorted(sharing)))


def _intact_units(
    offered: dict[int, list[_Place]], seats: Sequence[Member | None], limits: Limits
) -> list[tuple[int, _Units]]:
    """Return the units of the last round whose slots are all offered, with their numbers, and take the slots
    out of ``offered``."""
    found: dict[int, list[tuple[int, list[_Place]]]] = {}
    for number, places in offered.items():
        if (seat := seats[number]) is not None:
            for unit, slots in _slots_by_unit(seat, limits.unit):
                if there := [place for place in places if place[1] in slots]:
                    found.setdefault(unit, []).append((number, there))
    on_any = limits.within is UnitWithin.ANY
    intact: list[tuple[int, _Units]] = []
    for unit, parts in found.items():
        if sum([len(there) for _, there in parts]) == limits.unit and (on_any or len(parts) == 1):
            intact.append((unit, _one_unit(parts)))
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
    return tuple(merits), 1, [(number, [slot for _, slot in places]) for number, places in parts]
