"""How fast to write."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class RateLimit:
    """Holds writers, all of them together, to a bandwidth in bytes per second. Threads may share it."""

    def __init__(
        self,
        bytes_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._bytes_s = bytes_s
        self._clock = clock
        self._hurry = threading.Event()
        self._sleep = sleep or self._hurry.wait
        self._lock = threading.Lock()
        self._due = 0.0

    def wrote(self, size: int) -> None:
        """Returns when more may be written."""
        with self._lock:
            now = self._clock()
            due = self._due = now if self._hurry.is_set() else max(self._due, now) + size / self._bytes_s
        if due > now:
            self._sleep(due - now)

    def hurry(self, on: bool) -> None:
        """From now on, and for those who wait: as fast as it goes; or no more, and what was written
        meanwhile does not count."""
        if on:
            self._hurry.set()
        else:
            self._hurry.clear()
