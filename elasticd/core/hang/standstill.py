"""The standstill of a node's workers: how long they have made no step, their activity meanwhile, and the
usual time of a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from elasticd.core.hang.judging import Allowance, Doing, Look, ProcessState, Pulse, doing
from elasticd.core.thread_activity import ActivityKind, ThreadActivity

PULSE_S = 0.25  # the least time between two samples from which a pulse is computed
WINDOW_S = 10.0
GAPS_KEPT = 256
FIRST_STEPS = 3  # the first steps of a process connect, allocate and compile


@dataclass(frozen=True, slots=True)
class Beat:
    """A reading of a worker's steps. ``steps``: all steps of its process. ``steps_before``: the steps of the
    process before this round. ``times``: the times of the steps since the last reading."""

    slot: int
    rank: int
    pid: int
    steps_before: int
    steps: int
    times: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Vitals:
    """The kernel's figures of a process.

    ``cpu_s``: the CPU time so far of the process, its descendants and reaped children. ``wakes``,
    ``all_wakes``: how often the main thread, and all threads together, have continued after a wait.
    """

    state: ProcessState
    cpu_s: float
    wakes: int = 0
    all_wakes: int = 0


@dataclass(frozen=True, slots=True)
class Inspected:
    """The result of a look at a worker: its figures, and its place in the code if the place is known."""

    slot: int
    rank: int
    vitals: Vitals
    where: ThreadActivity | None


@dataclass(frozen=True, slots=True)
class WatchedWorker:
    """The observations of a worker. ``since``: when it was first seen in this round. ``last_at``: the time of
    its last step. ``sampled``: its figures, with their times. ``where``: its last known place in the code,
    the same since ``there_since``. ``there_s``: the time between the first and the last look that saw it
    there. ``waits_since``, ``waits_s``: the same for waits in collectives, at any place."""

    slot: int
    rank: int
    pid: int
    steps_before: int
    since: float
    steps: int
    last_at: float = 0.0
    sampled: tuple[tuple[float, Vitals], ...] = ()
    where: ThreadActivity | None = None
    there_since: float = 0.0
    there_s: float = 0.0
    waits_since: float = 0.0
    waits_s: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether the worker was last seen in a collective."""
        return self.where is not None and self.where.kind is ActivityKind.COLLECTIVE

    @property
    def made(self) -> int:
        """The steps in this round."""
        return self.steps - self.steps_before

    def pulse(self, now: float, seen: Vitals) -> Pulse:
        """Return the worker's recent activity."""
        at, before = self.sampled[0] if self.sampled else (now, seen)
        past_s = now - at
        if past_s < PULSE_S:
            return Pulse(1.0)  # nothing is known: the worker may be busy
        return Pulse(
            (seen.cpu_s - before.cpu_s) / past_s,
            (seen.wakes - before.wakes) / past_s,
            (seen.all_wakes - before.all_wakes) / past_s,
        )


@dataclass(frozen=True, slots=True)
class Standstill:
    """The standstill of a node's workers. ``workers``: those of the round, by slot. ``aware_since``: earlier
    time was not watched and does not count. All times are of the clock that workers' steps use."""

    aware_since: float
    workers: Mapping[int, WatchedWorker] = field(default_factory=dict)
    recent: tuple[float, ...] = ()
    largest_s: float = 0.0

    def learn(self, beats: Iterable[Beat], alive: Set[int], at: float) -> Standstill:
        """Note the steps that the workers have made."""
        workers = {slot: worker for slot, worker in self.workers.items() if slot in alive}
        recent, largest_s = self.recent, self.largest_s
        for beat in beats:
            if beat.slot not in alive:
                continue
            worker = workers.get(beat.slot)
            if worker is None or worker.pid != beat.pid:
                before = beat.steps_before
                worker = WatchedWorker(beat.slot, beat.rank, beat.pid, before, at, before)
            if beat.times:
                whole = worker.last_at > 0 and worker.steps == beat.steps - len(beat.times)
                known = (worker.last_at, *beat.times) if whole else beat.times
                gaps = [b - a for a, b in itertools.pairwise(known) if b >= a]
                recent = (*recent, *gaps)[-GAPS_KEPT:]
                worker = replace(_unseen(worker), steps=beat.steps, last_at=beat.times[-1])
                if worker.made - len(gaps) >= FIRST_STEPS:
                    largest_s = max([largest_s, *gaps])
            workers[beat.slot] = worker
        return replace(self, workers=workers, recent=recent, largest_s=largest_s)

    def sample(self, seen: Mapping[int, Vitals], at: float) -> Standstill:
        """Note the figures of each worker."""
        workers = dict(self.workers)
        for slot, vitals in seen.items():
            if slot not in workers:
                continue
            sampled = (*workers[slot].sampled, (at, vitals))
            while len(sampled) > 1 and sampled[1][0] <= at - WINDOW_S:
                sampled = sampled[1:]
            workers[slot] = replace(workers[slot], sampled=sampled)
        return replace(self, workers=workers)

    def see(self, sights: Iterable[Inspected], asked_at: float, at: float) -> Standstill:
        """Note where the workers are in their code. They were looked at between ``asked_at`` and ``at``."""
        workers = dict(self.workers)
        for seen in sights:
            worker = workers.get(seen.slot)
            if worker is None:
                continue
            there_since = max(worker.there_since, self.aware_since) if seen.where == worker.where else at
            waits_since = max(worker.waits_since, self.aware_since) if worker.waits else at
            worker = replace(worker, where=seen.where, there_since=there_since, waits_since=waits_since)
            workers[seen.slot] = replace(
                worker,
                there_s=max(0.0, asked_at - there_since),
                waits_s=max(0.0, asked_at - waits_since) if worker.waits else 0.0,
            )
        return replace(self, workers=workers)

    def calm(self) -> Standstill:
        """Forget the figures and the places, because the workers make steps."""
        return replace(self, workers={slot: _unseen(worker) for slot, worker in self.workers.items()})

    def forget(self) -> Standstill:
        """Forget the workers, but keep the times of steps, which are the same for all workers of the job."""
        return replace(self, workers={})

    # ------------------------------------------------------------ what is known

    @property
    def gaps(self) -> tuple[float, ...]:
        """The recent times between steps and the longest ever, in seconds; empty if none is known."""
        return (*self.recent, self.largest_s) if self.recent else ()

    @property
    def least_made(self) -> int:
        """The least number of steps that a worker has made in this round."""
        return min((worker.made for worker in self.workers.values()), default=0)

    def longest_s(self, at: float) -> float:
        """Return the longest standstill of a worker."""
        return max((self.still_s(worker, at) for worker in self.workers.values()), default=0.0)

    def longest_stopped_s(self, at: float) -> float:
        """Return the longest time that a worker has been stopped."""
        return max((self.stopped_s(worker, at) for worker in self.workers.values()), default=0.0)

    def still_s(self, worker: WatchedWorker, at: float) -> float:
        """Return how long the worker has made no step."""
        return at - max(worker.last_at if worker.made else worker.since, self.aware_since)

    def stopped_s(self, worker: WatchedWorker, at: float) -> float:
        """Return how long the worker has been stopped: since it was last seen in another state, at most since
        its last step."""
        still_s = self.still_s(worker, at)
        for seen_at, seen in reversed(worker.sampled):
            if seen.state is not ProcessState.STOPPED:
                return min(still_s, at - seen_at)
        return still_s if worker.sampled else 0.0

    def look(self, node: str, seen: Inspected, allowed: Allowance, at: float) -> Look:
        """Return a look at one worker, as it was seen."""
        worker, where = self.workers[seen.slot], seen.where
        still_s = self.still_s(worker, at)
        kind = doing(seen.vitals.state, worker.pulse(at, seen.vitals), where)
        if kind is Doing.STOPPED:
            still_s = min(still_s, self.stopped_s(worker, at))
        elif still_s < allowed.stopped_s:
            kind = Doing.MOVING
        place, what = (where.place, where.doing) if where else ("", "")
        how_long = worker.there_s, worker.waits_s
        return Look(
            node, seen.slot, seen.rank, worker.made, still_s, kind, place, what, *how_long, not worker.steps
        )

    def as_it_was(self, look: Look, allowed: Allowance | None) -> bool:
        """Whether the worker is still in the state of the look, by the observations since then. It has made
        no step, and is still stopped, waiting, or in its own code. A worker that waits must be at the same
        place, unless it has stood still for longer than ``busy_s``."""
        worker = self.workers.get(look.slot)
        if worker is None or worker.made != look.step:
            return False
        if look.doing is Doing.STOPPED:
            return not worker.sampled or worker.sampled[-1][1].state is ProcessState.STOPPED
        if worker.where is None:
            return True
        if (worker.where.place, worker.where.doing) == (look.place, look.what):
            return True
        if look.doing is Doing.WAITING:
            return worker.waits and allowed is not None and look.still_s >= allowed.busy_s
        return look.doing in (Doing.BUSY, Doing.ASLEEP) and not worker.waits


def _unseen(worker: WatchedWorker) -> WatchedWorker:
    if not (worker.sampled or worker.where or worker.there_s or worker.waits_s):
        return worker
    return replace(worker, sampled=(), where=None, there_s=0.0, waits_s=0.0)
