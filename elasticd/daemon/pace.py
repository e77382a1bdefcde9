"""How fast a worker steps, from readings of its step counter."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0


class Pace:
    """Steps per second over the last readings; forgets what is older than ``WINDOW_S``."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque()

    def read(self, now: float, step: int) -> None:
        if self._readings and step < self._readings[-1][1]:
            self._readings.clear()  # another worker in the same slot
        self._readings.append((now, step))
        while now - self._readings[0][0] > WINDOW_S and len(self._readings) > 2:
            self._readings.popleft()

    @property
    def steps_per_s(self) -> float | None:
        """None until two readings differ in time."""
        if len(self._readings) < 2:
            return None
        (then, first), (now, last) = self._readings[0], self._readings[-1]
        return (last - first) / (now - then) if now > then else None
