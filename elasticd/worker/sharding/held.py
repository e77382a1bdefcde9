"""Which shards of which commits the ranks hold, and the newest commit whose parts make up the whole. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from elasticd.channel.worker_messages import Source
from elasticd.worker.sharding.parts import Part, Shapes, complete_cut


class CommitPoint(NamedTuple):
    """A commit, in the order of age (see ``Age``). ``round``: the round of the commit; 0 is the script's
    initial state. ``marks``: the number of commits without a step."""

    round: int
    step: int
    marks: int


INITIAL = CommitPoint(0, 0, 0)


class HeldShard(NamedTuple):
    """A copy of one rank's shard, as of the commit ``point``. It has a part of the parameters, and the same
    part of the optimizers' tensors, which have the shapes of the parameters.

    ``guarded``: kept against the loss of that rank. Otherwise the shard is the holder's own, or was handed
    over to the holder. ``ranks``: how many ranks made the commit; 0 if unknown.
    """

    point: CommitPoint
    part: Part
    guarded: bool = False
    ranks: int = 0


def newest_whole_point(shapes: Shapes, held: Iterable[Iterable[HeldShard]]) -> CommitPoint | None:
    """Return the newest commit of which every element is held somewhere; None if there is none. ``held``: the
    shards that each rank holds."""
    parts: dict[CommitPoint, list[Part]] = {}
    for its in held:
        for shard in its:
            parts.setdefault(shard.point, []).append(shard.part)
    for point in sorted(parts, reverse=True):
        if point > INITIAL and complete_cut(shapes, parts[point]) is not None:
            return point
    return None


def source_of(shapes: Shapes, held: Iterable[Iterable[HeldShard]], point: CommitPoint) -> Source:
    """Return where the parts of a whole commit come from: from the workers that made them, from replicas of
    lost workers' parts, or from redundant copies."""
    own = [shard for its in held for shard in its if shard.point == point and not shard.guarded]
    if complete_cut(shapes, [shard.part for shard in own]) is None:
        return Source.COPY
    if len(own) < max(shard.ranks for shard in own):
        return Source.REPLICA
    return Source.SURVIVOR
