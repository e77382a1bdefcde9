"""The time, in seconds since the epoch, that never goes backwards and never jumps."""

from __future__ import annotations

import time


class SteadyClock:
    """Wall time at the start plus what has passed since, time asleep included.

    Leases are counted with it: an NTP step must neither end one nor stretch one.
    """

    def __init__(self) -> None:
        self._base = time.time() - self._passed()

    def __call__(self) -> float:
        return self._base + self._passed()

    @staticmethod
    def _passed() -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
