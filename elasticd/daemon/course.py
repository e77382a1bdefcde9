"""Notes the course of the run in its folder: numbers now and then, for who looks at it afterwards.

Every second at first, and rarer the longer the run lasts: a few thousand lines tell of a week.
"""

from __future__ import annotations

from typing import Any

from elasticd.core.ledger import Ledger
from elasticd.telemetry.events import EventFile
from elasticd.telemetry.metrics import Metrics
from elasticd.telemetry.status import JobStatus

FIRST_S = 1.0
SHARE = 400  # of the time that there is to tell of


class Course:
    """``note`` whenever something was measured. ``began_at``: of the agent, seconds since the epoch."""

    def __init__(self, file: EventFile, began_at: float) -> None:
        self._file = file
        self._began_at = began_at
        self._due = began_at
        self._before: tuple[int, str] | None = None

    def note(self, s: JobStatus, ledger: Ledger, metrics: Metrics, now: float, *, last: bool = False) -> None:
        """One line, if it is due or something has changed. ``last``: in any case."""
        if now < self._due and (s.round, s.phase) == self._before and not last:
            return
        self._before = (s.round, s.phase)
        self._due = now + max(FIRST_S, (now - self._began_at) / SHARE)
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
                "at": round(now, 3),
                "round": s.round,
                "phase": s.phase,
                "world": s.world_size,
                "min": s.limits.min if s.limits else 1,
                "max": s.limits.max if s.limits else 1,
                "step": s.step or 0,
                "slots": slots,
            }
        )
