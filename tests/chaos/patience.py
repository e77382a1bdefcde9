"""How much processor time a job could have used. A second does not count in which a thread of the job was
ready but got no processor. A job that is stuck does not wait for a processor, so the job is found soon even
on a busy machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from tests.chaos.places import tasks


def had(elapsed_s: float, before: dict[str, int], after: dict[str, int]) -> float:
    """Return the seconds in which no thread waited for a processor. ``before`` and ``after``: the nanoseconds
    that each thread has waited since its start."""
    kept_ns = max((ns - before.get(thread, 0) for thread, ns in after.items()), default=0)
    return max(0.0, elapsed_s - kept_ns / 1e9)


def slowness(load: float, cores: int) -> float:
    """Return the factor by which leases must be longer on a busy machine, as an operator would set with
    ``--node-ttl``."""
    return min(10.0, max(1.0, load / (3 * cores)))


class Machine:
    """``had_s``: the time that these processes could have used so far. The caller must look often."""

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        self.had_s = 0.0
        self.passed_s = 0.0
        self._pids = pids
        self._at = time.monotonic()
        self._kept = self._read()

    def look(self) -> float:
        now, kept = time.monotonic(), self._read()
        elapsed_s = now - self._at
        self.passed_s += elapsed_s
        self.had_s += had(elapsed_s, self._kept, kept)
        self._at, self._kept = now, kept
        return self.had_s

    def _read(self) -> dict[str, int]:
        found = {}
        for task in tasks(self._pids()):
            with contextlib.suppress(OSError, ValueError, IndexError):
                found[task.name] = int((task / "schedstat").read_text().split()[1])
        return found
