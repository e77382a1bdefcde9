"""The life of a worker: what it may be doing, and the changes from one state to the next.

A state says what the agent knows of one process. The table holds all changes; ``become`` refuses any other.
ARCHITECTURE.md shows the table as a diagram.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Life(StrEnum):
    STARTING = "starting"  # in no round, and not ready for a round
    WAITING = "waiting"  # in no round, and ready for the next
    TRAINING = "training"  # in a round
    FAILING = "failing"  # in a round, and about to end by an exception of its own
    DYING = "dying"  # in a round, and its exit has begun; the event of its exit follows
    LEAVING = "leaving"  # told to leave its round, and to keep its process if it can
    STOPPING = "stopping"  # told to end
    FINISHED = "finished"  # ended with status 0
    FAILED = "failed"  # ended by a fault
    STOPPED = "stopped"  # ended because its agent ended it
    FENCED = "fenced"  # killed, since its agent did not move the fence in time

    @property
    def ended(self) -> bool:
        return self not in TRANSITIONS

    @property
    def in_round(self) -> bool:
        """Whether the worker takes part in a round, also while it fails or leaves."""
        return self in (Life.TRAINING, Life.FAILING, Life.DYING, Life.LEAVING)


_BY_ITSELF: Final = {Life.FINISHED: "finishes", Life.FAILED: "fails", Life.FENCED: "is fenced"}

TRANSITIONS: Final[Mapping[Life | None, Mapping[Life, str]]] = {
    None: {
        Life.STARTING: "is started in advance",
        Life.TRAINING: "is started for a round",
    },
    Life.STARTING: {
        Life.WAITING: "is ready",
        Life.TRAINING: "is given a round",
        Life.STOPPING: "is told to end",
        **_BY_ITSELF,
    },
    Life.WAITING: {
        Life.TRAINING: "is given a round",
        Life.STOPPING: "is told to end",
        **_BY_ITSELF,
    },
    Life.TRAINING: {
        Life.WAITING: "leaves by itself",
        Life.FAILING: "raises an exception",
        Life.DYING: "begins to exit",
        Life.LEAVING: "is told to leave",
        Life.STOPPING: "is told to end",
        **_BY_ITSELF,
    },
    Life.FAILING: {
        Life.STOPPING: "is told to end",
        **_BY_ITSELF,
    },
    Life.DYING: {
        Life.STOPPING: "is told to end",
        **_BY_ITSELF,
    },
    Life.LEAVING: {
        Life.WAITING: "has left the round",
        Life.FAILING: "raises an exception",
        Life.STOPPING: "is told to end",
        Life.STOPPED: "ends as told",
        **_BY_ITSELF,
    },
    Life.STOPPING: {
        Life.STOPPED: "ends as told",
        Life.FENCED: "is fenced",
    },
}


class ImpossibleChange(AssertionError):
    """The table has no change between these two states."""


def become(before: Life | None, after: Life) -> Life:
    """Return ``after``. Raises ImpossibleChange if the table has no change from ``before`` (None: no process)
    to ``after``."""
    if after not in TRANSITIONS.get(before, {}):
        raise ImpossibleChange(f"a worker that is {before or 'absent'} cannot be {after} next")
    return after
