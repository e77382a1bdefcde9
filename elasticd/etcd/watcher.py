"""Watches that survive failures, many of them on one stream.

Each watch first lists its keys, and then follows changes from the revision of the listing. When the stream
breaks, its watches continue from the last revision they have seen, perhaps at another endpoint. If etcd no
longer keeps that revision, they list again. A quiet stream is asked for its progress, and replaced if it does
not respond.

One thread, the actor, makes all decisions; each stream has a thread that only reads. No gRPC callback and no
response can block the actor, and no exception ends it.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from elasticd.etcd import kv
from elasticd.etcd._client3 import rpc
from elasticd.etcd.actor import Actor
from elasticd.etcd.connection import Connection
from elasticd.etcd.errors import (
    Compacted,
    HistoryLost,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    TokenExpired,
)
from elasticd.etcd.kv import KeyValue, Range

RETRY_MIN_S = 0.1
RETRY_MAX_S = 2.0
QUIET_S = 5.0  # after this silence, a stream is asked for its progress
ANSWER_S = 3.0  # how long the stream may take to respond

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Events:
    """Changes in order of revision. All changes of a transaction are in one Events."""

    items: tuple[KeyValue, ...]


class Follower(Protocol):
    """The receiver of a watch. Called in the watcher's thread, one call at a time; must not block."""

    def seen(self, what: Range | Events) -> None: ...

    def failed(self, error: StoreError) -> None:
        """Report why the watch fails at present; the watcher keeps trying. Called when the error changes, and
        not while etcd is merely unavailable."""


class _State(Enum):
    TO_LIST = auto()
    LISTING = auto()
    TO_OPEN = auto()  # listed; not yet requested on the stream
    OPENING = auto()  # requested on the stream
    OPEN = auto()


class KeyWatch:
    """A watch of one key, or of all keys with a prefix."""

    def __init__(self, key: bytes, prefix: bool, follower: Follower) -> None:
        self.key = key
        self.prefix = prefix
        self.follower = follower
        self._ended = False  # set by the caller; all other fields belong to the watcher's thread
        self._state = _State.TO_LIST
        self._id = -1  # the watch's id on its stream
        self._revision = 0  # the last revision seen
        self._stale = False  # to be listed again once it is open
        self._retries = 0
        self._retry_at = 0.0
        self._told = ""


class _Stream:
    """A watch stream. Requests enter through a queue; responses go to the watcher."""

    def __init__(self, connection: Connection, tell: Callable[..., None]) -> None:
        self.requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.opening: deque[KeyWatch] = deque()  # etcd responds in the order of the requests
        self.open: dict[int, KeyWatch] = {}
        self.heard_at = time.monotonic()
        self.asked_at: float | None = None
        self._tell = tell
        self._call, self._translate = connection.stream("watch", iter(self.requests.get, None))
        threading.Thread(target=self._read, name="etcd-watch-read", daemon=True).start()

    def _read(self) -> None:
        error: Exception | None = None
        try:
            for response in self._call:
                self._tell("response", self, response)
        except Exception as raised:  # noqa: BLE001  (nothing may end this thread)
            error = raised
        failure = self._translate(error) if error else StoreUnavailable("etcd ended the watch stream")
        self._tell("broken", self, failure)

    def close(self) -> None:
        self._call.cancel()
        self.requests.put(None)  # ends gRPC's thread that waits for requests


class Watcher:
    """All watches of a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._actor = Actor("etcd-watch", self._handle, self._act, self._idle_s, self._leave)
        self._watches: dict[KeyWatch, None] = {}
        self._waiting: dict[KeyWatch, None] = {}  # watches to list or to open when due
        self._stream: _Stream | None = None
        self._stream_retries = 0
        self._stream_at = 0.0
        self._actor.start()

    def watch(self, key: bytes, prefix: bool, follower: Follower) -> Callable[[], None]:
        """Start a watch. Return a function that ends it."""
        watch = KeyWatch(key, prefix, follower)
        self._actor.tell("add", watch, None)

        def end() -> None:
            watch._ended = True  # from now on, the follower gets no more changes
            self._actor.tell("end", watch, None)

        return end

    def suspect(self) -> None:
        """Ask the stream for its progress now, because etcd seems to be silent."""
        self._actor.tell("suspect", None, None)

    def look_again(self) -> None:
        """List all watched keys again, because a lease has ended. etcd may have been wiped, and may have as
        many revisions again already: a watch alone would not notice."""
        self._actor.tell("look again", None, None)

    def close(self) -> None:
        """End all watches and the threads."""
        self._actor.close()

    # ---- the thread

    def _leave(self) -> None:
        if self._stream:
            self._stream.close()

    def _idle_s(self) -> float:
        """Return the seconds until work is due without a message."""
        now = time.monotonic()
        due = [now + 60.0]
        if (stream := self._stream) and self._watches:
            due.append(stream.heard_at + QUIET_S if stream.asked_at is None else stream.asked_at + ANSWER_S)
        for watch in self._waiting:
            to_open = watch._state is _State.TO_OPEN and self._stream is None
            due.append(max(watch._retry_at, self._stream_at) if to_open else watch._retry_at)
        return max(0.0, min(due) - now)

    def _handle(self, what: str, whose: Any, content: Any) -> None:
        match what:
            case "add":
                self._watches[whose] = None
                self._become(whose, _State.TO_LIST)
            case "end":
                self._forget(whose)
            case "listed":
                self._listed(whose, content)
            case "response":
                self._heard(whose, content)
            case "broken":
                if whose is self._stream:
                    self._broken(content)
            case "look again":
                for watch in self._watches:
                    self._look_again(watch)
            case "suspect":
                if self._stream and self._stream.asked_at is None:
                    self._stream.heard_at = min(self._stream.heard_at, time.monotonic() - QUIET_S)

    def _act(self) -> None:
        """Do all work that is due."""
        now = time.monotonic()
        self._check_stream(now)
        for watch in [w for w in self._waiting if w._retry_at <= now]:
            if watch._state is _State.TO_LIST:
                self._list(watch)
            else:
                self._open(watch, now)

    def _become(self, watch: KeyWatch, state: _State) -> None:
        watch._state = state
        if state in (_State.TO_LIST, _State.TO_OPEN):
            self._waiting[watch] = None
        else:
            self._waiting.pop(watch, None)

    def _check_stream(self, now: float) -> None:
        stream = self._stream
        if stream is None or not self._watches:
            return
        if stream.asked_at is not None:
            if now >= stream.asked_at + ANSWER_S:
                self._connection.turn()
                self._broken(StoreUnavailable(f"etcd did not answer on a watch for {ANSWER_S:g} s"))
        elif now >= stream.heard_at + QUIET_S:
            stream.asked_at = now
            stream.requests.put(rpc.WatchRequest(progress_request=rpc.WatchProgressRequest()))

    # ---- listing

    def _list(self, watch: KeyWatch) -> None:
        self._become(watch, _State.LISTING)
        watch._stale = False
        self._connection.start(
            "range",
            kv.range_request(watch.key, prefix=watch.prefix),
            timeout_s=self._connection.access.timeout_s,
            done=lambda result: self._actor.tell("listed", watch, result),
        )

    def _listed(self, watch: KeyWatch, result: Any) -> None:
        if watch._ended:
            return
        if isinstance(result, StoreError):
            self._become(watch, _State.TO_LIST)
            self._retry(watch, result)
            return
        listing = kv.range_result(result)
        if listing.revision < watch._revision:
            self._tell(
                watch, HistoryLost("etcd has lost revisions that it had shown: it was wiped or restored")
            )
        watch._revision = listing.revision
        self._become(watch, _State.TO_OPEN)
        watch._retries, watch._retry_at = 0, 0.0
        self._deliver(watch, listing)
        if watch._stale:
            self._relist(watch)

    # ---- following

    def _open(self, watch: KeyWatch, now: float) -> None:
        if self._stream is None:
            if now < self._stream_at:
                return
            try:
                self._stream = _Stream(self._connection, self._actor.tell)
            except StoreError as error:
                self._broken(error)
                return
        self._stream.opening.append(watch)
        self._become(watch, _State.OPENING)
        request = rpc.WatchCreateRequest(
            key=watch.key,
            range_end=kv.prefix_end(watch.key) if watch.prefix else b"",
            start_revision=watch._revision + 1,
        )
        self._stream.requests.put(rpc.WatchRequest(create_request=request))
        self._stream.heard_at = max(self._stream.heard_at, now)  # give etcd time to answer

    def _heard(self, stream: _Stream, response: Any) -> None:
        if stream is not self._stream:
            return
        stream.heard_at = time.monotonic()
        stream.asked_at = None
        self._stream_retries = 0
        if response.created:
            watch = stream.opening.popleft()
            if response.canceled:
                self._canceled(watch, response)
            elif watch._ended:
                self._cancel(stream, response.watch_id)
            else:
                self._become(watch, _State.OPEN)
                watch._id, watch._told = response.watch_id, ""
                stream.open[watch._id] = watch
                if watch._stale or response.header.revision < watch._revision:
                    self._cancel(stream, stream.open.pop(watch._id)._id)
                    self._relist(watch)
            return
        if response.watch_id in stream.open:  # otherwise progress, or the watch has ended
            self._heard_of(stream, stream.open[response.watch_id], response)

    def _heard_of(self, stream: _Stream, watch: KeyWatch, response: Any) -> None:
        if response.canceled:
            del stream.open[response.watch_id]
            self._canceled(watch, response)
            return
        items = tuple(
            item for event in response.events if (item := kv.event(event)).revision > watch._revision
        )
        if items:
            watch._revision = items[-1].revision
            self._deliver(watch, Events(items))

    def _canceled(self, watch: KeyWatch, response: Any) -> None:
        """Handle a watch that etcd has cancelled, with its reason."""
        if watch._ended:
            return
        reason = response.cancel_reason.removeprefix("etcdserver: ")
        if response.compact_revision:
            self._relist(watch)
            return
        self._become(watch, _State.TO_LIST)  # a listing gives a clearer error than a watch
        if "auth token" in reason:
            self._retry(watch, TokenExpired(reason))
            self._broken(StoreUnavailable("the login has expired"))
        elif "permission denied" in reason:
            self._retry(watch, StoreRefused(f"etcd denies the watch of {watch.key.decode(errors='replace')}"))
        else:
            self._retry(watch, StoreUnavailable(f"etcd ended the watch ({reason or 'without a reason'})"))

    def _look_again(self, watch: KeyWatch) -> None:
        match watch._state:
            case _State.OPEN:
                assert self._stream is not None
                self._cancel(self._stream, self._stream.open.pop(watch._id)._id)
                self._relist(watch)
            case _State.LISTING | _State.OPENING:
                watch._stale = True
            case _State.TO_OPEN:
                self._relist(watch)

    def _relist(self, watch: KeyWatch) -> None:
        self._become(watch, _State.TO_LIST)
        watch._retry_at = 0.0

    def _broken(self, failure: StoreError) -> None:
        """Drop the stream. Its watches wait for the next stream."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        self._stream_retries += 1
        self._stream_at = time.monotonic() + _pause_s(self._stream_retries)
        for watch in self._watches:
            if watch._state in (_State.OPEN, _State.OPENING):
                self._become(watch, _State.TO_OPEN)
            if watch._state is _State.TO_OPEN:
                self._tell(watch, failure)

    def _forget(self, watch: KeyWatch) -> None:
        self._watches.pop(watch, None)
        self._waiting.pop(watch, None)
        stream = self._stream
        if stream and stream.open.get(watch._id) is watch:
            del stream.open[watch._id]
            self._cancel(stream, watch._id)

    def _cancel(self, stream: _Stream, watch_id: int) -> None:
        stream.requests.put(rpc.WatchRequest(cancel_request=rpc.WatchCancelRequest(watch_id=watch_id)))

    # ---- telling

    def _retry(self, watch: KeyWatch, error: StoreError) -> None:
        watch._retries += 1
        watch._retry_at = time.monotonic() + _pause_s(watch._retries)
        self._tell(watch, error)

    def _tell(self, watch: KeyWatch, error: StoreError) -> None:
        if isinstance(error, (StoreUnavailable, Compacted, TokenExpired)) or watch._told == str(error):
            return
        if watch._ended:
            return
        watch._told = str(error)
        try:
            watch.follower.failed(error)
        except Exception:  # noqa: BLE001  (nothing may end this thread)
            _log.exception("the follower of a watch failed; continuing")

    def _deliver(self, watch: KeyWatch, what: Range | Events) -> None:
        if watch._ended:
            return
        try:
            watch.follower.seen(what)
        except Exception:  # noqa: BLE001  (nothing may end this thread)
            _log.exception("the follower of a watch failed; continuing")


def _pause_s(retries: int) -> float:
    """Return a pause that grows with each retry, and differs between agents."""
    return random.uniform(0.5, 1.0) * min(RETRY_MAX_S, RETRY_MIN_S * 2.0 ** min(retries, 10))
