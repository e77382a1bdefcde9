"""Measures the own time of this node's workers for a step, in periods, and tells the leader, who compares
those of all nodes; and which GPUs are bad.

Where the leader's node is alone in its round, nothing of that goes through etcd but the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elasticd.core.facts import BadSlot, Paces, SlotPace, Stragglers
from elasticd.core.page import Told
from elasticd.core.ports import Put, Seen, Store
from elasticd.core.straggler import PERIODS, Strides, own_times
from elasticd.daemon.driver import Driver
from elasticd.telemetry.gpus import GpuReading, trouble

PERIOD_S_MIN = 0.5
FIRST_STEPS = 5  # of a worker in a round: they connect, allocate and compile, as no later step does

HearRound = Callable[[int], Mapping[int, Told]]


@dataclass(frozen=True, slots=True)
class Standing:
    """How a worker of this node does. ``ratio``: of its own time to the usual one, if both are known."""

    ratio: float | None
    straggling: bool


class Comparison:
    """``routine(now)`` does what is due and returns when the next is. ``standings``: of this node's slots,
    as last known; ``bad``: those with a GPU that is, and why. ``found``: what the leader has found in all
    nodes. ``throttled_s``: for how long a quota has held up this node's processes so far."""

    def __init__(
        self, driver: Driver, store: Store, hear: HearRound, throttled_s: Callable[[], float]
    ) -> None:
        self._driver = driver
        self._store = store
        self._hear = hear
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
        self.found: Stragglers | None = None
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
        at_work = crew is not None and crew.order is None and not crew.fenced and bool(crew.alive)
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
            put = Put(f"paces/{paces.node}", paces, leased=True)
            if len(crew.round.members) == 1 and self._driver.view is not None:
                self._driver.tell_the_leader(put)
            else:
                self._write(put)

    def _write(self, put: Put) -> None:
        """A lost one is a period that nobody compares."""
        state = self._driver.state
        if state.guard is not None:
            self._store.transact((state.guard,), (put,), lambda answer: None)

    def _stand(self) -> None:
        found = self.found
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
                self.found = entry.fact if isinstance(entry.fact, Stragglers) else None
