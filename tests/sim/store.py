"""A simulated etcd, and one agent's connection to it, with everything that can go wrong between them.

``SimEtcd`` is one logical etcd: revisions, transactions, leases, watches. ``SimStore`` implements
``elasticd.core.ports.Store`` for one agent. Requests take a while. They may get lost on the way there or
back, or arrive after the agent has given up. Watches lag, and list anew. etcd dies, hangs, or is cut off from
some agents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from elasticd.core.facts import Fact
from elasticd.core.ports import (
    Answer,
    Applied,
    Changes,
    Delete,
    Entry,
    Guard,
    LeaseExpired,
    LeaseHeld,
    LeaseNews,
    Listing,
    NoAnswer,
    Put,
    Refused,
    Seen,
    StillThere,
    StoreSilent,
    Unchanged,
    Write,
)
from elasticd.etcd.validity import problem
from tests.sim.clock import Clock, Timer
from tests.sim.host import SimHost

EXPIRY_LAG_S = 0.5  # etcd looks for expired leases twice a second


@dataclass(slots=True)
class Network:
    """How requests fare on the way to etcd and back. Probabilities are for each request.

    If ``late_max_s`` exceeds the client's timeout, the answer is NoAnswer, and etcd applies the request
    afterwards.
    """

    fastest_s: float = 0.0005
    slowest_s: float = 0.005
    lost: float = 0.0  # never arrives
    answer_lost: float = 0.0  # arrives and is applied; the answer gets lost
    late: float = 0.0  # arrives within late_max_s
    late_max_s: float = 6.0
    watch_lag: float = 0.0  # a batch of a watch takes up to watch_lag_max_s
    watch_lag_max_s: float = 2.0
    misjudged: float = 0.0  # an agent whose probe was too slow believes that it alone is cut off
    relist: float = 0.0  # a batch of a watch is lost to compaction, and a listing takes its place

    def delay_s(self, random: Random) -> float:
        if self.late and random.random() < self.late:
            return random.uniform(self.slowest_s, self.late_max_s)
        return self.fastest_s + (self.slowest_s - self.fastest_s) * random.random()


class Health(StrEnum):
    SERVING = "serving"
    HUNG = "hung"  # takes requests, and answers them once it continues
    DOWN = "down"  # refuses connections


@dataclass(slots=True)
class _Key:
    fact: Fact
    revision: int
    created: int
    lease: int


class _Lease:
    __slots__ = ("alive", "deadline", "id", "keys", "timer", "ttl_s")

    def __init__(self, id: int, ttl_s: float) -> None:
        self.id = id
        self.ttl_s = ttl_s
        self.keys: dict[str, None] = {}  # a dict keeps its order, and a set of strings does not
        self.alive = True
        self.deadline = 0.0
        self.timer: Timer | None = None


class _Topic:
    """A key or prefix that is watched, and all changes there. ``number``: topics were first watched in this
    order, and are told in this order."""

    __slots__ = ("history", "key", "listing", "number", "prefix", "watchers")

    def __init__(self, key: str, prefix: bool, number: int) -> None:
        self.key = key
        self.prefix = prefix
        self.number = number
        self.history: list[Entry] = []
        self.watchers: dict[_Watch, None] = {}
        self.listing: Listing | None = None  # the present listing, if nothing was written since

    def covers(self, key: str) -> bool:
        return key.startswith(self.key) if self.prefix else key == self.key


@dataclass(frozen=True, slots=True)
class Renewal:
    """When an agent renews its lease: after this ``share`` of the lease's time, or ``retry_s`` after etcd did
    not answer."""

    share: float = 1 / 3
    retry_s: float = 0.2


RENEWAL = Renewal()


class SimEtcd:
    """One logical etcd with the keys of one job."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.random = clock.random("etcd")
        self.health = Health.SERVING
        self.revision = 1
        self.keys: dict[str, _Key] = {}
        # called at once with every change, for the invariants
        self.written: list[Callable[[Entry], None]] = []
        self._leases: dict[int, _Lease] = {}
        self._lease_ids = 0
        self._topics: dict[tuple[str, bool], _Topic] = {}
        self._prefixes: list[_Topic] = []
        self._stuck: list[Callable[[], None]] = []
        self._stores: list[SimStore] = []

    # ---- requests, at the moment etcd handles them

    def arrive(self, handle: Callable[[], None], refused: Callable[[], None]) -> None:
        """Handle a request that arrives. A hung etcd handles the request once etcd continues; a dead etcd
        never does."""
        match self.health:
            case Health.SERVING:
                handle()
            case Health.HUNG:
                self._stuck.append(handle)
            case Health.DOWN:
                refused()

    def transact(self, guards: tuple[Guard, ...], writes: tuple[Write, ...], lease: int) -> Applied | Refused:
        for guard in guards:
            at = self.keys.get(guard.key)
            match guard:
                case Unchanged():
                    if (at.revision if at else 0) != guard.revision:
                        return Refused()
                case StillThere():
                    if at is None or at.created != guard.created:
                        return Refused()
        if any(isinstance(w, Put) and w.leased for w in writes) and not self._alive(lease):
            return Refused()
        changed = False
        revision = self.revision + 1
        for write in writes:
            match write:
                case Put():
                    self._put(write, revision, lease if write.leased else 0)
                    changed = True
                case Delete():
                    gone = self._gone_with(write)
                    for key in gone:
                        self._delete(key, revision)
                    changed = changed or bool(gone)
        if changed:
            self.revision = revision
        return Applied(self.revision)

    def grant(self, ttl_s: float) -> int:
        self._lease_ids += 1
        lease = _Lease(self._lease_ids, ttl_s)
        self._leases[lease.id] = lease
        self._extend(lease)
        return lease.id

    def keep_alive(self, lease_id: int) -> bool:
        """Return whether the lease still exists. If so, give it its full time again."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        self._extend(lease)
        return True

    def revoke(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return
        if lease.timer:
            lease.timer.cancel()
        if lease.keys:
            self.revision += 1
            for key in list(lease.keys):
                self._delete(key, self.revision)

    # ---- faults

    def kill(self) -> None:
        """Kill etcd (SIGKILL). Requests that were applied are on disk; requests on their way are lost."""
        self.clock.note("etcd", "is killed")
        self.health = Health.DOWN
        self._stuck.clear()
        self._stop_leases()
        self._break_watches()

    def hang(self) -> None:
        """Stop etcd (SIGSTOP)."""
        self.clock.note("etcd", "hangs")
        self.health = Health.HUNG
        self._stop_leases()

    def recover(self) -> None:
        """Start or continue etcd. After a kill every lease has its full time again. After a hang a lease has
        the time that is left by the clock, so it may run out before or after the waiting keep-alives are
        handled."""
        was, self.health = self.health, Health.SERVING
        self.clock.note("etcd", "is back" if was is Health.DOWN else "goes on")
        stuck, self._stuck = self._stuck, []
        if was is Health.HUNG and self.random.random() < 0.5:
            for lease in list(self._leases.values()):
                if lease.deadline <= self.clock.now():
                    self.revoke(lease.id)
        for lease in list(self._leases.values()):
            if was is Health.DOWN:
                self._extend(lease)
            else:
                self._arm(lease)
        for handle in stuck:
            handle()
        for topic in self._topics.values():
            for watch in list(topic.watchers):
                watch.wake()

    def expire_all(self) -> None:
        """Revoke every lease, as a leader of etcd that stalls may do (etcd#15247)."""
        self.clock.note("etcd", "revokes every lease")
        for lease in list(self._leases.values()):
            self.revoke(lease.id)

    # ---- the content

    def fact(self, key: str) -> Fact | None:
        at = self.keys.get(key)
        return at.fact if at else None

    def topic(self, key: str, prefix: bool) -> _Topic:
        topic = self._topics.get((key, prefix))
        if topic is None:
            topic = self._topics[key, prefix] = _Topic(key, prefix, len(self._topics))
            if prefix:
                self._prefixes.append(topic)
        return topic

    def listing(self, topic: _Topic) -> Listing:
        if topic.listing is None:
            if topic.prefix:
                there = sorted(name for name in self.keys if topic.covers(name))
            else:
                there = [topic.key] if topic.key in self.keys else []
            topic.listing = Listing(tuple(self._entry(name) for name in there), self.revision)
        return topic.listing

    def _entry(self, key: str) -> Entry:
        at = self.keys[key]
        return Entry(key, at.fact, at.revision, at.created)

    def _gone_with(self, write: Delete) -> list[str]:
        if write.prefix:
            return [key for key in self.keys if key.startswith(write.key)]
        return [write.key] if write.key in self.keys else []

    def _covering(self, key: str) -> list[_Topic]:
        """Return the topics of this key."""
        found = [topic for topic in self._prefixes if topic.covers(key)]
        if (one := self._topics.get((key, False))) is not None:
            found.append(one)
        if len(found) > 1:
            found.sort(key=lambda topic: topic.number)
        return found

    def _put(self, write: Put, revision: int, lease_id: int) -> None:
        assert not (wrong := problem(write.key, write.fact)), f"{write.key}: {wrong}"
        at = self.keys.get(write.key)
        if at is None:
            self.keys[write.key] = _Key(write.fact, revision, revision, lease_id)
            created = revision
        else:
            if at.lease and at.lease != lease_id and at.lease in self._leases:
                self._leases[at.lease].keys.pop(write.key, None)
            at.fact, at.revision, at.lease, created = write.fact, revision, lease_id, at.created
        if lease_id:
            self._leases[lease_id].keys[write.key] = None
        self._tell(Entry(write.key, write.fact, revision, created))

    def _delete(self, key: str, revision: int) -> None:
        at = self.keys.pop(key, None)
        if at is None:
            return
        if at.lease in self._leases:
            self._leases[at.lease].keys.pop(key, None)
        self._tell(Entry(key, None, revision, 0))

    def _tell(self, entry: Entry) -> None:
        for topic in self._covering(entry.key):
            topic.history.append(entry)
            topic.listing = None
            for watch in topic.watchers:
                watch.wake()
        for told in self.written:
            told(entry)

    def _alive(self, lease_id: int) -> bool:
        return lease_id in self._leases

    def _extend(self, lease: _Lease) -> None:
        lease.deadline = self.clock.now() + lease.ttl_s
        if lease.timer is None or lease.timer[2] is None:
            self._arm(lease)  # a timer that is set looks at the deadline again when it goes off

    def _arm(self, lease: _Lease) -> None:
        lag_s = EXPIRY_LAG_S * self.random.random()
        lease.timer = self.clock.at(lease.deadline + lag_s, lambda: self._expire(lease))

    def _expire(self, lease: _Lease) -> None:
        if lease.id not in self._leases or self.health is not Health.SERVING:
            return
        if lease.deadline > self.clock.now():
            self._arm(lease)
        else:
            self.revoke(lease.id)

    def _stop_leases(self) -> None:
        for lease in self._leases.values():
            if lease.timer:
                lease.timer.cancel()

    def mute_watches(self) -> None:
        """Have the present watches bring nothing any more."""
        for topic in self._topics.values():
            for watch in topic.watchers:
                watch.seen = lambda what: None

    def _break_watches(self) -> None:
        for topic in self._topics.values():
            for watch in topic.watchers:
                watch.broken = True


class SimStore:
    """One agent's client of etcd: ``elasticd.core.ports.Store``."""

    def __init__(
        self,
        etcd: SimEtcd,
        host: SimHost,
        network: Network,
        *,
        ttl_s: float = 5.0,
        timeout_s: float = 2.0,
        renewal: Renewal = RENEWAL,
    ) -> None:
        self.etcd = etcd
        self.host = host
        self.network = network
        self.ttl_s = ttl_s
        self.timeout_s = timeout_s
        self.renewal = renewal
        self.cut = False  # nothing passes between this agent and etcd
        self.random = host.clock.random(f"network {host.name}")
        self._clock = host.clock
        self._watches: list[_Watch] = []
        self._lease: int = 0
        self._due = 0.0  # when to renew the lease next
        self._late_s = 0.0  # how late the present renewal was sent
        self._news: Callable[[LeaseNews], None] | None = None
        self._silence: StoreSilent | None = None
        self._closed = False

    # ---- the port

    def transact(
        self,
        guards: tuple[Guard, ...],
        writes: tuple[Write, ...],
        answer: Callable[[Answer], None],
    ) -> None:
        lease = self._lease
        self._request(lambda: self.etcd.transact(guards, writes, lease), answer)

    def watch(self, key: str, seen: Callable[[Seen], None], *, prefix: bool = False) -> Callable[[], None]:
        watch = _Watch(self, self.etcd.topic(key, prefix), seen)
        watch.open()
        self._watches.append(watch)
        return watch.close

    def hold_lease(self, news: Callable[[LeaseNews], None]) -> None:
        assert self._news is None, "hold_lease is called once"
        self._news = news
        self._keep()

    def close(self) -> None:
        """End the watches and give the lease back, if etcd can be reached."""
        self._closed = True
        for watch in self._watches:
            watch.close()
        lease = self._lease

        def revoke() -> bool:
            self.etcd.revoke(lease)
            return True

        self._request(revoke, lambda _: None)

    # ---- faults

    def cut_off(self) -> None:
        """Cut the connection in both directions. Messages on their way are lost, too."""
        self._clock.note(self.host.name, "is cut off from etcd")
        self.cut = True
        for watch in self._watches:
            watch.broken = True

    def reconnect(self) -> None:
        self._clock.note(self.host.name, "reaches etcd again")
        self.cut = False
        for watch in self._watches:
            watch.wake()

    # ---- requests

    def _request(
        self, apply: Callable[[], Answer | int | bool], answer: Callable[..., None], timeout_s: float = 0.0
    ) -> None:
        """Send a request. Call ``answer`` once: with etcd's answer, or with NoAnswer after the timeout."""
        timeout_s = timeout_s or self.timeout_s
        if not self.host.alive:
            return
        random, network, clock = self.random, self.network, self._clock
        pending = True

        def settle(what: Answer | int | bool) -> None:
            nonlocal pending
            if pending:
                pending = False
                deadline.cancel()
                self.host.call(lambda: answer(what))

        def handle() -> None:
            result = apply()
            if random.random() < network.answer_lost:
                return
            clock.after(network.delay_s(random), lambda: None if self.cut else settle(result))

        def arrive() -> None:
            if not self.cut:
                self.etcd.arrive(handle, lambda: settle(NoAnswer("connection refused")))

        deadline = clock.after(timeout_s, lambda: settle(NoAnswer(f"no answer in {timeout_s} s")))
        if not self.cut and random.random() >= network.lost:
            clock.after(network.delay_s(random), arrive)

    # ---- the lease

    def _keep(self) -> None:
        """Ask for a lease, or renew the lease; then again, for ever."""
        if self._closed:
            return
        lease, asked_at = self._lease, self.host.now()
        self._late_s = max(self._late_s, asked_at - self._due) if self._due else 0.0

        def answered(result: NoAnswer | int | bool) -> None:
            if self._closed:
                return
            match result:
                case NoAnswer():
                    self._be_silent(asked_at)
                    self._due = self.host.now() + self.renewal.retry_s
                    self.host.after(self.renewal.retry_s, self._keep)
                case False:
                    self._silence = None
                    self._lease = 0
                    self._tell(LeaseExpired(self._late_s))
                    self._due = self._late_s = 0.0
                    self._keep()
                case _:
                    self._silence = None
                    self._lease = lease or int(result)
                    self._tell(LeaseHeld(asked_at + self.ttl_s))
                    self._due, self._late_s = asked_at + self.ttl_s * self.renewal.share, 0.0
                    self.host.at(self._due, self._keep)

        timeout_s = min(self.timeout_s, max(0.5, self.ttl_s / 5))  # as elasticd.etcd.leases has it
        if lease:
            self._request(lambda: self.etcd.keep_alive(lease), answered, timeout_s)
        else:
            self._request(lambda: self.etcd.grant(self.ttl_s), answered, timeout_s)

    def _be_silent(self, since: float) -> None:
        # The port promises to say whether this agent alone is cut off. If requests may get lost, that is hard
        # to know:
        # unless etcd is down, etcd may be answering other agents.
        cut_off = self.cut or self.etcd.health is Health.SERVING
        misjudged = self.network.misjudged and not (self._silence and self._silence.cut_off)
        if misjudged and self.random.random() < self.network.misjudged:
            cut_off = True  # a probe was too slow, once
        silence = StoreSilent(self._silence.since if self._silence else since, cut_off, since)
        if silence != self._silence:
            self._silence = silence
            self._tell(silence)

    def _tell(self, news: LeaseNews) -> None:
        assert self._news is not None
        self._news(news)


class _Watch:
    """A watch of one agent: its position in the history of its topic."""

    __slots__ = ("at", "broken", "ended", "listed", "seen", "store", "topic", "waiting")

    def __init__(self, store: SimStore, topic: _Topic, seen: Callable[[Seen], None]) -> None:
        self.store = store
        self.topic = topic
        self.seen = seen
        self.at = 0  # how much of the history has been sent
        self.listed = False
        self.broken = False
        self.waiting = False  # a batch is on its way
        self.ended = False

    def open(self) -> None:
        self.topic.watchers[self] = None
        self.waiting = True
        self._later()

    def close(self) -> None:
        self.ended = True
        self.topic.watchers.pop(self, None)

    def wake(self) -> None:
        """Send what is new."""
        if not self.waiting and self.store.host.alive:
            self.waiting = True
            self._later()

    def _later(self) -> None:
        store, network = self.store, self.store.network
        delay_s = network.delay_s(store.random)
        if network.watch_lag and store.random.random() < network.watch_lag:
            delay_s += network.watch_lag_max_s * store.random.random()
        store._clock.after(delay_s, self._send)

    def _send(self) -> None:
        if self.ended or not self.store.host.alive:
            return
        etcd, store = self.store.etcd, self.store
        if store.cut or etcd.health is not Health.SERVING:
            self.broken = self.broken or store.cut or etcd.health is Health.DOWN
            self.waiting = False  # recover() or reconnect() wakes it
            return
        if self.broken:  # connect again, which takes a while
            self.broken = False
            # else etcd has compacted the history meanwhile
            self.listed = self.listed and store.random.random() < 0.7
            store._clock.after(store.random.uniform(0.05, 1.0), self._send)
            return
        history = self.topic.history
        what: Seen
        if not self.listed or (store.network.relist and store.random.random() < store.network.relist):
            self.listed = True
            self.at = len(history)
            what = etcd.listing(self.topic)
        elif self.at < len(history):
            end = len(history)
            if end - self.at > 1 and store.random.random() < store.network.watch_lag:
                end = self._part(history, end)
            what = Changes(tuple(history[self.at : end]))
            self.at = end
        else:
            self.waiting = False
            return
        self.waiting = False
        if self.at < len(history):
            self.wake()
        store.host.call(lambda: None if self.ended else self.seen(what))

    def _part(self, history: list[Entry], end: int) -> int:
        """Return a random place in the history to be sent, but never inside a transaction."""
        part = self.store.random.randrange(self.at + 1, end)
        while part < end and history[part].revision == history[part - 1].revision:
            part += 1
        return part
