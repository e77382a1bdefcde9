"""Give each worker its part of a split model for a new world, as of one commit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from elasticd.channel.worker_messages import Source
from elasticd.core.age import Age
from elasticd.worker.commit.committed import CommittedState
from elasticd.worker.joining.exchange import StateLost
from elasticd.worker.joining.transfer import Transfer, receive_snapshot, send_snapshot
from elasticd.worker.sharding.held import INITIAL, CommitPoint
from elasticd.worker.splitting.split_state import (
    GENERATIONS,
    HeldPart,
    PartCommit,
    SplitState,
    newest_whole_point,
)
from elasticd.worker.world.group import World, gathered

_log = logging.getLogger(__name__)
_ABSENT = (-1, -1, -1)


def agree_on_parts(state: CommittedState, split: SplitState, world: World) -> Source:
    """Give all workers of the world the same commit, each its part. Return where the state came from.

    Raises StateLost. Raises WorldChanged if the world ends first; nothing that was held is lost then.
    """
    state.begin()
    held = _held(split, world)
    unit = split.model.unit
    place = world.rank % unit
    with world.or_over():
        split.model.lay_out(world.number)
    state.lay_out()
    point = newest_whole_point(unit, held)
    fresh = not any(its.points for its in held)
    age = Age(point.round, point.step) if point is not None else None
    tier = ""
    if age is None:
        tier = state.resume(world)
    elif state.has_newer(age, world):
        tier = state.resume(world, beyond=age)
    if tier:
        split.place, split.generations = place, []
        _keep_present(state, split, world)
        state.agree(world.number)
        return Source(tier)
    if point is None and not fresh:
        raise StateLost(_why_lost(unit, held))
    if point is None:
        point = INITIAL
        state.last.keep()
        split.place, split.generations = place, [PartCommit(INITIAL, state.last.kept, split.model.copied())]
        held = [HeldPart(rank % unit, (INITIAL,) if rank < unit else ()) for rank in range(world.size)]
    commit = _exchanged(state, split, world, point, held)
    split.model.fill(commit.part)
    state.last.take(commit.kept)
    state.step = point.step
    split.place, split.generations = place, [commit]
    _keep_present(state, split, world, commit.part)
    state.agree(world.number)
    if fresh:
        return Source.SCRIPT
    state.survived()
    return Source.SURVIVOR


def _keep_present(
    state: CommittedState, split: SplitState, world: World, part: dict[str, Any] | None = None
) -> None:
    """Note the present state as a commit of this world. ``part``: a copy of the part, if there is one."""
    at = CommitPoint(world.number, state.step, state.progress.marks)
    split.generations.append(PartCommit(at, state.last.kept, part or split.model.copied()))


def _exchanged(
    state: CommittedState, split: SplitState, world: World, point: CommitPoint, held: Sequence[HeldPart]
) -> PartCommit:
    """Return the commit of the part that this worker has in this world. Of several workers that hold a part,
    the lowest rank sends. Raises WorldChanged."""
    unit = split.model.unit
    arrived: PartCommit | None = None
    for place in range(unit):
        holders = [rank for rank, its in enumerate(held) if its.place == place and point in its.points]
        takers = tuple(rank for rank in range(place, world.size, unit) if rank not in holders)
        transfer = Transfer(holders[0], takers, fresh=point == INITIAL)
        if takers and world.rank == transfer.source:
            mine = split.commit_at(point)
            with world.or_over():
                send_snapshot({**state.snapshot_of(mine.kept), "part": mine.part}, transfer)
        elif world.rank in takers:
            with world.or_over():
                snapshot = receive_snapshot(transfer, world)
            arrived = PartCommit(point, state.kept_of(snapshot), snapshot["part"])
    return arrived or split.commit_at(point)


def _held(split: SplitState, world: World) -> list[HeldPart]:
    """Return what each worker holds, by rank."""
    points = [*split.held.points, *[_ABSENT] * GENERATIONS][:GENERATIONS]
    said = gathered([split.place, *(number for point in points for number in point)], world)
    return [
        HeldPart(
            place,
            tuple(
                CommitPoint(*numbers[i : i + 3])
                for i in range(0, len(numbers), 3)
                if tuple(numbers[i : i + 3]) != _ABSENT
            ),
        )
        for place, *numbers in said
    ]


def _why_lost(unit: int, held: Sequence[HeldPart]) -> str:
    newest = max(point for its in held for point in its.points)
    there = {its.place for its in held if newest in its.points}
    missing = min({*range(unit)} - there)
    return (
        f"no worker has the part of place {missing} in a unit of {unit} as of step {newest.step}, and there "
        "is no checkpoint: run more units, or give State checkpoints"
    )
