"""A limit on the rate of writing, and how people write one."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

_TIMES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_TIMES |= {f"{letter}I": 1 << 10 * n for n, letter in enumerate("KMGT", 1)}
_BYTES_MAX = 1 << 60


def parse_rate(text: str) -> int:
    """Return the bytes per second of a rate such as ``200M``. Raises ValueError with a clause for people."""
    return parse_size(text, "bytes a second")


def parse_size(text: str, unit: str = "bytes") -> int:
    """Return the number of ``200M``, ``1.5G``, ``512Mi`` or a plain number. Raises ValueError with a clause
    for people. ``unit``: what is counted."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]I?)?B?", text.strip().upper())
    size = float(match[1]) * _TIMES[match[2] or ""] if match else 0
    if not 1 <= size < _BYTES_MAX:
        raise ValueError(f"{text!r} is no number of {unit}, such as 200M")
    return int(size)


class RateLimit:
    """Limits all writers together to a bandwidth in bytes per second. Threads may share a limit."""

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
        """Count ``size`` written bytes, and block until more may be written."""
        with self._lock:
            now = self._clock()
            due = self._due = now if self._hurry.is_set() else max(self._due, now) + size / self._bytes_s
        if due > now:
            self._sleep(due - now)

    def hurry(self, on: bool) -> None:
        """Suspend or restore the limit. A suspended limit also releases blocked writers, and bytes written
        meanwhile do not count."""
        if on:
            self._hurry.set()
        else:
            self._hurry.clear()
