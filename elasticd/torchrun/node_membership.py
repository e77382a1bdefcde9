"""One node's lease, the key that it writes, and its view of the other nodes."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError

from elasticd.core.ports import LeaseExpired, LeaseHeld, LeaseNews, StoreSilent
from elasticd.etcd import kv
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.blocking_client import Client
from elasticd.etcd.errors import LeaseGone, StoreError, StoreUnavailable
from elasticd.etcd.kv import KeyValue, Range
from elasticd.etcd.store import EtcdLink
from elasticd.etcd.watcher import Events
from elasticd.torchrun.backend import EtcdV3RendezvousBackend, unwrap
from elasticd.torchrun.decide import RendezvousView, Seen
from elasticd.torchrun.guard import boot_time_s
from elasticd.torchrun.rendezvous_records import (
    CorruptError,
    NodeRecord,
    RendezvousRound,
    decode,
    encode,
    prefix_of,
)

log = logging.getLogger("elasticd.torchrun")


@dataclass(frozen=True, slots=True)
class GuardedView:
    """A view at a revision, and the revisions that guard a write based on it (0: no such key)."""

    view: RendezvousView
    revision: int
    round_token: int
    own_token: int
    own_created: int


class Membership:
    """Connects to etcd, takes a lease, and follows the run's keys until ``close``.

    ``on_renewed`` is called with the boot time until which the lease surely lives, each time that time moves.
    The call comes from the lease's thread, which waits for nothing else.
    """

    def __init__(
        self, access: EtcdAccess, run_id: str, node: str, ttl_s: float, on_renewed: Callable[[float], None]
    ) -> None:
        self.node = node
        self.changed = threading.Condition()
        self._prefix = prefix_of(run_id).encode()
        self._key = self._prefix + b"nodes/" + node.encode()
        self._access = access
        self._on_renewed = on_renewed
        self._items: dict[bytes, KeyValue] = {}
        self._round: RendezvousRound | None = None
        self._nodes: dict[str, Seen] = {}
        self._revision = 0  # the revision of the view
        self._wrote = 0  # the newest revision that this node wrote; an older view is not used
        self._responded_at = time.monotonic()
        self._problem: Exception | None = None
        self._silence: StoreSilent | None = None
        self._link = EtcdLink(access, boot_time_s)
        self.backend = EtcdV3RendezvousBackend(self._link.calls, self._prefix + b"round")
        self._unwatch = self._link.watcher.watch(self._prefix, True, self)
        self._lease = self._link.leases.hold(ttl_s, self._lease_news, self.failed)

    # ---- the view

    def sight(self) -> GuardedView | None:
        """Return the current view; None while it may be older than this node's own writes. Raises
        RendezvousStateError if the state is corrupt, and the StoreError if etcd refuses this node."""
        with self.changed:
            if self._problem is not None:
                raise self._problem
            if self._revision == 0 or self._revision < self._wrote:
                return None
            own = self._items.get(self._key)
            state = self._items.get(self._prefix + b"round")
            return GuardedView(
                RendezvousView(self._round, dict(self._nodes)),
                self._revision,
                round_token=state.revision if state else 0,
                own_token=own.revision if own else 0,
                own_created=own.created if own else 0,
            )

    def wait(
        self, sight: GuardedView | None, timeout_s: float, also: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until the view is newer than ``sight``, or ``also`` returns True (checked when ``changed`` is
        notified), or the timeout."""
        before = sight.revision if sight else max(self._wrote - 1, 0)
        with self.changed:
            self.changed.wait_for(
                lambda: self._problem is not None or self._revision > before or also(), timeout_s
            )

    @property
    def silent_s(self) -> float:
        """Seconds since etcd last responded."""
        return time.monotonic() - self._responded_at

    @property
    def etcd_is_down(self) -> bool:
        """Whether etcd itself is down: its hosts can be reached, but it does not respond. While etcd is down,
        no world can form without this node."""
        return self._silence is not None and not self._silence.cut_off

    def seen(self, what: Range | Events) -> None:
        """Update the view with a result of the watch."""
        with self.changed:
            self._responded_at = now = time.monotonic()
            if isinstance(what, Range):
                gone = set(self._items) - {item.key for item in what.items}
                changes = [KeyValue(key, None, what.revision, 0) for key in gone] + list(what.items)
                self._revision = what.revision
            else:
                changes = list(what.items)
                self._revision = max(self._revision, *(item.revision for item in changes))
            try:
                for item in changes:
                    self._apply(item, now)
                self._problem = None
            except (CorruptError, RendezvousStateError) as error:
                self._problem = RendezvousStateError(str(error))
            self.changed.notify_all()

    def failed(self, error: StoreError) -> None:
        """Handle a refusal by etcd, from the watch or the lease."""
        log.warning("%s", error)
        with self.changed:
            self._problem = error
            self.changed.notify_all()

    def _apply(self, item: KeyValue, now: float) -> None:
        if item.value is None:
            self._items.pop(item.key, None)
        else:
            self._items[item.key] = item
        name = item.key.removeprefix(self._prefix).decode(errors="replace")
        if name == "round":
            self._round = decode(RendezvousRound, unwrap(item.value, item.key), name) if item.value else None
        elif name.startswith("nodes/"):
            node = name.removeprefix("nodes/")
            if item.value is None:
                self._nodes.pop(node, None)
                return
            record = decode(NodeRecord, item.value, name)
            before = self._nodes.get(node)
            since = before.since if before and before.record == record else now
            self._nodes[node] = Seen(record, item.created, since)

    # ---- writes

    def put(self, record: NodeRecord, own_token: int) -> bool:
        """Write this node's key on its lease, if the key is unchanged. Raises StoreError, after which the
        outcome is unknown."""
        lease = self._lease.wait(self._access.timeout_s)
        if not lease:
            raise StoreUnavailable("etcd has given no lease yet", sent=False)
        request = kv.txn_request(
            [kv.if_unchanged(self._key, own_token)], [kv.put_op(self._key, encode(record), lease)]
        )
        try:
            response = self._link.calls.call("txn", request)
        except LeaseGone as error:
            self._link.leases.check(self._lease)
            raise StoreUnavailable("the node's lease has run out", sent=False) from error
        if response.succeeded:
            with self.changed:
                self._wrote = max(self._wrote, response.header.revision)
        return bool(response.succeeded)

    def form(self, round_: RendezvousRound, sight: GuardedView) -> bool:
        """Write the round if the last round is unchanged and this node's lease lives. Raises
        RendezvousConnectionError, after which the outcome is unknown."""
        mine = kv.if_created(self._key, sight.own_created)
        wrote = self.backend.replace(encode(round_), sight.round_token, [mine])
        with self.changed:
            self._wrote = max(self._wrote, wrote)
        return bool(wrote)

    def close_round(self, round_: RendezvousRound, token: int, keep_s: float, *, as_member: bool) -> bool:
        """Replace the round by its closed form, which etcd deletes after ``keep_s`` seconds. ``as_member``:
        only if this node's lease lives. Return whether it was written. Raises RendezvousConnectionError."""
        guards = []
        if as_member:
            with self.changed:
                own = self._items.get(self._key)
            if own is None:
                return False
            guards.append(kv.if_created(self._key, own.created))
        try:
            with Client(self._access) as client:
                # The lease is never renewed, so etcd deletes the key.
                lease, _ = client.grant(math.ceil(keep_s))
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error
        return bool(self.backend.replace(encode(round_), token, guards, lease))

    @property
    def holds_key(self) -> bool:
        """Whether etcd still has this node's key, according to the view."""
        with self.changed:
            return self._key in self._items

    # ---- the lease

    def _lease_news(self, news: LeaseNews) -> None:
        match news:
            case LeaseHeld(until):
                self._silence = None
                self._responded_at = time.monotonic()
                self._on_renewed(until)
            case LeaseExpired():
                log.warning("the lease of node %s has run out", self.node)
                with self.changed:
                    self._silence = None
                    self.changed.notify_all()
            case StoreSilent():
                before, self._silence = self._silence, news
                if before is None or before.cut_off != news.cut_off:
                    log.warning(
                        "etcd at %s does not answer%s",
                        self._access.url,
                        "; this node is cut off from it" if news.cut_off else "",
                    )

    def diagnose(self) -> StoreError | None:
        """Check etcd again, and return the error; None if etcd works."""
        try:
            with Client(self._access) as client:
                client.check(self._prefix)
        except StoreError as error:
            return error
        return None

    def close(self) -> None:
        """Release the lease, so that the others notice at once that this node has left."""
        self._unwatch()
        self._link.leases.release(self._lease, self._access.timeout_s)
        self._link.close()
