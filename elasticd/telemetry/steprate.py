"""The steps per second of workers, from their heartbeats. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from elasticd.core.facts import SlotProgress

WINDOW_S = 10.0


@dataclass(slots=True)
class _Strides:
    """The heartbeats of one worker in one round: the times of its steps, and their numbers."""

    round: int
    pid: int
    beats: deque[tuple[float, int]] = field(default_factory=deque)


class StepRates:
    """Steps per second of each slot, over its heartbeats of the last ``WINDOW_S``."""

    def __init__(self) -> None:
        self._slots: dict[tuple[str, int], _Strides] = {}

    def of(self, node: str, beat: SlotProgress, round: int, formed_at: float, now: float) -> float | None:
        """Take the heartbeat of a worker of the round, and return the worker's steps per second; None before
        its first step.

        While one heartbeat with a step is known, the result is the average since ``formed_at``. A worker that
        has made no step for longer than ``WINDOW_S`` is no faster than one that makes its next step now.
        Times are seconds since the epoch.
        """
        if beat.step == 0:
            return None
        strides = self._slots.get((node, beat.slot))
        if strides is None or (strides.round, strides.pid) != (round, beat.pid):
            strides = self._slots[node, beat.slot] = _Strides(round, beat.pid)
        beats = strides.beats
        if not beats or beat.step > beats[-1][1]:
            beats.append((beat.at, beat.step))
        while len(beats) > 2 and beats[-1][0] - beats[0][0] > WINDOW_S:
            beats.popleft()
        (then, first), (last_at, last) = beats[0] if len(beats) > 1 else (formed_at, 0), beats[-1]
        if last_at <= then:
            return None
        per_s = (last - first) / (last_at - then)
        still_s = now - last_at
        return min(per_s, 1 / still_s) if still_s > WINDOW_S else per_s
