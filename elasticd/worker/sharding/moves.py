"""Who sends which part of the state to whom. Pure: all ranks compute parts of the same plan."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from itertools import chain, cycle
from typing import Final, NamedTuple

from elasticd.worker.sharding.held import CommitPoint, HeldShard
from elasticd.worker.sharding.parts import Part, Shapes, Span, complete_cut

_UNCUT: Final = -1  # stands for the place of a part, and means all parameters that are not cut


class Move(NamedTuple):
    """The ``span`` of a parameter goes from the ``sender`` to the ``receiver``, which may be the same rank.
    ``shard``: the number of the shard, among those that the sender holds."""

    parameter: int
    receiver: int
    span: Span
    sender: int
    shard: int


class MovePlan:
    """The moves that give each rank its part, as of one commit. The plan costs a rank a few operations for
    each other rank, and each parameter of its own part, since a rank asks for its own moves only.

    A rank takes what it holds itself from its own memory. The others that want the same take turns at those
    who hold it. ``held``: the shards that each rank holds. ``wanted``: the part that each rank wants, of one
    cut; or ``NOTHING``. Raises ValueError if no cut of the commit is complete.
    """

    def __init__(
        self,
        shapes: Shapes,
        held: Sequence[Sequence[HeldShard]],
        point: CommitPoint,
        wanted: Sequence[Part],
    ) -> None:
        there = complete_cut(shapes, (shard.part for its in held for shard in its if shard.point == point))
        if there is None:
            raise ValueError(f"parts of step {point.step} are held nowhere")
        self._shapes, self._there, self._wanted = shapes, there, wanted
        self._cut = next((part.cut for part in wanted if part.cut.parts), there)
        # By the place of a part, the ranks that hold the part, and the number of their shard. The parameters
        # that are not cut are a further part.
        self._holders: dict[int, dict[int, int]] = {}
        for rank, its in enumerate(held):
            for number, shard in enumerate(its):
                if shard.point == point and shard.part.cut == there:
                    self._holders.setdefault(shard.part.place, {}).setdefault(rank, number)
                    if not shard.part.copy:
                        self._holders.setdefault(_UNCUT, {}).setdefault(rank, number)
        self._in_turn = {place: [*holders] for place, holders in self._holders.items()}
        self._wanting: dict[int, list[int]] = {}  # by the place of a part, the ranks that want the part
        self._turns: list[int] = []  # of each rank
        for rank, part in enumerate(wanted):
            ranks = self._wanting.setdefault(part.place, []) if part.cut.parts else []
            self._turns.append(part.place + len(ranks))
            ranks.append(rank)

    def of_rank(self, rank: int) -> list[Move]:
        """Return what the rank sends and receives. Two ranks have the moves between them in the same order,
        and all ranks have their moves in an order that suits all (see ``transport``)."""
        return sorted({*self._received(rank), *self._sent(rank)})

    def _received(self, rank: int) -> Iterator[Move]:
        for parameter, wanted in enumerate(self._shapes.spans(self._wanted[rank])):
            for place, span in self._pieces(parameter, wanted):
                sender = self._sender(place, rank)
                yield Move(parameter, rank, span, sender, self._holders[place][sender])

    def _sent(self, rank: int) -> Iterator[Move]:
        uncut, uncut_there = {*self._cut.uncut}, {*self._there.uncut}
        for place, holders in self._holders.items():
            if rank not in holders:
                continue
            takers: dict[int, list[int]] = {}  # by the part that they want
            for parameter in range(len(self._shapes.sizes)):
                if (parameter in uncut_there) is not (place == _UNCUT):
                    continue
                its = self._span_there(parameter, place)
                wanting: Iterable[int] = self._wanting if its.size else ()
                if parameter not in uncut:
                    wanting = self._shapes.parts_at(parameter, self._cut, its)
                for part in wanting:
                    if part not in takers:
                        takers[part] = self._takers(rank, place, part)
                    span = its
                    if parameter not in uncut:
                        span = _both(its, self._shapes.span(parameter, self._cut, part))
                    for receiver in takers[part]:
                        yield Move(parameter, receiver, span, rank, holders[rank])

    def _takers(self, rank: int, place: int, part: int) -> list[int]:
        """Return the other ranks that want the part, and take what is in part ``place`` from the rank."""
        ranks = self._wanting.get(part, ())
        return [other for other in ranks if other != rank and self._sender(place, other) == rank]

    def _sender(self, place: int, receiver: int) -> int:
        """Return the rank from which the receiver takes what is in part ``place``."""
        holders = self._in_turn[place]
        return receiver if receiver in self._holders[place] else holders[self._turns[receiver] % len(holders)]

    def _pieces(self, parameter: int, wanted: Span) -> Iterator[tuple[int, Span]]:
        """Yield the place of each part that has elements of the span, and its span of these."""
        if parameter in self._there.uncut:
            if wanted.size:
                yield _UNCUT, wanted
            return
        for place in self._shapes.parts_at(parameter, self._there, wanted):
            yield place, _both(wanted, self._span_there(parameter, place))

    def _span_there(self, parameter: int, place: int) -> Span:
        if place == _UNCUT:
            return Span(0, self._shapes.sizes[parameter])
        return self._shapes.span(parameter, self._there, place)


def _both(span: Span, other: Span) -> Span:
    return Span(max(span.first, other.first), min(span.end, other.end))


class Passing(NamedTuple):
    """A whole shard goes from the ``sender``, which leaves, to the ``receiver``, which stays. ``shard``: the
    number of the shard, among those that the sender holds."""

    sender: int
    shard: int
    receiver: int


def plan_passing(
    held: Sequence[Sequence[HeldShard]], point: CommitPoint, going: Sequence[bool]
) -> list[Passing]:
    """Return which shards the ranks that go give to ranks that stay, so that these have all spans of one
    commit. Empty if no rank stays. ``held``: the shards that each rank holds. A copy lacks the parameters
    that each rank has whole."""
    shards = [
        (rank, number, shard.part)
        for rank, its in enumerate(held)
        for number, shard in enumerate(its)
        if shard.point == point
    ]
    staying = [rank for rank, goes in enumerate(going) if not goes]
    in_turn = cycle(staying)
    there = {place for rank, _, part in shards if not going[rank] for place in _places(part)}
    passed: list[Passing] = []
    for rank, number, part in shards:
        if staying and not there.issuperset(_places(part)):
            there.update(_places(part))
            passed.append(Passing(rank, number, next(in_turn)))
    return passed


def _places(part: Part) -> list[int]:
    """Return the part's place, and another one if it has parameters that are not cut."""
    if not part.cut.parts:
        return []
    return [part.place, _UNCUT] if part.cut.uncut and not part.copy else [part.place]


def replicas(parts: Sequence[Hashable]) -> list[tuple[int, ...]]:
    """Return, for each rank, all ranks that have the same part, itself among them (hybrid sharding)."""
    groups: dict[Hashable, list[int]] = {}
    for rank, its in enumerate(parts):
        groups.setdefault(its, []).append(rank)
    of_part = {its: tuple(ranks) for its, ranks in groups.items()}
    return [of_part[its] for its in parts]


def guardians(
    nodes: Sequence[str], redundancy: int, groups: Sequence[tuple[int, ...]] = ()
) -> list[tuple[int, ...]]:
    """Return, for each rank, the other ranks that keep copies of its shard, so that ``redundancy`` other
    ranks have the shard.

    Replicas count as copies, and only the first of them sends its shard to guardians. Guardians are on other
    nodes, each on another one, as far as there are nodes. Each rank guards about as many shards. ``nodes``:
    the node of each rank. ``groups``: see ``replicas``; empty if no two ranks have the same part.
    """
    groups = groups or [(rank,) for rank in range(len(nodes))]
    chosen: list[list[int]] = [[] for _ in nodes]
    among = _Guardians(nodes)
    lacks = [among.missing(redundancy, group) if group[0] == rank else 0 for rank, group in enumerate(groups)]
    for turn in range(max(lacks, default=0)):
        for rank, its in enumerate(chosen):
            if turn < lacks[rank]:
                its.append(among.choose(rank, {*groups[rank], *its}))
    return [tuple(its) for its in chosen]


class _Guardians:
    """The ranks, by the number of shards that they guard."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes, self._all_nodes = nodes, len({*nodes})
        self._guarding = [[*range(len(nodes))]]  # by number of shards, the ranks in order

    def missing(self, redundancy: int, group: tuple[int, ...]) -> int:
        """Return how many further copies a group of replicas needs. Replicas on one node count once, unless
        there is a replica on each node."""
        there = len({self._nodes[rank] for rank in group})
        copies = len(group) if there == self._all_nodes else there
        return max(0, min(redundancy + 1 - copies, len(self._nodes) - len(group)))

    def choose(self, rank: int, have: Collection[int]) -> int:
        """Return one more guardian for the rank's shard, which the ranks ``have`` have: a rank on another
        node if there is one, of these a rank that guards the fewest shards, of these the next one."""
        near = {self._nodes[other] for other in have}
        is_there = self._all_nodes > len(near)
        for number, ranks in enumerate(self._guarding):
            first = bisect_right(ranks, rank)
            for place in chain(range(first, len(ranks)), range(first)):
                if self._nodes[ranks[place]] not in near if is_there else ranks[place] not in have:
                    return self._note(number, place)
        raise AssertionError("all ranks have the shard")

    def _note(self, number: int, place: int) -> int:
        rank: int = self._guarding[number].pop(place)
        if number + 1 == len(self._guarding):
            self._guarding.append([])
        insort(self._guarding[number + 1], rank)
        return rank


def heirs(
    going: Sequence[bool], guards: Sequence[Sequence[int]], groups: Sequence[tuple[int, ...]] = ()
) -> dict[int, int]:
    """Return, for each rank that goes and whose shard no rank that stays has, a rank that stays and takes the
    shard over. Of replicas, only the first is named. Empty if no rank stays. ``groups``: as for
    ``guardians``."""
    groups = groups or [(rank,) for rank in range(len(going))]
    staying = [rank for rank, goes in enumerate(going) if not goes]
    in_turn = cycle(staying)
    found: dict[int, int] = {}
    for rank, group in enumerate(groups):
        if rank != group[0] or not staying:
            continue
        having = {*group, *(guard for member in group for guard in guards[member])}
        if all(going[other] for other in having):
            found[rank] = next(in_turn)
    return found
