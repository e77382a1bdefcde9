"""Slow calls run in threads. Their results are handled in the loop that started them."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

_ASKED_S: Final = 60.0  # the loop never blocks, so without an answer within this time it has ended
_T = TypeVar("_T")


class Background:
    """Calls in progress. ``fd`` becomes readable when one is done; the loop then calls ``finish``."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.RLock()  # reentrant, since a signal handler may interrupt ``close``
        self._running = 0
        self._done: deque[Callable[[], None]] = deque()

    def __bool__(self) -> bool:
        """Return whether a call is in progress."""
        return self._running > 0

    def run(
        self,
        pool: ThreadPoolExecutor,
        job: Callable[[], _T],
        then: Callable[[_T | BaseException], None],
    ) -> None:
        """Run ``job`` in the pool. ``then`` gets the result of ``job``, or its exception."""

        def finished(future: Future[_T]) -> None:
            error = future.exception()
            outcome: _T | BaseException = future.result() if error is None else error

            def close() -> None:
                self._running -= 1
                then(outcome)

            self._done.append(close)
            self.wake()

        self._running += 1
        pool.submit(job).add_done_callback(finished)

    def ask(self, call: Callable[[], _T]) -> _T:
        """Have the loop call ``call``, and return or raise its outcome. Must be called from another
        thread."""
        answer: Future[_T] = Future()

        def do() -> None:
            try:
                answer.set_result(call())
            except Exception as error:  # noqa: BLE001  # the caller gets it
                answer.set_exception(error)

        self._done.append(do)
        self.wake()
        return answer.result(_ASKED_S)

    def wake(self) -> None:
        """Make ``fd`` readable. Do nothing after ``close``. Any thread and signal handlers may call this."""
        with self._closing:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def finish(self) -> None:
        """Handle the results of all calls that are done."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
        while self._done:
            self._done.popleft()()

    def close(self) -> None:
        with self._closing:
            fd, self.fd = self.fd, -1
            os.close(fd)
