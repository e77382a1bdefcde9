"""Which part of each parameter a rank holds, and the newest commit whose parts make up the whole. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elasticd.channel.worker_messages import Source


class Span(NamedTuple):
    """A range of elements of a flattened parameter: from ``first`` up to, but not including, ``end``."""

    first: int
    end: int

    @property
    def size(self) -> int:
        return max(0, self.end - self.first)


Spans = tuple[Span, ...]  # one span of each parameter, in the parameters' order


class CommitPoint(NamedTuple):
    """A commit, in the order of age (see ``Age``). ``round``: the round of the commit; 0 is the script's
    initial state. ``marks``: the number of commits without a step."""

    round: int
    step: int
    marks: int


INITIAL = CommitPoint(0, 0, 0)


@dataclass(frozen=True, slots=True)
class HeldShard:
    """A copy of one rank's shard, as of the commit ``point``. The spans are those of the parameters, and also
    those of the optimizers' tensors, which have the shapes of the parameters.

    ``guarded``: kept against the loss of that rank. Otherwise the shard is the holder's own, or was handed
    over to the holder. ``ranks``: how many ranks made the commit; 0 if unknown.
    """

    point: CommitPoint
    spans: Spans
    guarded: bool = False
    ranks: int = 0


def whole(sizes: Sequence[int]) -> Spans:
    """Return the spans of all elements. ``sizes``: the number of elements of each parameter."""
    return tuple(Span(0, size) for size in sizes)


def nothing(sizes: Sequence[int]) -> Spans:
    return tuple(Span(0, 0) for _ in sizes)


def without(spans: Spans, left_out: Spans) -> Spans:
    """Return the spans, with none of the parameters of which ``left_out`` has elements."""
    return tuple(Span(0, 0) if out.size else span for span, out in zip(spans, left_out, strict=True))


def missing(size: int, spans: Iterable[Span]) -> int:
    """Return the number of elements, of ``size``, that are in none of the spans."""
    absent = reached = 0
    for span in sorted(span for span in spans if span.size):
        absent += max(0, span.first - reached)
        reached = max(reached, span.end)
    return absent + max(0, size - reached)


def all_missing(sizes: Sequence[int], shards: Sequence[Spans]) -> int:
    """Return the number of elements of all parameters that are in none of the shards."""
    return sum(missing(size, [spans[n] for spans in shards]) for n, size in enumerate(sizes))


def newest_whole_point(sizes: Sequence[int], held: Iterable[Iterable[HeldShard]]) -> CommitPoint | None:
    """Return the newest commit of which every element is held somewhere; None if there is none. ``held``: the
    shards that each rank holds."""
    shards: dict[CommitPoint, list[Spans]] = {}
    for its in held:
        for shard in its:
            shards.setdefault(shard.point, []).append(shard.spans)
    for point in sorted(shards, reverse=True):
        if point > INITIAL and not all_missing(sizes, shards[point]):
            return point
    return None


def source_of(sizes: Sequence[int], held: Iterable[Iterable[HeldShard]], point: CommitPoint) -> Source:
    """Return where the parts of a whole commit come from: from the workers that made them, from replicas of
    lost workers' parts, or from redundant copies."""
    own = [shard for its in held for shard in its if shard.point == point and not shard.guarded]
    if all_missing(sizes, [shard.spans for shard in own]):
        return Source.COPY
    if len(own) < max(shard.ranks for shard in own):
        return Source.REPLICA
    return Source.SURVIVOR
