"""A clock in seconds since the epoch that never goes backwards and never jumps."""

from __future__ import annotations

import time


class SteadyClock:
    """The wall time at the start, plus the time that has passed since, including suspended time.

    Leases are measured with this clock: an NTP step must neither end nor extend a lease.
    """

    def __init__(self) -> None:
        self._base = time.time() - self._passed()

    def __call__(self) -> float:
        return self._base + self._passed()

    @staticmethod
    def _passed() -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
