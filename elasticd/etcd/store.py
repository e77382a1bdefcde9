"""The job's keys in a real etcd: implements ``elasticd.core.ports.Store``."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from elasticd.core.ports import (
    Answer,
    Applied,
    Changes,
    Entry,
    Guard,
    LeaseNews,
    Listing,
    NoAnswer,
    Put,
    Refused,
    Seen,
    Write,
)
from elasticd.etcd import job_keys
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.clock import SteadyClock
from elasticd.etcd.connection import Connection
from elasticd.etcd.errors import BadRecord, LeaseGone, NoSpace, StoreError, StoreUnavailable
from elasticd.etcd.kv import KeyValue, Range
from elasticd.etcd.leases import Lease, LeaseKeeper
from elasticd.etcd.names import job_prefix
from elasticd.etcd.watcher import Events, Watcher

WRITERS_MAX = 8  # the most concurrent transactions of all stores; a store has one at a time

_log = logging.getLogger(__name__)


def log_problem(error: StoreError) -> None:
    """Log a problem: the default for ``problems``."""
    _log.warning("%s", error)


class EtcdLink:
    """One process's connections to etcd: for transactions, for watches and for leases, so that none delays
    another. Many stores can share a link."""

    def __init__(self, access: EtcdAccess, clock: Callable[[], float] | None = None) -> None:
        self.access = access
        self.clock = clock or SteadyClock()
        self.calls, watches, leases = Connection(access), Connection(access), Connection(access)
        self._connections = (self.calls, watches, leases)
        self.watcher = Watcher(watches)
        self.leases = LeaseKeeper(leases, self.clock, self.watcher.suspect, self.watcher.look_again)
        self.writers = ThreadPoolExecutor(WRITERS_MAX, thread_name_prefix="etcd-write")

    def close(self) -> None:
        """Close all connections at once. Pending requests fail."""
        for connection in self._connections:
            connection.close()
        self.writers.shutdown(wait=True, cancel_futures=False)
        self.watcher.close()
        self.leases.close()


class EtcdStore:
    """The keys of one job, for one agent. Callbacks come from threads of this package and must not block;
    they should put their argument into an inbox.

    ``problems`` gets problems that a person should know and the store cannot solve: values that are not
    records (BadRecord, NewerRecord; they are skipped), refusals, a wiped etcd. ``lasts_s``: see
    ``LeaseKeeper.hold``. ``full`` gets a sentence when etcd is full, and an empty string when etcd takes
    writes again.
    """

    def __init__(
        self,
        access: EtcdAccess | EtcdLink,
        job: str,
        ttl_s: float = 5.0,
        *,
        lasts_s: float | None = None,
        clock: Callable[[], float] | None = None,
        problems: Callable[[StoreError], None] = log_problem,
        full: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._own_link = not isinstance(access, EtcdLink)
        self._link = access if isinstance(access, EtcdLink) else EtcdLink(access, clock)
        self._prefix = job_prefix(job)
        self._ttl_s = ttl_s
        self._lasts_s = lasts_s
        self._problems = problems
        self._tell_full = full
        self._is_full = False
        self._lock = threading.Lock()
        self._queue: deque[_Transaction] = deque()
        self._writing = False
        self._idle = threading.Condition(self._lock)
        self._lease: Lease | None = None
        self._ends: dict[Callable[[], None], None] = {}
        self._closed = False

    # ---- transactions

    def transact(
        self,
        guards: tuple[Guard, ...],
        writes: tuple[Write, ...],
        answer: Callable[[Answer], None],
    ) -> None:
        """See ``ports.Store``. Transactions are applied in the order of the calls. Raises ValueError if etcd
        could never apply the writes: one key written twice, or a fact under the wrong key."""
        lease = self._lease.id if self._lease else 0
        request = job_keys.transaction(self._prefix, guards, writes, lease)
        transaction = _Transaction(guards, writes, lease, request, answer)
        with self._lock:
            if not self._closed:
                self._queue.append(transaction)
                if not self._writing:
                    self._writing = True
                    self._link.writers.submit(self._write)
                return
        transaction.end(NoAnswer("the store is closed"))

    def _write(self) -> None:
        """Apply the queued transactions in order."""
        while True:
            with self._lock:
                if not self._queue:
                    self._writing = False
                    self._idle.notify_all()
                    return
                transaction = self._queue.popleft()
            try:
                result = self._apply(transaction)
            except Exception as error:  # noqa: BLE001  (nothing may end this thread)
                _log.exception("a transaction failed unexpectedly")
                result = NoAnswer(f"unexpected: {error!r}")
            transaction.end(result)

    def _apply(self, transaction: _Transaction) -> Answer:
        if self._closed:
            return NoAnswer("the store is closed")
        request = transaction.request
        if not transaction.lease and any(isinstance(w, Put) and w.leased for w in transaction.writes):
            assert self._lease is not None, "hold_lease comes before any leased put"
            lease = self._lease.wait(self._link.access.timeout_s)
            if not lease:
                return Refused()  # nothing was written; ``LeaseHeld`` reports the next lease
            request = job_keys.transaction(self._prefix, transaction.guards, transaction.writes, lease)
        try:
            response = self._link.calls.call("txn", request)
        except LeaseGone:
            assert self._lease is not None
            self._link.leases.check(self._lease)
            return Refused()
        except StoreError as error:
            if isinstance(error, NoSpace) or not isinstance(error, StoreUnavailable):
                self._complain(error)
            return NoAnswer(str(error))
        if self._is_full and any(isinstance(w, Put) for w in transaction.writes):
            self._is_full = False
            self._tell_full("")
        return Applied(response.header.revision) if response.succeeded else Refused()

    def _complain(self, error: StoreError) -> None:
        if not isinstance(error, NoSpace):
            self._problems(error)
        elif not self._is_full:
            self._is_full = True
            self._tell_full(str(error))

    # ---- watches

    def watch(self, key: str, seen: Callable[[Seen], None], *, prefix: bool = False) -> Callable[[], None]:
        """See ``ports.Store``. Values that are not records are reported to ``problems`` and skipped."""
        follower = _Decoding(self._prefix, seen, self._problems)
        stop = self._link.watcher.watch(self._prefix + key.encode(), prefix, follower)

        def end() -> None:
            self._ends.pop(end, None)
            stop()

        self._ends[end] = None
        return end

    # ---- the lease

    def hold_lease(self, news: Callable[[LeaseNews], None]) -> None:
        """See ``ports.Store``."""
        assert self._lease is None, "hold_lease is called once"
        self._lease = self._link.leases.hold(self._ttl_s, news, self._complain, self._lasts_s)

    def close(self) -> None:
        """Revoke the lease, which deletes its keys at once, and end the watches. Waits for the pending
        transaction; later ones get NoAnswer. Takes a few seconds at most, even if etcd is down."""
        timeout_s = self._link.access.timeout_s
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for end in list(self._ends):
            end()
        with self._lock:
            self._idle.wait_for(lambda: not self._writing, timeout_s)
        if self._lease:
            self._link.leases.release(self._lease, timeout_s)
        if self._own_link:
            self._link.close()


@dataclass(frozen=True, slots=True)
class _Transaction:
    """A transaction that waits for its turn. ``lease``: the lease at the call, or 0; under a later lease, the
    write could be outdated. ``request``: the transaction with this lease."""

    guards: tuple[Guard, ...]
    writes: tuple[Write, ...]
    lease: int
    request: Any
    answer: Callable[[Answer], None]

    def end(self, answer: Answer) -> None:
        try:
            self.answer(answer)
        except Exception:  # noqa: BLE001  (nothing may end this thread)
            _log.exception("the callback of a transaction failed on %s; continuing", answer)


class _Decoding:
    """Follows a watch, decodes its values, and passes the facts on."""

    def __init__(
        self, prefix: bytes, seen: Callable[[Seen], None], problems: Callable[[StoreError], None]
    ) -> None:
        self._prefix = prefix
        self._seen = seen
        self._problems = problems
        self._bad: dict[bytes, int] = {}  # reported values: key to revision

    def seen(self, what: Range | Events) -> None:
        entries = tuple(entry for item in what.items if (entry := self._entry(item)) is not None)
        if isinstance(what, Range):
            self._seen(Listing(entries, what.revision))
        elif entries:
            self._seen(Changes(entries))

    def failed(self, error: StoreError) -> None:
        self._problems(error)

    def _entry(self, item: KeyValue) -> Entry | None:
        try:
            return job_keys.entry(self._prefix, item)
        except BadRecord as error:
            if self._bad.get(item.key) != item.revision:
                self._bad[item.key] = item.revision
                self._problems(error)
            return None
