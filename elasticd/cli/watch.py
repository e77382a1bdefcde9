"""``elasticd status --watch``: shows the job at each change."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from elasticd.cli.command_error import CommandError
from elasticd.cli.job_access import Place, is_full, unusable
from elasticd.cli.say import say
from elasticd.core.facts import Fact, Leadership, Round
from elasticd.core.ports import Seen
from elasticd.etcd.errors import BadRecord, StoreError, StoreUnavailable
from elasticd.telemetry.status import JobStatus, Shown, job_status, updated
from elasticd.telemetry.steprate import StepRates

if TYPE_CHECKING:
    from elasticd.daemon.leader_link.telemetry_follower import JobTelemetry

QUIET_S = 5.0  # after this time without a change, check whether etcd still responds
AWAY_S = 1.0  # the interval of checks while etcd is away
EVERY_S = 1.0  # heartbeats of all nodes are shown together, at this interval


def watch(place: Place, job: str, show: Callable[[JobStatus], None]) -> None:
    """Show the job at once, at each new phase and round, and otherwise at most every EVERY_S if anything
    changed, until the job has ended. Waits if etcd goes away. Raises CommandError."""
    _Watch(place, job, show).run()


@dataclass(frozen=True, slots=True)
class _Told:
    """What the job's leader knows."""

    facts: Mapping[str, Shown]


_News = Seen | StoreError | KeyboardInterrupt | _Told


class _Watch:
    def __init__(self, place: Place, job: str, show: Callable[[JobStatus], None]) -> None:
        self._place, self._job, self._show = place, job, show
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._facts: dict[str, Fact] = {}  # in etcd
        self._told: Mapping[str, Shown] = {}  # by the job's leader
        self._rates = StepRates()
        self._begun = place.shared  # a standalone run may not have written its facts yet
        self._changed = False  # whether facts have changed since the last display
        self._shown: object = None  # the round and the phase of the last display
        self._shown_at = -EVERY_S  # when the job was last shown, by the monotonic clock
        self._quiet_since = time.monotonic()  # the last news of etcd, or the last check
        self._away = False
        self._full = False  # whether etcd has no space

    def run(self) -> None:
        from elasticd.daemon.leader_link.telemetry_follower import TelemetryFollower
        from elasticd.etcd.store import EtcdStore

        store = EtcdStore(self._place.access, self._job, problems=self._news.put)
        follower = TelemetryFollower(self._heard)
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._interrupt)
        try:
            end = store.watch("", self._news.put, prefix=True)
            while True:
                try:
                    self._take(self._news.get(timeout=self._patience_s()))
                    leader = self._facts.get("leader")
                    follower.follow(leader if isinstance(leader, Leadership) else None)
                except queue.Empty:
                    pass
                if not self._changed and time.monotonic() >= self._check_at:
                    if self._is_back():
                        # A new watch lists the job again, even if nothing has changed meanwhile.
                        end()
                        end = store.watch("", self._news.put, prefix=True)
                    self._quiet_since = time.monotonic()
                if self._is_due() and self._look():
                    return
        finally:
            signal.signal(signal.SIGINT, before)
            follower.close()
            store.close()

    def _heard(self, known: JobTelemetry | None) -> None:
        """Take the leader's answer. Runs on the follower's thread."""
        from elasticd.daemon.leader_link.telemetry_messages import as_facts

        self._news.put(_Told(as_facts(known.nodes, known.summary) if known is not None else {}))

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """End the watch. Python drops an exception that a handler raises while a destructor runs, and the
        queue keeps it."""
        self._news.put(KeyboardInterrupt())
        raise KeyboardInterrupt

    def _patience_s(self) -> float:
        if self._changed:
            return max(0.0, self._shown_at + EVERY_S - time.monotonic())
        return max(0.0, self._check_at - time.monotonic())

    @property
    def _check_at(self) -> float:
        """When to check whether etcd still responds, if no news comes from it."""
        return self._quiet_since + (AWAY_S if self._away else QUIET_S)

    def _take(self, seen: _News) -> None:
        if isinstance(seen, KeyboardInterrupt):
            raise seen
        if isinstance(seen, _Told):
            self._changed = self._changed or (self._told != seen.facts and bool(self._facts))
            self._told = seen.facts
            return
        self._quiet_since = time.monotonic()
        if isinstance(seen, BadRecord):
            if failure := unusable(self._job, [seen]):
                raise failure from seen
            say(f"elasticd: {self._job}: {seen}.", err=True)
            return
        if isinstance(seen, StoreError):
            raise CommandError(f"{seen}.") from seen
        self._facts = updated(self._facts, seen)
        self._begun = self._begun or bool(self._facts)
        self._changed = True
        if self._away:
            self._away, self._shown = False, None

    def _is_due(self) -> bool:
        if not self._changed:
            return False
        if time.monotonic() >= self._shown_at + EVERY_S:
            return True
        # Changes that arrive together are shown together.
        return self._news.empty() and (self._is_gone() or self._shown != self._mark())

    def _is_gone(self) -> bool:
        return self._begun and not self._facts

    def _mark(self) -> object:
        round_ = self._facts.get("round")
        return (round_.number, round_.phase) if isinstance(round_, Round) else (0, "")

    def _look(self) -> bool:
        """Show the job. Return whether it has ended."""
        if self._is_gone():
            raise CommandError(f"{self._job} is no longer in etcd.")
        if self._full:
            self._is_back()  # etcd may have space again
        facts = {**self._facts, **self._told}
        now = job_status(self._job, facts, time.time(), self._rates, etcd_full=self._full)
        self._show(now)
        self._changed, self._shown, self._shown_at = False, self._mark(), time.monotonic()
        return now.ended

    def _is_back(self) -> bool:
        """Check etcd after a silence; return whether etcd was away and is back. The store waits for its etcd
        without a message, but a person wants to know."""
        from elasticd.etcd.blocking_client import Client

        try:
            with Client(self._place.access) as client:
                client.status()
                full = is_full(client)
        except StoreUnavailable as error:
            if self._place.ended(self._job):
                raise CommandError(
                    f"the standalone run {self._job} has ended, and its etcd with it."
                ) from error
            if not self._away:
                say("elasticd: etcd cannot be reached; waiting.", err=True)
            self._away = True
            return False
        except StoreError as error:
            raise CommandError(f"{error}.") from error
        if full != self._full:
            self._full, self._changed = full, bool(self._facts)
        return self._away
