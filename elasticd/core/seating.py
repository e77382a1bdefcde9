"""Form a world: decide which slots of which nodes take part, and with which ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from operator import attrgetter, eq

from elasticd.core import shortage
from elasticd.core.facts import (
    Drained,
    Limits,
    Member,
    Members,
    Node,
    Quarantine,
    RankRange,
    Round,
    Spec,
    UnitWithin,
)
from elasticd.core.slot_choice import are_whole_units, best_slots, best_units, offers_of


def usable_slots(node: Node, quarantines: Iterable[Quarantine], now: float) -> tuple[int, ...]:
    """Return the node's slots that are not in quarantine at ``now``."""
    out = {q.slot for q in quarantines if q.node == node.name and q.until > now}
    return tuple(s for s in node.slots if s not in out) if out else node.slots


def available(node: Node, last: Round | None) -> bool:
    """Whether the node may get work: it is not leaving, and no worker of ``last`` runs there."""
    if node.draining:
        return False
    return last is None or node.released >= last.number or _seat(node, last) is None


def candidates(
    nodes: Sequence[Node], spec: Spec, round: Round | None, *, live: bool = False
) -> Sequence[Node]:
    """Return the nodes that may be in the next round, each with the slots that can get work. ``live``:
    members of ``round`` count although they have not released it."""
    released = round.number if round is not None and not live else 0
    whole, drained = not spec.inplace, {d.node for d in spec.drain}
    # nearly all nodes of a large job can get work in all their slots
    plain = [
        n.released >= released and not n.draining and (whole or n.ready == n.slots) and n.name not in drained
        for n in nodes
    ]
    if all(plain):
        return nodes
    offers = [
        node if is_plain else candidate(node, spec, round, live=live)
        for node, is_plain in zip(nodes, plain, strict=True)
    ]
    return [*filter(None, offers)]


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


def _seats(nodes: Sequence[Node], round: Round | None) -> list[Member | None]:
    """Return the seat of each node."""
    there = round.by_node if round is not None else {}
    had = map(there.get, map(attrgetter("name"), nodes))
    is_of = zip(had, map(attrgetter("incarnation"), nodes), strict=True)
    return [seat if seat is not None and seat.incarnation == own else None for seat, own in is_of]


def room(node: Node, limits: Limits, quarantines: Iterable[Quarantine], now: float) -> int:
    """Return how many workers of this candidate can be in one world. Where a unit is within a node, only
    whole units count."""
    places = min(len(usable_slots(node, quarantines, now)), node.most or len(node.slots))
    return _in_one_world(places, limits)


def rooms(nodes: Sequence[Node], limits: Limits) -> int:
    """Return how many workers these candidates can run together: the sum of ``room`` without quarantines.
    Candidates with equally many slots are counted together, which is fast for thousands of nodes."""
    slots, most = map(attrgetter("slots"), nodes), map(attrgetter("most"), nodes)
    sizes = Counter(zip(map(len, slots), most, strict=True))
    return sum(
        count * _in_one_world(min(size, most or size), limits) for (size, most), count in sizes.items()
    )


def _in_one_world(places: int, limits: Limits) -> int:
    """Return how many of a node's ``places`` can be in one world."""
    return places - places % limits.unit if limits.within is UnitWithin.NODE else places


def order(nodes: Sequence[Node], last: Round | None) -> tuple[list[Node], list[Member | None]]:
    """Return the survivors of ``last`` in their old order, then the newcomers in the given order; and the
    seat of each in ``last``."""
    seats = _seats(nodes, last)
    size = last.world_size if last is not None else 0
    ranks = [seat.base_rank if seat is not None else size for seat in seats]
    numbers = sorted(range(len(nodes)), key=ranks.__getitem__)
    return [*map(nodes.__getitem__, numbers)], [*map(seats.__getitem__, numbers)]


_Holding = Mapping[str, tuple[int, ...]]


def form(
    nodes: Sequence[Node],
    last: Round | None,
    limits: Limits,
    quarantines: Sequence[Quarantine],
    now: float,
    holding: Callable[[Sequence[Node]], _Holding] | None = None,
) -> Members:
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
) -> Members:
    """Return the largest world that ``limits`` allow. It may be smaller than ``limits.min``.

    ``nodes``: the available nodes, newcomers in order of arrival. Survivors keep their order, so rank 0 stays
    where it is while its node lives; only nodes that share a unit with another node come last. A node's ranks
    are contiguous. If there are too many slots, those with the newest state come first, then those of the
    last round; whole units are compared by their best slots. A unit of ``last`` that is whole is not divided
    to complete another. ``holding``: tells which slots hold the newest state; None: ``newest_holders``.
    """
    ordered, seats = order(nodes, last)
    out = {q.node for q in quarantines}
    usable: list[tuple[int, ...]] = [*map(attrgetter("slots"), ordered)]
    for number in [number for number, node in enumerate(ordered) if node.name in out] if out else ():
        usable[number] = usable_slots(ordered[number], quarantines, now)
    best: Iterable[tuple[int, Sequence[int]]]
    if _are_all_in(ordered, usable, last, limits):
        best = enumerate(usable)
    else:
        best = _best(ordered, usable, seats, limits, (holding or newest_holders)(ordered))
    own = attrgetter("name", "incarnation")
    places = [(*own(ordered[number]), slots) for number, slots in best if slots]
    return seat(places, last.indexed if last is not None else Members())


def _are_all_in(
    nodes: Sequence[Node], usable: Sequence[Sequence[int]], last: Round | None, limits: Limits
) -> bool:
    """Whether ``_best`` chooses all usable slots, in the order of the nodes: there is a place for each, and
    no unit is divided between nodes. Of a large job this is known sooner than what is best."""
    sizes = list(map(len, usable))
    workers, unit = sum(sizes), limits.unit
    if limits.largest(workers) != workers:
        return False
    spares = [node for node, size in zip(nodes, sizes, strict=True) if 0 < node.most < size]
    if spares:
        return False
    if unit == 1:
        return True
    begin = [member.base_rank for member in last.members] if last is not None else []
    return not any(count % unit for count in (*sizes, *begin))


def _best(
    nodes: Sequence[Node],
    usable: Sequence[tuple[int, ...]],
    seats: Sequence[Member | None],
    limits: Limits,
    holding: _Holding,
) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the number of each node in the world, and its slots."""
    offers = offers_of(nodes, usable, seats, holding)
    if limits.unit == 1 or are_whole_units(offers, seats, limits.unit):
        return best_slots(offers, limits)
    return best_units(offers, seats, limits)


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
    return ranks_without(round.indexed, formed)


def ranks_without(members: Iterable[Member], others: Members) -> tuple[RankRange, ...]:
    """Return the ranks of the members whose slots are not among the others'."""
    return tuple(_joined(_ranks_without(members, others)))


def _ranks_without(members: Iterable[Member], others: Members) -> Iterator[tuple[int, int]]:
    there = others.by_node
    differing = [member for member in members if there.get(member.node) is not member]
    for member in differing:
        other = there.get(member.node)
        kept = other.slots if other is not None and other.incarnation == member.incarnation else ()
        if not kept:
            yield member.base_rank, member.base_rank + len(member.slots)
        elif kept != member.slots:
            ranks = enumerate(member.slots, member.base_rank)
            yield from ((rank, rank + 1) for rank, slot in ranks if slot not in kept)


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[RankRange]:
    """Yield the ranges, which ascend, with those that follow each other as one."""
    first = last = 0
    for begin, end in ranges:
        if begin > last:
            if last > first:
                yield RankRange(first, last)
            first = begin
        last = end
    if last > first:
        yield RankRange(first, last)


def workers_at_hand(
    nodes: Sequence[Node], last: Round | None, limits: Limits, quarantines: Sequence[Quarantine], now: float
) -> int:
    """Return the number of workers that could take part, up to ``limits.max``, whether or not they make whole
    units."""
    return form_in_any_memory(nodes, last, Limits(1, limits.max), quarantines, now).workers


_Place = tuple[str, str, Sequence[int]]  # a node's name, its incarnation and its slots


def seat(places: Sequence[_Place], last: Members, first: Members | None = None) -> Members:
    """Return the members with consecutive ranks.

    Who has the same seat as in ``last`` is the same object, and so are members that are all the same.
    ``first``: members that keep their ranks, with which the members begin."""
    members: list[Member] = [*(first if first is not None else _that_stay(last, places))]
    before = last.by_node
    ascending: dict[tuple[int, ...], tuple[int, ...]] = {}  # most nodes have the same slots
    rank = members[-1].base_rank + len(members[-1].slots) if members else 0
    for name, incarnation, given in places[len(members) :] if first is None else places:
        slots = ascending.get(key := tuple(given)) or ascending.setdefault(key, tuple(sorted(key)))
        member, had = Member(name, incarnation, slots, rank, len(members)), before.get(name)
        members.append(had if had is not None and had == member else member)
        rank += len(slots)
    seated = Members(members)
    return last if seated == last else seated


def _that_stay(last: Members, places: Sequence[_Place]) -> Sequence[Member]:
    """Return the members up to the first that does not have its place in the order again."""
    same = map(eq, map(attrgetter("node", "incarnation", "slots"), last), places)
    return last[: sum(takewhile(bool, same))]


def newest_holders(nodes: Iterable[Node]) -> Mapping[str, tuple[int, ...]]:
    """Return the slots that hold the newest whole state, by node; empty if no slot holds one."""
    aged = [((node.age.agreed, node.age.step), node) for node in nodes if node.age is not None]
    newest = max([age for age, _ in aged], default=None)
    return {node.name: node.holders for age, node in aged if age == newest}
