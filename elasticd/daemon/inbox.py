"""Where everything that happens to an agent waits for its turn."""

from __future__ import annotations

import queue
import signal
from collections.abc import Callable, Iterable
from types import FrameType

from elasticd.core.messages import Signalled, Tick
from elasticd.daemon.driver import Driver, Happening


class Inbox:
    """Events from any thread, and from signal handlers, for the one thread that handles them."""

    def __init__(self) -> None:
        # SimpleQueue.put is reentrant, so that a signal handler may interrupt another put.
        self._queue: queue.SimpleQueue[Happening] = queue.SimpleQueue()

    def post(self, event: Happening) -> None:
        self._queue.put(event)

    def serve(
        self,
        driver: Driver,
        clock: Callable[[], float],
        routine: Callable[[float], float],
    ) -> None:
        """Give the driver its events until it has left.

        ``routine(now)`` is called after each event and at the time it last returned: what is to be
        done from time to time (reporting progress), and never decides anything.
        """
        due = routine(clock())
        while driver.left is None:
            wake_at = due if driver.wake_at is None else min(due, driver.wake_at)
            try:
                event: Happening = self._queue.get(timeout=max(0.0, wake_at - clock()))
            except queue.Empty:
                event = Tick()
            now = clock()
            if not isinstance(event, Tick) or (driver.wake_at is not None and now >= driver.wake_at):
                driver.handle(event, now)
            if now >= due:
                due = routine(now)


class Signals:
    """While entered, the given signals become events instead of ending the process."""

    def __init__(self, numbers: Iterable[int], post: Callable[[Happening], None]) -> None:
        self._numbers = tuple(numbers)
        self._post = post
        self._before: dict[int, object] = {}

    def __enter__(self) -> None:
        def handler(number: int, frame: FrameType | None) -> None:
            self._post(Signalled(number))

        for number in self._numbers:
            self._before[number] = signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]
