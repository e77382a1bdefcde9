"""Sees that a worker is slower than its peers, or that its GPU is bad, and has it said, and told to the
leader's decisions.

Each agent measures its own workers' time for a step, in periods; the leader compares them all. In a job
of one node nothing of that goes through etcd but the verdict.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from elasticd.core.facts import BadSlot, Laggard, Paces, Phase, Round, SlotPace, Stragglers
from elasticd.core.page import Told
from elasticd.core.ports import Entry, Listing, Put, Seen, StillThere, Store
from elasticd.core.reasons import Reason, SlotBad, WorkerKeepsUp, WorkerStraggling
from elasticd.core.straggler import PERIODS, Place, Strides, Tolerance, Watch, own_times
from elasticd.daemon.driver import Driver
from elasticd.telemetry.gpus import GpuReading, trouble

PERIOD_S_MIN = 0.5
FIRST_STEPS = 5  # of a worker in a round: they connect, allocate and compile, as no later step does
CHANGED = 0.02  # by how much the usual time must differ to be worth a write

HearRound = Callable[[int], Mapping[int, Told]]


@dataclass(frozen=True, slots=True)
class Standing:
    """How a worker of this node does. ``ratio``: of its own time to the usual one, if both are known."""

    ratio: float | None
    straggling: bool


class Comparison:
    """``routine(now)`` does what is due and returns when the next is. ``standings``: of this node's slots,
    as last known; ``bad``: those with a GPU that is, and why. ``throttled_s``: for how long a quota has held
    up this node's processes so far."""

    def __init__(
        self,
        driver: Driver,
        store: Store,
        hear: HearRound,
        say: Callable[[Reason], None],
        throttled_s: Callable[[], float],
    ) -> None:
        self._driver = driver
        self._store = store
        self._hear = hear
        self._say = say
        self._throttled_s = throttled_s
        self._throttled_before_s = 0.0
        self.standings: Mapping[int, Standing] = {}
        self.bad: Mapping[int, str] = {}
        self._spoilt_before: dict[int, int] = {}
        self._due = 0.0
        self._round = 0
        self._number = 0
        self._first: dict[int, Strides] = {}  # as they came to the round
        self._before: dict[int, Strides] = {}
        self._own: dict[int, float] = {}
        self._found: Stragglers | None = None
        self._leader = _Leader(driver, store, say)
        store.watch("stragglers", self._verdict_seen)

    def look_at_gpu(self, slot: int, reading: GpuReading) -> None:
        """A GPU that has told of an error of its own stays suspect while this agent lives."""
        spoilt = reading.ecc.get("uncorrected")
        if spoilt is not None:
            self._spoilt_before.setdefault(slot, spoilt)
        why = trouble(reading, self._spoilt_before.get(slot, 0))
        if why and slot not in self.bad:
            self.bad = {**self.bad, slot: why}

    def routine(self, now: float) -> float:
        self._leader.lead()
        if now >= self._due:
            policy = self._driver.state.policy_source.policy
            self._due = now + max(PERIOD_S_MIN, policy.straggler_window_s / PERIODS)
            self._measure()
        self._stand()
        return self._due

    # ------------------------------------------------------------ this node's

    def _measure(self) -> None:
        """A period ends once each worker has made a step in it: its steps may take longer than that."""
        crew, me = self._driver.state.crew, self._driver.state.me
        at_work = crew is not None and not (crew.stopping or crew.fenced) and bool(crew.alive)
        if crew is None or not at_work or crew.round.number != self._round:
            self._first, self._before, self._own = {}, {}, {}
            self._round = crew.round.number if crew is not None else 0
            if not at_work:
                return
        assert crew is not None
        told = {slot: t for slot, t in self._hear(self._round).items() if slot in crew.alive}
        strides = {s: Strides(t.steps, t.stepped_at, t.wait_s, t.waits, t.delay_s) for s, t in told.items()}
        slots: tuple[SlotPace, ...] = ()
        if strides.keys() != self._first.keys():
            self._first, self._before = strides, {}
        elif not self._before:
            if all(strides[s].steps >= self._first[s].steps + FIRST_STEPS for s in strides):
                self._before, self._throttled_before_s = strides, self._throttled_s()
        elif all(strides[slot].steps > self._before[slot].steps for slot in strides):
            throttled_s = self._throttled_s()
            self._own = own_times(self._before, strides, throttled_s - self._throttled_before_s)
            self._before, self._throttled_before_s = strides, throttled_s
            slots = tuple(SlotPace(s, crew.member.rank_of(s), o) for s, o in sorted(self._own.items()))
        bad = tuple(
            BadSlot(s, crew.member.rank_of(s), w) for s, w in self.bad.items() if s in crew.member.slots
        )
        if slots or bad:
            self._number += 1
            paces = Paces(me.node, me.incarnation, self._round, self._number, slots, bad)
            if len(crew.round.members) == 1:
                self._leader.hear(paces)
                self._leader.lead()
            else:
                self._write(paces)

    def _write(self, paces: Paces) -> None:
        """A lost one is a period that nobody compares."""
        state = self._driver.state
        if state.own is not None and state.own.fact is not None and not state.silent:
            guard = StillThere(state.me.key, state.own.created)
            put = Put(f"paces/{paces.node}", paces, leased=True)
            self._store.transact((guard,), (put,), lambda answer: None)

    def _stand(self) -> None:
        found = self._found
        current = found if found is not None and found.round == self._round else None
        node = self._driver.state.me.node
        slow = {one.slot for one in current.slow if one.node == node and not one.why} if current else set()
        usual_s = current.usual_s if current is not None else 0.0
        self.standings = {
            slot: Standing(own / usual_s if usual_s else None, slot in slow)
            for slot, own in self._own.items()
        }

    def _verdict_seen(self, seen: Seen) -> None:
        for entry in seen.entries:
            if entry.key == "stragglers":
                self._found = entry.fact if isinstance(entry.fact, Stragglers) else None


class _Leader:
    """Compares all nodes' workers, while this agent leads."""

    def __init__(self, driver: Driver, store: Store, say: Callable[[Reason], None]) -> None:
        self._driver = driver
        self._store = store
        self._say = say
        self._news: deque[Seen] = deque()
        self._paces: dict[str, Paces] = {}
        self._taken: dict[str, int] = {}
        self._watch = Watch()
        self._round = 0
        self._told: Stragglers | None = None
        self._following: tuple[int, Callable[[], None]] | None = None

    def hear(self, paces: Paces) -> None:
        self._paces[paces.node] = paces

    def lead(self) -> None:
        leads = self._driver.state.leads
        if self._following is not None and (leads is None or leads.created != self._following[0]):
            self._following[1]()
            self._following, self._told = None, None
            self._paces.clear()
            self._news.clear()
        if leads is None:
            return
        if self._following is None:
            self._following = (leads.created, self._store.watch("paces/", self._news.append, prefix=True))
        while self._news:
            self._take(self._news.popleft())
        round = self._driver.state.round
        if round is not None and round.phase is Phase.LIVE:
            self._compare(leads, round)

    def _take(self, seen: Seen) -> None:
        if isinstance(seen, Listing) and seen.entries:
            self._paces.clear()
        for entry in seen.entries:
            if isinstance(entry.fact, Paces):
                self._paces[entry.fact.node] = entry.fact
            else:
                self._paces.pop(entry.key.partition("/")[2], None)

    def _compare(self, leads: Entry, round: Round) -> None:
        if round.number != self._round:
            policy = self._driver.state.policy_source.policy
            self._round, self._watch = round.number, Watch(tolerance=Tolerance(policy.straggler_ratio))
            self._taken = {}
        heard = {
            m.node: p
            for m in round.members
            if (p := self._paces.get(m.node)) is not None
            and (p.round, p.incarnation) == (round.number, m.incarnation)
        }
        fresh = {n: p for n, p in heard.items() if p.slots and p.number > self._taken.get(n, 0)}
        if len(fresh) == len(round.members):
            self._taken = {node: p.number for node, p in fresh.items()}
            times = {(node, slot.slot): slot.own_s for node, p in fresh.items() for slot in p.slots}
            if len(times) == round.world_size:
                self._watch = self._watch.see(times)
        self._conclude(leads, round, heard)

    def _conclude(self, leads: Entry, round: Round, heard: Mapping[str, Paces]) -> None:
        last = self._watch.periods[-1] if self._watch.periods else {}
        usual_s = median(last.values()) if last else 0.0
        ratios = self._watch.ratios
        slow = [Laggard(n, s, _rank(round, (n, s)), _hundredths(ratios[n, s])) for n, s in self._watch.named]
        slow += [Laggard(n, b.slot, b.rank, 0.0, b.why) for n, p in heard.items() for b in p.bad]
        found = Stragglers(round.number, usual_s, tuple(sorted(slow, key=lambda one: one.rank)))
        before = self._told
        if before is not None and before.round == found.round and not _differs(before, found):
            return
        if before is None and not found.slow and not usual_s:
            return
        self._told = found
        self._speak(before, found)
        guard = StillThere("leader", leads.created)
        self._store.transact((guard,), (Put("stragglers", found, leased=True),), lambda answer: None)

    def _speak(self, before: Stragglers | None, found: Stragglers) -> None:
        same = before is not None and before.round == found.round
        then = {(x.node, x.slot, x.why): x for x in before.slow} if before is not None and same else {}
        now = {(x.node, x.slot, x.why): x for x in found.slow}
        for key in now.keys() - then.keys():
            one = now[key]
            self._say(
                SlotBad(one.node, one.slot, one.rank, one.why)
                if one.why
                else WorkerStraggling(one.node, one.slot, one.rank, one.ratio)
            )
        for key in then.keys() - now.keys():
            self._say(WorkerKeepsUp(then[key].node, then[key].slot, then[key].rank))


def _hundredths(ratio: float) -> float:
    return int(ratio * 100 + 0.5) / 100


def _rank(round: Round, place: Place) -> int:
    return next((m.rank_of(place[1]) for m in round.members if m.node == place[0]), -1)


def _differs(one: Stragglers, other: Stragglers) -> bool:
    """By so much that others should know."""
    if {(x.node, x.slot, x.why) for x in one.slow} != {(x.node, x.slot, x.why) for x in other.slow}:
        return True
    return abs(one.usual_s - other.usual_s) > CHANGED * max(one.usual_s, other.usual_s)
