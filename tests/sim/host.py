"""The operating system's side of one simulated agent: alive, paused, slow, or with a clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tests.sim.clock import Clock, Timer


class SimHost:
    """Where an agent runs. Whatever is to run inside the agent goes through ``call``.

    ``skew_s``: how far this node's clock is ahead. ``slow_s``: how long it takes to get round to
    anything. ``crowded``: the most that a worker is held up in a step, for want of a processor, of what the
    step takes. A paused agent (SIGSTOP) gets to nothing; what came for it waits, in order.
    """

    def __init__(self, clock: Clock, name: str, skew_s: float = 0.0) -> None:
        self.clock = clock
        self.name = name
        self.skew_s = skew_s
        self.slow_s = 0.0
        self.crowded = 0.0
        self.alive = True
        self.paused = False
        self._backlog: deque[Callable[[], None]] = deque()
        self._free_at = 0.0  # a slow agent does one thing after the other

    def now(self) -> float:
        return self.clock.now() + self.skew_s

    def call(self, run: Callable[[], None]) -> None:
        """Run this in the agent: now, or once it is no longer paused, or never when it is dead."""
        if not self.alive:
            return
        if self.paused or self._backlog:
            self._backlog.append(run)
        elif self.slow_s or self._free_at > self.clock.now():
            self._free_at = max(self._free_at, self.clock.now()) + self.slow_s
            self.clock.at(self._free_at, lambda: self._late(run))
        else:
            run()

    def after(self, delay_s: float, run: Callable[[], None]) -> Timer:
        """A timer of the agent's own."""
        return self.clock.after(delay_s, lambda: self.call(run))

    def at(self, when: float, run: Callable[[], None]) -> Timer:
        """The same, at a time of this node's clock."""
        return self.clock.at(when - self.skew_s, lambda: self.call(run))

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            self.clock.after(0.0, self._catch_up)

    def die(self) -> None:
        self.alive = False
        self._backlog.clear()

    def _late(self, run: Callable[[], None]) -> None:
        if self.alive and (self.paused or self._backlog):
            self._backlog.append(run)
        elif self.alive:
            run()

    def _catch_up(self) -> None:
        if self.paused or not self._backlog:
            return
        first = self._backlog.popleft()
        if self._backlog:
            self.clock.after(0.0, self._catch_up)
        first()
