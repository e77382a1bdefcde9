"""The queue of an agent's events, and signals as events."""

from __future__ import annotations

import queue
import signal
from collections.abc import Callable, Iterable
from types import FrameType

from elasticd.core.agent_messages import LeaseChanged, Signalled, Tick
from elasticd.daemon import cycles
from elasticd.daemon.driver import Driver, Happening


class Inbox:
    """Events from any thread and from signal handlers, served on one thread.

    News of the lease comes before all else: it moves the time at which the workers are killed. The leader of
    a large job may have thousands of other events to handle.
    """

    def __init__(self) -> None:
        # SimpleQueue.put is reentrant, so that a signal handler may interrupt another put.
        self._queue: queue.SimpleQueue[Happening | None] = queue.SimpleQueue()  # None: see ``_of_the_lease``
        self._of_the_lease: queue.SimpleQueue[LeaseChanged] = queue.SimpleQueue()

    def post(self, event: Happening) -> None:
        if isinstance(event, LeaseChanged):
            self._of_the_lease.put(event)
            self._queue.put(None)
        else:
            self._queue.put(event)

    def serve(
        self,
        driver: Driver,
        clock: Callable[[], float],
        routine: Callable[[float], float],
    ) -> None:
        """Give the driver its events until the driver has left.

        ``routine(now)`` does periodic work, such as reporting progress. It is called at the time that it last
        returned, and decides nothing.
        """
        due = routine(clock())
        while driver.left is None:
            wake_at = due if driver.wake_at is None else min(due, driver.wake_at)
            event = self._next(max(0.0, wake_at - clock()), driver.has_half_a_decision)
            if event is None:
                continue
            now = clock()
            if not isinstance(event, Tick) or (driver.wake_at is not None and now >= driver.wake_at):
                with cycles.not_now():
                    driver.handle(event, now)
            if now >= due:
                due = routine(now)

    def _next(self, within_s: float, at_once: bool) -> Happening | None:
        """Return the next event, or a Tick after this time; None if there may be news of the lease.
        ``at_once``: do not wait, and only news of the lease comes before the Tick."""
        try:
            return self._of_the_lease.get_nowait()
        except queue.Empty:
            if at_once:
                return Tick()
        try:
            return self._queue.get(timeout=within_s)
        except queue.Empty:
            return Tick()


class Signals:
    """A context manager in which the given signals become events."""

    def __init__(self, numbers: Iterable[int], post: Callable[[Happening], None]) -> None:
        self._numbers = tuple(numbers)
        self._post = post
        self._before: dict[int, object] = {}

    def __enter__(self) -> None:
        def handler(number: int, frame: FrameType | None) -> None:
            self._post(Signalled(number))

        for number in self._numbers:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:  # as under nohup
                continue
            self._before[number] = signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]
