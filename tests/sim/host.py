"""The machine of one simulated agent. It may be paused, slow or dead, and its clock may be wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tests.sim.clock import Clock, Timer


class SimHost:
    """Where an agent runs. Everything that runs inside the agent goes through ``call``.

    ``skew_s``: how far this node's clock is ahead. ``slow_s``: the delay of everything that the agent does.
    ``crowded``: the longest time that a worker waits for a processor in a step, as a share of the step. A
    paused agent (SIGSTOP) does nothing; calls for it wait, in order.
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
        """Run this in the agent: now, or once the agent is no longer paused. A dead agent runs nothing."""
        if not self.alive:
            return
        now = self.clock.now()
        waits = self.paused or bool(self._backlog)
        if self._free_at >= now or (self.slow_s and not waits):  # calls that are late come first
            self._free_at = max(self._free_at, now) + self.slow_s
            self.clock.at(self._free_at, lambda: self._late(run))
        elif waits:
            self._backlog.append(run)
        else:
            run()

    def after(self, delay_s: float, run: Callable[[], None]) -> Timer:
        """Call this in the agent after a delay."""
        return self.clock.after(delay_s, lambda: self.call(run))

    def at(self, when: float, run: Callable[[], None]) -> Timer:
        """Call this in the agent at a time of this node's clock."""
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
