"""The job's state as one immutable value. Each change publishes a new one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elasticd.core.facts import Limits


class SlotState(StrEnum):
    IDLE = "idle"  # part of the job, but without a worker
    READY = "ready"  # its worker waits for a round
    STARTING = "starting"  # its worker has made no step in this round
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class SlotLine:
    """A slot and its worker, if it has one. ``steps_per_s`` is None while it is unknown. ``tells``: the
    script reports its own step number; otherwise steps are counted in this round."""

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
    """An event in words. ``at``: seconds since the epoch."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The job as one agent knows it.

    ``round`` is 0 before the first. ``phase`` is a word such as "live". ``waiting`` is a sentence on what the
    job waits for, or empty. ``budget_left``: the failures that the job still survives; only the leader knows
    the number. ``events``: the last events, oldest first. ``last_failure``: the last failure that was
    charged, if any.
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
        """The highest step of any worker: see ``SlotProgress.of_job``."""
        return max((s.step for s in self.slots), default=0)

    @property
    def tells(self) -> bool:
        """Whether ``step`` is the job's step; otherwise steps are counted in this round."""
        return all(s.tells for s in self.slots if s.step)

    @property
    def steps_per_s(self) -> float | None:
        """The pace of the slowest worker, which all others wait for."""
        paces = [s.steps_per_s for s in self.slots if s.steps_per_s is not None]
        return min(paces, default=None)
