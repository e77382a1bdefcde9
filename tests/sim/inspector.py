"""Looks at simulated workers, as ``core.ports.Inspector`` demands. Lists what may be wrong with a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from elasticd.core.hang.hang_messages import EvidenceKept, Looked
from elasticd.core.hang.judging import ProcessState, Verdict
from elasticd.core.hang.standstill import Beat, Inspected, Vitals
from elasticd.core.thread_activity import ActivityKind, ThreadActivity

if TYPE_CHECKING:
    from tests.sim.procs import SimProcs, SimWorker


class Illness(StrEnum):
    STOPPED = "stopped"  # SIGSTOP
    ASLEEP = "asleep"  # in the script's own code
    BUSY = "busy"  # in the script's own code, and it computes
    APART = "apart"  # in another collective than the other workers
    POLLING = "polling"  # in another collective, and alternates between two lines

    @property
    def waits(self) -> bool:
        """Whether the worker is in a collective."""
        return self in (Illness.APART, Illness.POLLING)


@dataclass(frozen=True, slots=True)
class Ill:
    """What keeps a worker from its next step. ``line``: the line of the script where the worker is."""

    illness: Illness
    line: int
    since: float


class SimInspector:
    """Inspects the workers of one node. ``blind``: the probability that a look or a piece of evidence takes
    long or never arrives."""

    def __init__(self, procs: SimProcs) -> None:
        self.blind = 0.0
        self.condemned: list[Callable[[SimWorker, Verdict], None]] = []
        self._procs = procs
        self._host = procs.host
        self._random = procs.host.clock.random(f"inspector {procs.host.name}")
        self._news: Callable[[Looked | EvidenceKept], None] = lambda news: None

    # ---- the port

    def now(self) -> float:
        return self._host.now()

    def listen(self, news: Callable[[Looked | EvidenceKept], None]) -> None:
        self._news = news

    def steps(self, known: Mapping[int, int]) -> tuple[Beat, ...]:
        return tuple(
            Beat(
                worker.slot,
                worker.rank,
                worker.pid,
                worker.steps_before,
                worker.steps,
                tuple(at + self._host.skew_s for at in worker.times(known.get(worker.pid, 0))),
            )
            for _, worker in sorted(self._procs.workers.items())
            if worker.alive and worker.acts
        )

    def sample(self, pids: Mapping[int, int]) -> Mapping[int, Vitals]:
        workers = self._procs.workers
        return {
            slot: self._vitals(workers[slot])
            if slot in workers and workers[slot].pid == pid
            else Vitals(ProcessState.GONE, 0.0)
            for slot, pid in pids.items()
        }

    def look(self, number: int, slots: tuple[int, ...]) -> None:
        def seen() -> None:
            workers = [w for slot, w in sorted(self._procs.workers.items()) if slot in slots and w.acts]
            sights = (Inspected(w.slot, w.rank, self._vitals(w), where(w)) for w in workers)
            self._news(Looked(number, tuple(sights)))

        self._answer(seen)

    def keep(self, number: int, round: int, verdict: Verdict, look: int) -> None:
        self._answer(lambda: self._news(EvidenceKept(number, f"hang-of-round-{round}")))

    def condemn(self, slot: int, pid: int, verdict: Verdict, evidence: str) -> None:
        worker = self._procs.workers.get(slot)
        if worker is not None and worker.alive and worker.pid == pid:
            for told in self.condemned:
                told(worker, verdict)
            self._procs.condemn(worker, f"hung: {verdict.why}")

    # ---- inside

    def _answer(self, call: Callable[[], None]) -> None:
        random, delay_s = self._random, self._random.uniform(0.01, 0.3)
        if self.blind and random.random() < self.blind:
            if random.random() < 0.5:
                return
            delay_s = random.uniform(0.3, 40.0)
        self._host.after(delay_s, call)

    def _vitals(self, worker: SimWorker) -> Vitals:
        at = where(worker)
        if worker.ill is not None and worker.ill.illness is Illness.STOPPED:
            return Vitals(ProcessState.STOPPED, 0.0)
        if at is not None and (at.kind is ActivityKind.OWN and worker.computes):
            return Vitals(ProcessState.RUNNING, self._host.clock.now())
        return Vitals(ProcessState.SLEEPING, 0.0)


def where(worker: SimWorker) -> ThreadActivity | None:
    ill, world = worker.ill, worker.world
    if ill is not None and ill.illness is Illness.STOPPED:
        return None  # a stopped worker answers no signal
    if ill is not None and ill.illness.waits:
        now = worker.procs.host.clock.now()
        line = ill.line if ill.illness is Illness.APART else f"{ill.line}.{int(1000 * now) % 2}"
        return ThreadActivity(ActivityKind.COLLECTIVE, f"job.py:{line}", "all_gather")
    if ill is not None:
        return ThreadActivity(ActivityKind.OWN, f"job.py:{ill.line}")
    if world is not None and world.held and worker.rank == 0:
        return ThreadActivity(ActivityKind.PROGRAM, "job.py:3", "waiting for a program")
    if worker.awaits_news and not (worker.computes or worker.stuck):
        return ThreadActivity(ActivityKind.PROGRAM, "job.py:4", "waiting for its agent")
    if worker.computes or worker.stuck or world is None:
        return ThreadActivity(ActivityKind.OWN, "job.py:1")
    return ThreadActivity(ActivityKind.COLLECTIVE, "job.py:2", "all_reduce")
