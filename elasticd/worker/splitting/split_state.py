"""What a worker keeps of the last commits of a State whose model is split over units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from elasticd.worker.sharding.held import CommitPoint
from elasticd.worker.splitting.split_model import SplitModel
from elasticd.worker.world.group import World

GENERATIONS = 2  # two workers are at most one commit apart, so both have the older of their commits


class HeldPart(NamedTuple):
    """What a worker holds: the part of the workers at that place of their units, as of these commits."""

    place: int
    points: tuple[CommitPoint, ...]


class PartCommit(NamedTuple):
    """A commit of this worker's part. ``kept``: see ``LastCommit``. ``part``: see ``SplitModel.copied``."""

    point: CommitPoint
    kept: dict[str, Any]
    part: dict[str, Any]


class SplitState:
    """The commits that a worker can go back to, or give to workers at the same place of their units.

    ``place``: in the unit, of the last world. ``generations``: the last commits, the newest last.
    """

    def __init__(self, model: SplitModel) -> None:
        self.model = model
        self.place = 0
        self.generations: list[PartCommit] = []

    @property
    def held(self) -> HeldPart:
        return HeldPart(self.place, tuple(commit.point for commit in self.generations))

    def commit_at(self, point: CommitPoint) -> PartCommit:
        return next(commit for commit in self.generations if commit.point == point)

    def keep(self, point: CommitPoint, kept: dict[str, Any], world: World) -> None:
        """Copy the present state as of a commit. No worker waits for another here: the other units have the
        same parts."""
        self.generations = [
            *self.generations[1 - GENERATIONS :],
            PartCommit(point, kept, self.model.copied()),
        ]

    def forget(self) -> None:
        """Keep no commit: the world cannot change, so no world will go back to one."""
        self.generations.clear()

    def hand_over(self, world: World) -> None:
        """Leave after the last commit of a world: the other units have what this worker has."""


def newest_whole_point(unit: int, held: Sequence[HeldPart]) -> CommitPoint | None:
    """Return the newest commit of which the part of each place is held; None if there is none."""
    for point in sorted({point for its in held for point in its.points}, reverse=True):
        if {its.place for its in held if point in its.points} >= {*range(unit)}:
            return point
    return None
