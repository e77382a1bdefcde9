"""Work that may take long, done in threads; what follows from it is done in the loop that gave it away."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

_ASKED_S: Final = 60.0  # the loop never waits for anything; after this it has ended
_T = TypeVar("_T")


class Jobs:
    """``fd`` is readable when something is done; then ``finish``."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._running = 0
        self._done: deque[Callable[[], None]] = deque()

    def __bool__(self) -> bool:
        """Whether something is yet to be done."""
        return self._running > 0

    def run(
        self,
        pool: ThreadPoolExecutor,
        job: Callable[[], _T],
        then: Callable[[_T | BaseException], None],
    ) -> None:
        """``then`` is given what ``job`` returned or raised."""

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
        """From another thread: have the loop call this, and wait for what it returns or raises."""
        answer: Future[_T] = Future()

        def do() -> None:
            try:
                answer.set_result(call())
            except Exception as error:  # noqa: BLE001  # it is the asker's
                answer.set_exception(error)

        self._done.append(do)
        self.wake()
        return answer.result(_ASKED_S)

    def wake(self) -> None:
        """As if something were done."""
        os.eventfd_write(self.fd, 1)

    def finish(self) -> None:
        """Do what follows from all that is done."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
        while self._done:
            self._done.popleft()()

    def close(self) -> None:
        os.close(self.fd)
