"""How long the workers of this node have stood still, how they have been since, and how long their steps
take when they make any."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from elasticd.core.hang import Allowance, Doing, Look, ProcessState, Pulse, doing
from elasticd.procs.scene import Scene, Subject
from elasticd.procs.vitals import Vitals, vitals
from elasticd.procs.workers import Watched

PULSE_S = 0.25  # what is known of a shorter time says nothing
WINDOW_S = 10.0
GAPS_KEPT = 256
FIRST_STEPS = 3  # of a process: they connect, allocate and compile, as no later step does


@dataclass(slots=True)
class Worker:
    """What is known of a process. Times: CLOCK_MONOTONIC. ``since``: when it was first seen in this
    round; ``sampled``: how it was, and when."""

    watched: Watched
    since: float
    steps: int = 0
    last_at: float = 0.0
    sampled: deque[tuple[float, Vitals]] = field(default_factory=deque)

    @property
    def made(self) -> int:
        """Steps in this round: one that waits for its world to be there hangs in no step."""
        return self.steps - self.watched.steps_before

    @property
    def subject(self) -> Subject:
        """Whom to look at."""
        return Subject(self.watched.slot, self.watched.rank, self.watched.pid, self.watched.page.path)

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


class Standstill:
    """``workers``: by slot, those of the round. ``aware_since``: what happened before was not watched,
    and counts for nothing. Times: CLOCK_MONOTONIC, in which workers tell their steps."""

    def __init__(self, aware_since: float) -> None:
        self.aware_since = aware_since
        self.workers: dict[int, Worker] = {}
        self._gaps: deque[float] = deque(maxlen=GAPS_KEPT)
        self._largest_s = 0.0

    def learn(self, watched: Iterable[Watched], alive: Set[int], at: float) -> None:
        """Which steps they have made by now."""
        for one in watched:
            if one.slot not in alive:
                continue
            worker = self.workers.get(one.slot)
            if worker is None or worker.watched.pid != one.pid:
                worker = self.workers[one.slot] = Worker(one, at, one.steps_before)
            steps, times = one.page.step_times(worker.steps)
            if not times:
                continue
            whole = worker.last_at > 0 and worker.steps == steps - len(times)
            known = (worker.last_at, *times) if whole else times
            gaps = [b - a for a, b in itertools.pairwise(known) if b >= a]
            self._gaps.extend(gaps)
            worker.steps = steps
            if worker.made - len(gaps) >= FIRST_STEPS:
                self._largest_s = max([self._largest_s, *gaps])
            worker.last_at = times[-1]
            worker.sampled.clear()
        for slot in set(self.workers) - alive:
            del self.workers[slot]

    def sample(self, at: float) -> None:
        """Note how each is."""
        for worker in self.workers.values():
            worker.sampled.append((at, vitals(worker.watched.pid)))
            while len(worker.sampled) > 1 and worker.sampled[1][0] <= at - WINDOW_S:
                worker.sampled.popleft()

    def calm(self) -> None:
        """Forget how they were: they make steps."""
        for worker in self.workers.values():
            worker.sampled.clear()

    def forget(self) -> None:
        """All but how long steps take: that is the job's, whoever makes them."""
        self.workers.clear()

    # ------------------------------------------------------------ what is known

    @property
    def gaps(self) -> list[float]:
        """Seconds between steps, of late, and the longest ever; empty where none is known."""
        return [*self._gaps, self._largest_s] if self._gaps else []

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

    def look(self, node: str, seen: Scene, allowed: Allowance, at: float) -> Look:
        """At one of them, as its scene shows it."""
        of, where = seen.subject, seen.where
        worker = self.workers[of.slot]
        still_s = self.still_s(worker, at)
        kind = doing(seen.vitals.state, worker.pulse(at, seen.vitals), where)
        if kind is Doing.STOPPED:
            still_s = min(still_s, self.stopped_s(worker, at))
        elif still_s < allowed.stopped_s:
            kind = Doing.MOVING
        place, what = (where.place, where.doing) if where else ("", "")
        return Look(node, of.slot, of.rank, worker.steps, still_s, kind, place, what)

    def as_it_was(self, look: Look) -> bool:
        """Whether the worker has made no step since."""
        worker = self.workers.get(look.slot)
        return worker is not None and worker.steps == look.step
