"""How fast to write."""

from __future__ import annotations

from collections.abc import Callable


class Pace:
    """Holds a writer to a bandwidth, in bytes per second."""

    def __init__(self, bytes_s: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._bytes_s = bytes_s
        self._clock = clock
        self._sleep = sleep
        self._due = 0.0

    def wrote(self, size: int) -> None:
        now = self._clock()
        self._due = max(self._due, now) + size / self._bytes_s
        if self._due > now:
            self._sleep(self._due - now)
