"""Leases that are renewed until released, and news about them.

``LeaseKeeper`` has its own thread and connection, so that renewals do not depend on anything else. The thread
never waits for a response: responses arrive in its inbox, and timeouts tell it when to send again.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import Any

from elasticd.core.ports import LeaseExpired, LeaseHeld, LeaseNews, StoreSilent
from elasticd.etcd._client3 import rpc
from elasticd.etcd.actor import Actor
from elasticd.etcd.connection import Connection
from elasticd.etcd.errors import LeaseGone, NoSpace, StoreError, StoreUnavailable, TokenExpired
from elasticd.etcd.reachability import ReachabilityProbe

RETRY_S = 0.2
FULL_RETRY_S = 1.0

_log = logging.getLogger(__name__)


class Lease:
    """A lease that a LeaseKeeper holds. ``LeaseKeeper.hold`` makes it."""

    def __init__(
        self,
        ttl_s: float,
        news: Callable[[LeaseNews], None],
        failed: Callable[[StoreError], None],
        lasts_s: float | None = None,
    ) -> None:
        self.ttl_s = math.ceil(ttl_s)  # etcd counts in whole seconds
        self.lasts_s = math.ceil(lasts_s) if lasts_s is not None else self.ttl_s
        self.granted = threading.Condition()
        self._id = 0
        self._news = news
        self._failed = failed
        self._due = 0.0
        self._late_s = 0.0  # the longest delay of a request since the lease was last held
        self._asking = False
        self._silent_since: float | None = None
        self._asked_last = 0.0  # when the last unanswered request was sent
        self._told: StoreSilent | None = None
        self._complaint = ""
        self._closing = False
        self._settled = threading.Event()  # closing, and no request pending

    @property
    def id(self) -> int:
        """The lease's id; 0 while no lease is held."""
        return self._id

    def wait(self, timeout_s: float) -> int:
        """Wait until the lease is held, and return its id; 0 after the timeout."""
        with self.granted:
            self.granted.wait_for(lambda: self._id or self._closing, timeout_s)
        return self._id


class LeaseKeeper:
    """Renews all leases of a connection."""

    def __init__(
        self,
        connection: Connection,
        clock: Callable[[], float],
        silent: Callable[[], None],
        expired: Callable[[], None] = lambda: None,
    ) -> None:
        """``silent`` is called when etcd stops responding; ``expired`` when a lease has ended in etcd."""
        self._connection = connection
        self._clock = clock
        self._silent, self._expired = silent, expired
        self._actor = Actor("etcd-lease", self._handle, self._ask_due, self._idle_s)
        self._leases: dict[Lease, None] = {}
        self._cut_off: bool | None = None  # None: unknown
        self._looked_at = 0.0  # when ``_cut_off`` was found
        self._probe = ReachabilityProbe(
            connection.access.endpoints,
            clock,
            lambda verdict, at: self._actor.tell("verdict", None, (verdict, at)),
        )
        self._actor.start()

    def hold(
        self,
        ttl_s: float,
        news: Callable[[LeaseNews], None],
        failed: Callable[[StoreError], None],
        lasts_s: float | None = None,
    ) -> Lease:
        """Take a lease and renew it. ``news`` and ``failed`` (etcd refuses, with the reason) are called in
        this object's thread, and must not block. ``lasts_s``: how long the lease lives without renewal, if
        longer than ``ttl_s``; it is renewed as often as a lease of ``ttl_s``."""
        lease = Lease(ttl_s, news, failed, lasts_s)
        self._actor.tell("hold", lease, None)
        return lease

    def check(self, lease: Lease) -> None:
        """Renew the lease now, because it may have ended."""
        self._actor.tell("check", lease, None)

    def release(self, lease: Lease, timeout_s: float) -> None:
        """Stop renewing, and revoke the lease if etcd responds in time: its keys are then deleted at once."""
        self._actor.tell("release", lease, None)
        lease._settled.wait(timeout_s)
        if lease._id:
            try:
                self._connection.call("revoke", rpc.LeaseRevokeRequest(ID=lease._id), timeout_s=timeout_s)
            except StoreError as error:
                _log.debug("lease not revoked, it will run out: %s", error)
            lease._id = 0

    def close(self) -> None:
        """End the thread. Leases that are still held expire."""
        self._actor.close()
        self._probe.close()

    # ---- the thread

    def _ask_due(self) -> None:
        now = self._clock()
        for lease in self._leases:
            if not lease._asking and not lease._closing and lease._due <= now:
                self._ask(lease, now)

    def _idle_s(self) -> float:
        due = [lease._due for lease in self._leases if not lease._asking and not lease._closing]
        return max(0.0, min(due) - self._clock()) if due else 60.0

    def _ask(self, lease: Lease, now: float) -> None:
        """Request a lease, or renew the present one."""
        lease._asking = True
        if lease._due:
            lease._late_s = max(lease._late_s, now - lease._due)
        if lease._id:
            method, request = "keep_alive", rpc.LeaseKeepAliveRequest(ID=lease._id)
        else:
            method, request = "grant", rpc.LeaseGrantRequest(TTL=lease.lasts_s)
        # Short, so that silence is noticed and examined well before the lease expires.
        timeout_s = min(self._connection.access.timeout_s, max(0.5, lease.ttl_s / 5))
        self._connection.start(
            method,
            request,
            timeout_s=timeout_s,
            done=lambda result: self._actor.tell("answer", lease, (now, result)),
        )

    def _handle(self, what: str, lease: Lease, content: Any) -> None:
        match what:
            case "hold":
                self._leases[lease] = None
            case "check":
                lease._due = 0.0
            case "release":
                lease._closing = True
                with lease.granted:
                    lease.granted.notify_all()
                if not lease._asking:
                    self._settle(lease)
            case "answer":
                lease._asking = False
                self._answered(lease, *content)
                if lease._closing:
                    self._settle(lease)
            case "verdict":
                self._cut_off, self._looked_at = content
                for silent in list(self._leases):
                    self._tell_silence(silent)

    def _settle(self, lease: Lease) -> None:
        self._leases.pop(lease, None)
        self._note_silence(lease, None)
        lease._settled.set()

    def _answered(self, lease: Lease, sent_at: float, result: Any) -> None:
        if isinstance(result, LeaseGone):
            self._lost(lease)
        elif isinstance(result, StoreError):
            self._unanswered(lease, sent_at, result)
        elif result.TTL <= 0:
            self._lost(lease)
        else:
            if not lease._id:
                with lease.granted:
                    lease._id = result.ID
                    lease.granted.notify_all()
            self._note_silence(lease, None)
            lease._complaint = ""
            lease._due = sent_at + min(result.TTL, lease.ttl_s) / 3
            lease._late_s = 0.0
            self._tell(lease, LeaseHeld(sent_at + result.TTL))

    def _lost(self, lease: Lease) -> None:
        self._note_silence(lease, None)
        lease._due = 0.0
        if lease._id:
            lease._id = 0
            self._expired()
            self._tell(lease, LeaseExpired(lease._late_s))
        lease._late_s = 0.0

    def _unanswered(self, lease: Lease, sent_at: float, error: StoreError) -> None:
        lease._due = self._clock() + RETRY_S
        lease._asked_last = sent_at
        if isinstance(error, NoSpace):  # etcd responds, but grants no new lease
            lease._due = self._clock() + FULL_RETRY_S
            lease._failed(error)
            return
        if not isinstance(error, (StoreUnavailable, TokenExpired)) and str(error) != lease._complaint:
            lease._complaint = str(error)
            if not lease._closing:
                lease._failed(error)
        if lease._silent_since is None and not isinstance(error, TokenExpired):
            self._note_silence(lease, sent_at)
        self._tell_silence(lease)

    def _note_silence(self, lease: Lease, since: float | None) -> None:
        if lease._silent_since is None and since is None:
            return
        first = since is not None and all(other._silent_since is None for other in self._leases)
        lease._silent_since, lease._told = since, None
        if first:
            self._cut_off = None
            self._probe.watch(True)
            self._silent()
        elif all(other._silent_since is None for other in self._leases):
            self._probe.watch(False)

    def _tell_silence(self, lease: Lease) -> None:
        if lease._silent_since is None or self._cut_off is None:
            return
        # The latest time that both the probe of the hosts and an unanswered request cover.
        as_of = max(lease._silent_since, min(lease._asked_last, self._looked_at))
        silence = StoreSilent(lease._silent_since, self._cut_off, as_of)
        if silence != lease._told:
            lease._told = silence
            self._tell(lease, silence)

    def _tell(self, lease: Lease, news: LeaseNews) -> None:
        if lease._closing:
            return
        try:
            lease._news(news)
        except Exception:  # noqa: BLE001  (nothing may end this thread)
            _log.exception("the callback of a lease failed on %s; continuing", news)
