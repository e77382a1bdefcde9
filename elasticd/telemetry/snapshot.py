"""What the live view shows, as one immutable value: whoever knows the job publishes a new one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elasticd.core.facts import Limits


class SlotState(StrEnum):
    IDLE = "idle"  # offered, but without a worker
    READY = "ready"  # its worker waits to take part in a round
    STARTING = "starting"  # its worker has made no step yet
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class SlotLine:
    """A slot and its worker, if it has one. ``steps_per_s`` is None while it cannot be told."""

    node: str
    slot: int
    state: SlotState
    rank: int | None = None
    pid: int | None = None
    step: int = 0
    steps_per_s: float | None = None
    tells: bool = True


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, in words. ``at``: seconds since the epoch."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The job as one agent knows it.

    ``round`` is 0 before the first. ``phase`` is a word such as "live"; ``waiting`` says in a
    sentence what the job waits for, or is empty. ``budget_left``: failures the job still survives, which
    the leader alone knows. ``events``: the last ones, oldest first. ``last_failure``: the last
    that was charged, if any.
    """

    job: str
    node: str
    round: int
    phase: str
    world_size: int
    limits: Limits
    slots: tuple[SlotLine, ...] = ()
    restarts: int = 0
    budget_left: int | None = None
    waiting: str = ""
    events: tuple[Event, ...] = ()
    last_failure: Event | None = None

    @property
    def step(self) -> int:
        """The furthest step of any worker: see ``SlotProgress.of_job``."""
        return max((s.step for s in self.slots), default=0)

    @property
    def tells(self) -> bool:
        """Whether that is the job's; else it is counted in this round."""
        return all(s.tells for s in self.slots if s.step)

    @property
    def steps_per_s(self) -> float | None:
        """The pace of the world: that of its slowest worker, as all wait for it."""
        paces = [s.steps_per_s for s in self.slots if s.steps_per_s is not None]
        return min(paces, default=None)
