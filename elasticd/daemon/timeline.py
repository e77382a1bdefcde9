"""The timeline of a run: the job's status over time, in the run's folder. ``elasticd report`` reads it.

A line has fields of the status, and the steps and times of this node's slots. At first there is one line per
second. Lines become rarer as the run lasts, so that a run of a week has a few thousand.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from elasticd.core.ledger import Ledger
from elasticd.telemetry.events import EventFile
from elasticd.telemetry.metrics import Metrics
from elasticd.telemetry.status import JobStatus

FIRST_S = 1.0
SHARE = 400  # the time between two lines is at least this fraction (1/400) of the run's time


class Timeline:
    """Call ``note`` after each measurement. ``began_at``: the agent's start, in seconds since the epoch."""

    def __init__(self, file: EventFile, began_at: float) -> None:
        self._file = file
        self._began_at = began_at
        self._due = began_at
        self._before: tuple[int, str] | None = None

    def note(self, s: JobStatus, ledger: Ledger, metrics: Metrics, *, last: bool = False) -> None:
        """Write a line if one is due, if the round or its phase has changed, or if this is the ``last``."""
        if s.at < self._due and (s.round, s.phase) == self._before and not last:
            return
        self._before = (s.round, s.phase)
        self._due = s.at + max(FIRST_S, (s.at - self._began_at) / SHARE)
        slots: dict[str, dict[str, Any]] = {}
        states = {slot.slot: slot for slot in s.own.slots} if s.own is not None else {}
        for slot, account in sorted(ledger.slots.items()):
            line = states.get(slot)
            slots[str(slot)] = {
                "rank": line.rank if line is not None else None,
                "state": str(line.state) if line is not None else None,
                "steps": metrics.get("elasticd_worker_steps_total", slot) or 0,
                "spent": {str(kind): round(seconds, 3) for kind, seconds in account.spent.items()},
            }
        self._file.note(
            {
                "at": round(s.at, 3),
                "round": s.round,
                "phase": s.phase,
                "world_size": s.world_size,
                "limits": s.limits and asdict(s.limits),
                "step": s.step,
                "steps_per_s": s.steps_per_s,
                "slots": slots,
            }
        )
