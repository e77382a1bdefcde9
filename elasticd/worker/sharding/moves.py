"""Who sends which part of the state to whom. Pure: every rank computes the same plan."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from elasticd.worker.sharding.spans import CommitPoint, HeldShard, Span, Spans


class Move(NamedTuple):
    """The ``span`` of a parameter goes from the ``sender`` to the ``receiver``, which may be the same rank.
    ``shard``: the number of the shard, among those that the sender holds."""

    parameter: int
    span: Span
    sender: int
    shard: int
    receiver: int


def plan_moves(
    held: Sequence[Sequence[HeldShard]], point: CommitPoint, wanted: Sequence[Spans]
) -> list[Move]:
    """Return the moves that give each rank the spans that the rank wants, as of one commit.

    A rank takes what it holds itself from its own memory. The rest comes from the holders that have sent the
    fewest elements so far. ``held``: the shards that each rank holds. ``wanted``: the spans of each rank.
    Raises ValueError if a wanted element is held nowhere.
    """
    sources = [
        (rank, number, shard.spans)
        for rank, its in enumerate(held)
        for number, shard in enumerate(its)
        if shard.point == point
    ]
    sent = [0] * len(held)
    moves: list[Move] = []
    for parameter in range(len(wanted[0]) if wanted else 0):
        holders = sorted((spans[parameter], rank, number) for rank, number, spans in sources)
        firsts = [its.first for its, _, _ in holders]
        longest = max((its.size for its, _, _ in holders), default=0)
        for receiver, spans in enumerate(wanted):
            at, end = spans[parameter]
            near = holders[bisect_left(firsts, at - longest) : bisect_left(firsts, end)]
            while at < end:
                span, sender, shard = _holder(near, at, end, receiver, sent)
                moves.append(Move(parameter, span, sender, shard, receiver))
                sent[sender] += span.size if sender != receiver else 0
                at = span.end
    return moves


def _holder(
    holders: Sequence[tuple[Span, int, int]], at: int, end: int, receiver: int, sent: Sequence[int]
) -> tuple[Span, int, int]:
    """Return a span that begins at ``at``, and its holder: the rank and the number of the shard."""
    here = [holder for holder in holders if holder[0].first <= at < holder[0].end]
    if not here:
        raise ValueError(f"element {at} is held nowhere")
    own = [holder for holder in here if holder[1] == receiver]
    if own:
        its, rank, number = max(own, key=lambda holder: holder[0].end)
        return Span(at, min(end, its.end)), rank, number
    until = min((its.first for its, rank, _ in holders if rank == receiver and its.first > at), default=end)
    its, rank, number = min(here, key=lambda holder: (sent[holder[1]], holder[1], holder[2]))
    return Span(at, min(end, until, its.end)), rank, number


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
        (rank, number, shard.spans)
        for rank, its in enumerate(held)
        for number, shard in enumerate(its)
        if shard.point == point
    ]
    load = {rank: 0 for rank, goes in enumerate(going) if not goes}
    there = {span for rank, _, spans in shards if not going[rank] for span in _numbered(spans)}
    passed: list[Passing] = []
    for rank, number, spans in shards:
        if load and not there.issuperset(_numbered(spans)):
            there.update(_numbered(spans))
            receiver = min(load, key=lambda other: (load[other], other))
            load[receiver] += 1
            passed.append(Passing(rank, number, receiver))
    return passed


def _numbered(spans: Spans) -> Iterator[tuple[int, Span]]:
    """Yield each parameter's number and span, unless it is empty."""
    return ((number, span) for number, span in enumerate(spans) if span.size)


def replicas(spans: Sequence[Spans]) -> list[tuple[int, ...]]:
    """Return, for each rank, all ranks that have the same spans, itself among them (hybrid sharding)."""
    groups: dict[Spans, list[int]] = {}
    for rank, its in enumerate(spans):
        groups.setdefault(its, []).append(rank)
    return [tuple(groups[its]) for its in spans]


def guardians(
    nodes: Sequence[str], redundancy: int, groups: Sequence[tuple[int, ...]] = ()
) -> list[tuple[int, ...]]:
    """Return, for each rank, the other ranks that keep copies of its shard, so that ``redundancy`` other
    ranks have the shard.

    Replicas count as copies, and only the first of them sends its shard to guardians. Guardians are on other
    nodes, each on another one, as far as there are nodes. Each rank guards about as many shards. ``nodes``:
    the node of each rank. ``groups``: see ``replicas``; empty if no two ranks have the same spans.
    """
    size = len(nodes)
    groups = groups or [(rank,) for rank in range(size)]
    chosen: list[list[int]] = [[] for _ in nodes]
    load = [0] * size
    lacks = [
        _copies_missing(nodes, redundancy, group) if group[0] == rank else 0
        for rank, group in enumerate(groups)
    ]
    for turn in range(max(lacks, default=0)):
        for rank, its in enumerate(chosen):
            if turn >= lacks[rank]:
                continue
            have = {*groups[rank], *its}
            near = {nodes[other] for other in have}

            def preference(other: int, rank: int = rank, near: set[str] = near) -> tuple[bool, int, int]:
                return nodes[other] in near, load[other], (other - rank) % size

            guardian = min((r for r in range(size) if r not in have), key=preference)
            its.append(guardian)
            load[guardian] += 1
    return [tuple(its) for its in chosen]


def _copies_missing(nodes: Sequence[str], redundancy: int, group: tuple[int, ...]) -> int:
    """Return how many further copies a group of replicas needs. Replicas on one node count once, unless
    there is a replica on each node."""
    there = {nodes[rank] for rank in group}
    copies = len(group) if there == set(nodes) else len(there)
    return max(0, min(redundancy + 1 - copies, len(nodes) - len(group)))


def heirs(
    going: Sequence[bool], guards: Sequence[Sequence[int]], groups: Sequence[tuple[int, ...]] = ()
) -> dict[int, int]:
    """Return, for each rank that goes and whose shard no rank that stays has, a rank that stays and takes the
    shard over. Of replicas, only the first is named. Empty if no rank stays. ``groups``: as for
    ``guardians``."""
    groups = groups or [(rank,) for rank in range(len(going))]
    staying = [rank for rank, goes in enumerate(going) if not goes]
    load = dict.fromkeys(staying, 0)
    found: dict[int, int] = {}
    for rank, group in enumerate(groups):
        if rank != group[0] or not staying:
            continue
        having = {*group, *(guard for member in group for guard in guards[member])}
        if all(going[other] for other in having):
            heir = min(staying, key=lambda other: (load[other], other))
            load[heir] += 1
            found[rank] = heir
    return found
