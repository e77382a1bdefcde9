"""How long the workers of a node have stood still, how they have been since, and how long their steps take
when they make any."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from elasticd.core.hang.judging import Allowance, Doing, Look, ProcessState, Pulse, doing
from elasticd.core.whereabouts import Whereabouts

PULSE_S = 0.25  # what is known of a shorter time says nothing
WINDOW_S = 10.0
GAPS_KEPT = 256
FIRST_STEPS = 3  # of a process: they connect, allocate and compile, as no later step does


@dataclass(frozen=True, slots=True)
class Beat:
    """What a worker of the round tells of its steps. ``steps``: of its process, up to now; ``steps_before``:
    those made before it came to this round; ``times``: of the last of them that were not read before."""

    slot: int
    rank: int
    pid: int
    steps_before: int
    steps: int
    times: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Vitals:
    """How a process is. ``cpu_s``: CPU time so far of the process, its descendants and reaped children.
    ``wakes``, ``all_wakes``: how often the main thread, and all threads together, have waited for something
    and continued."""

    state: ProcessState
    cpu_s: float
    wakes: int = 0
    all_wakes: int = 0


@dataclass(frozen=True, slots=True)
class Inspected:
    """A worker that was looked at: how it is, and where in its code, if that is known."""

    slot: int
    rank: int
    vitals: Vitals
    where: Whereabouts | None


@dataclass(frozen=True, slots=True)
class Worker:
    """What is known of a process. ``since``: when it was first seen in this round; ``last_at``: of its last
    step; ``sampled``: how it was, and when."""

    slot: int
    rank: int
    pid: int
    steps_before: int
    since: float
    steps: int
    last_at: float = 0.0
    sampled: tuple[tuple[float, Vitals], ...] = ()

    @property
    def made(self) -> int:
        """Steps in this round: one that waits for its world to be there hangs in no step."""
        return self.steps - self.steps_before

    def pulse(self, now: float, seen: Vitals) -> Pulse:
        """How it has been of late."""
        at, before = self.sampled[0] if self.sampled else (now, seen)
        past_s = now - at
        if past_s < PULSE_S:
            return Pulse(1.0)  # nothing is known: it may be busy
        return Pulse(
            (seen.cpu_s - before.cpu_s) / past_s,
            (seen.wakes - before.wakes) / past_s,
            (seen.all_wakes - before.all_wakes) / past_s,
        )


@dataclass(frozen=True, slots=True)
class Standstill:
    """``workers``: by slot, those of the round. ``aware_since``: what happened before was not watched,
    and counts for nothing. All times are of the clock in which workers tell their steps."""

    aware_since: float
    workers: Mapping[int, Worker] = field(default_factory=dict)
    recent: tuple[float, ...] = ()
    largest_s: float = 0.0

    def learn(self, beats: Iterable[Beat], alive: Set[int], at: float) -> Standstill:
        """Which steps they have made by now."""
        workers = {slot: worker for slot, worker in self.workers.items() if slot in alive}
        recent, largest_s = self.recent, self.largest_s
        for beat in beats:
            if beat.slot not in alive:
                continue
            worker = workers.get(beat.slot)
            if worker is None or worker.pid != beat.pid:
                before = beat.steps_before
                worker = Worker(beat.slot, beat.rank, beat.pid, before, at, before)
            if beat.times:
                whole = worker.last_at > 0 and worker.steps == beat.steps - len(beat.times)
                known = (worker.last_at, *beat.times) if whole else beat.times
                gaps = [b - a for a, b in itertools.pairwise(known) if b >= a]
                recent = (*recent, *gaps)[-GAPS_KEPT:]
                worker = replace(worker, steps=beat.steps, last_at=beat.times[-1], sampled=())
                if worker.made - len(gaps) >= FIRST_STEPS:
                    largest_s = max([largest_s, *gaps])
            workers[beat.slot] = worker
        return replace(self, workers=workers, recent=recent, largest_s=largest_s)

    def sample(self, seen: Mapping[int, Vitals], at: float) -> Standstill:
        """Note how each is."""
        workers = dict(self.workers)
        for slot, vitals in seen.items():
            if slot not in workers:
                continue
            sampled = (*workers[slot].sampled, (at, vitals))
            while len(sampled) > 1 and sampled[1][0] <= at - WINDOW_S:
                sampled = sampled[1:]
            workers[slot] = replace(workers[slot], sampled=sampled)
        return replace(self, workers=workers)

    def calm(self) -> Standstill:
        """Forget how they were: they make steps."""
        return replace(self, workers={s: replace(w, sampled=()) for s, w in self.workers.items()})

    def forget(self) -> Standstill:
        """All but how long steps take: that is the job's, whoever makes them."""
        return replace(self, workers={})

    # ------------------------------------------------------------ what is known

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between steps, of late, and the longest ever; empty where none is known."""
        return (*self.recent, self.largest_s) if self.recent else ()

    @property
    def least_made(self) -> int:
        """The steps that each of them has made in this round."""
        return min((worker.made for worker in self.workers.values()), default=0)

    def longest_s(self, at: float) -> float:
        """How long the one that has stood still for longest has."""
        return max((self.still_s(worker, at) for worker in self.workers.values()), default=0.0)

    def longest_stopped_s(self, at: float) -> float:
        """How long the one that has been stopped for longest has."""
        return max((self.stopped_s(worker, at) for worker in self.workers.values()), default=0.0)

    def still_s(self, worker: Worker, at: float) -> float:
        """How long it has made no step."""
        return at - max(worker.last_at if worker.made else worker.since, self.aware_since)

    def stopped_s(self, worker: Worker, at: float) -> float:
        """How long it has been stopped: since it was last seen otherwise, or stands still."""
        still_s = self.still_s(worker, at)
        for seen_at, seen in reversed(worker.sampled):
            if seen.state is not ProcessState.STOPPED:
                return min(still_s, at - seen_at)
        return still_s if worker.sampled else 0.0

    def look(self, node: str, seen: Inspected, allowed: Allowance, at: float) -> Look:
        """At one of them, as it was seen."""
        worker, where = self.workers[seen.slot], seen.where
        still_s = self.still_s(worker, at)
        kind = doing(seen.vitals.state, worker.pulse(at, seen.vitals), where)
        if kind is Doing.STOPPED:
            still_s = min(still_s, self.stopped_s(worker, at))
        elif still_s < allowed.stopped_s:
            kind = Doing.MOVING
        place, what = (where.place, where.doing) if where else ("", "")
        return Look(node, seen.slot, seen.rank, worker.made, still_s, kind, place, what)

    def as_it_was(self, look: Look) -> bool:
        """Whether the worker has made no step since."""
        worker = self.workers.get(look.slot)
        return worker is not None and worker.made == look.step
