"""Simulated time: one heap of events, one seed, one trace.

Everything that happens in a simulation is a call on this heap. Every choice comes from ``Clock.random``, so
the same seed gives the same run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from random import Random

START = 1_800_000_000.0  # seconds since the epoch; only has to look like a date


class Timer(list):  # type: ignore[type-arg]  # [when, order, call]: lists compare fast
    """A call to be made. A cancelled call stays on the heap, with None as its call."""

    __slots__ = ()

    def cancel(self) -> None:
        self[2] = None


class Clock:
    """The time, what is yet to happen, and what happened.

    >>> clock = Clock(seed=7)
    >>> timer = clock.after(2.0, lambda: clock.note("a", "woke"))
    >>> clock.run(until=clock.now() + 5.0)
    >>> clock.now() - START, [what for _, _, what in clock.trace]
    (5.0, ['woke'])
    """

    def __init__(self, seed: int | str, trace_max: int = 4000) -> None:
        self.seed = seed
        self.events = 0
        self.trace: deque[tuple[float, str, object]] = deque(maxlen=trace_max)
        self.after_each: Callable[[], None] | None = None
        self._now = START
        self._heap: list[Timer] = []
        self._order = count()
        self._randoms: dict[str, Random] = {}

    def now(self) -> float:
        """Seconds since the epoch."""
        return self._now

    def at(self, when: float, call: Callable[[], None]) -> Timer:
        timer = Timer((max(when, self._now), next(self._order), call))
        heappush(self._heap, timer)
        return timer

    def after(self, delay_s: float, call: Callable[[], None]) -> Timer:
        return self.at(self._now + delay_s, call)

    def random(self, purpose: str) -> Random:
        """Return the random numbers for one purpose. Drawing more for one purpose does not change those of
        another."""
        if purpose not in self._randoms:
            self._randoms[purpose] = Random(f"{self.seed}/{purpose}")
        return self._randoms[purpose]

    def note(self, who: str, what: object) -> None:
        self.trace.append((self._now, who, what))

    def told(self) -> str:
        """Return the trace as text for people."""
        return "\n".join(f"{when - START:9.3f}  {who:<10} {what}" for when, who, what in self.trace)

    def run(self, until: float | None = None, done: Callable[[], bool] | None = None) -> bool:
        """Let things happen until that time, or until ``done`` returns true; ``done`` is called after each
        event.

        Return whether ``done`` returned true. Without ``until`` the run also ends when no event is left.
        """
        heap = self._heap
        while heap:
            if until is not None and heap[0][0] > until:
                break
            when, _, call = heappop(heap)
            if call is None:
                continue
            self._now = when
            self.events += 1
            call()
            if self.after_each is not None:
                self.after_each()
            if done is not None and done():
                return True
        if until is not None:
            self._now = max(self._now, until)
        return False
