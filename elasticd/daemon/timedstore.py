"""A store that records the times of etcd's answers and the renewals of the lease, for the metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from elasticd.core.ports import (
    Answer,
    Guard,
    LeaseExpired,
    LeaseHeld,
    LeaseNews,
    NoAnswer,
    Seen,
    Store,
    StoreSilent,
    Write,
)

NOTES_MAX = 10_000  # the most records kept, if nothing reads them


class TimedStore:
    """A ``core.ports.Store`` around another. The other store's threads append to ``requests_s`` and
    ``leases``; any thread may read them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.requests_s: deque[float] = deque(maxlen=NOTES_MAX)
        self.leases: deque[str] = deque(maxlen=NOTES_MAX)

    def transact(
        self, guards: tuple[Guard, ...], writes: tuple[Write, ...], answer: Callable[[Answer], None]
    ) -> None:
        asked_at = time.monotonic()

        def answered(what: Answer) -> None:
            if not isinstance(what, NoAnswer):
                self.requests_s.append(time.monotonic() - asked_at)
            answer(what)

        self._store.transact(guards, writes, answered)

    def watch(self, key: str, seen: Callable[[Seen], None], *, prefix: bool = False) -> Callable[[], None]:
        return self._store.watch(key, seen, prefix=prefix)

    def hold_lease(self, news: Callable[[LeaseNews], None]) -> None:
        silent_since = 0.0

        def heard(what: LeaseNews) -> None:
            nonlocal silent_since
            match what:
                case LeaseHeld():
                    self.leases.append("renewed")
                case LeaseExpired():
                    self.leases.append("lost")
                case StoreSilent(since) if since != silent_since:  # not only a new ``as_of``
                    silent_since = since
                    self.leases.append("unanswered")
            news(what)

        self._store.hold_lease(heard)
