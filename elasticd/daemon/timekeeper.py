"""Ties ``core.timekeeping`` to the workers' steps. The simulator uses the same code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elasticd.core import timekeeping
from elasticd.core.agent import AgentState
from elasticd.core.facts import NodeLedger, SlotProgress
from elasticd.core.ledger import Ledger

LOOK_S = 0.5


class Timekeeper:
    """Call ``attend`` after each event and at ``wake_at``, ``find`` once, and ``close`` at the end.

    ``progress`` returns the heartbeats of a round's workers. ``step_times`` returns the times of a slot's
    steps in the round after a given step, oldest first; some may be missing. ``look_s``: the least time
    between two looks at the same state.
    """

    def __init__(
        self,
        state: AgentState,
        began_at: float,
        progress: Callable[[int], Sequence[SlotProgress]],
        step_times: Callable[[int, int], tuple[float, ...]],
        look_s: float = 0.0,
    ) -> None:
        self.wake_at = began_at
        self._look_s = max(LOOK_S, look_s)
        self._progress = progress
        self._step_times = step_times
        self._seen: tuple[object, ...] = ()
        # By slot: a round, and the time of the round's first step.
        self._first_at: dict[int, tuple[int, float]] = {}
        self._known = timekeeping.start(state, began_at)

    @property
    def ledger(self) -> Ledger:
        return self._known.ledger

    @property
    def resumed(self) -> bool:
        """Whether the ledger continues what an earlier agent of this node left."""
        return self._known.resumed

    def find(self, kept: NodeLedger | None) -> None:
        """Take the record that an earlier agent of this node left; None if there is none."""
        self._known = timekeeping.find(self._known, kept)

    def attend(self, state: AgentState, hung: tuple[int, float], now: float) -> NodeLedger | None:
        """Return the record if it is due. ``hung``: see ``timekeeping.keep_time``.

        Reading all workers' pages costs milliseconds, so most events lead to no look.
        """
        seen = (timekeeping.concerned(state), hung, self._known.listed)
        if now < self.wake_at and seen == self._seen:
            return None
        self._seen, self.wake_at = seen, now + self._look_s
        number = state.crew.round.number if state.crew is not None else 0
        beats = self._progress(number) if number else ()
        first_at = {beat.slot: self._first_step_at(beat, number) for beat in beats if beat.step}
        self._known, record = timekeeping.keep_time(self._known, state, beats, first_at, hung, now)
        return record

    def close(self, state: AgentState, now: float) -> NodeLedger:
        """Close the ledger, and return the last record."""
        self._known, record = timekeeping.close(self._known, state, now)
        return record

    def _first_step_at(self, beat: SlotProgress, round: int) -> float:
        """Return the time of the worker's first step in the round; 0 if its page no longer holds the time."""
        known_round, at = self._first_at.get(beat.slot, (0, 0.0))
        if known_round != round:
            times = self._step_times(beat.slot, 0)
            at = times[0] if len(times) >= beat.step else 0.0
            self._first_at[beat.slot] = round, at
        return at
