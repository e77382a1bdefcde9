"""Sees that a worker hangs, finds out which and where, keeps the evidence, and has it replaced.

Between the steps there is nothing to do but to wait until the next one is overdue. Only then are the
workers looked at: each as the kernel sees it, which costs nothing; and once it has stood still for
longer than one that sleeps may, its stacks, which it is asked for by a signal.

For that it takes all ranks: each agent writes what its workers do to etcd, while they stand still, and
the leader says who hangs. Only of a stopped worker its own agent is certain: it tells at once, has the
leader ask the others what theirs do, and waits no longer than a moment for what they answer. And where
workers are to leave a broken world, one that sleeps on is not waited for as long as it was in that world,
once others here have all it has in memory, and want to go on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from elasticd.core.agent.state import Crew
from elasticd.core.facts import Hang, Stall
from elasticd.core.hang import (
    REPEAT_S,
    Allowance,
    Doing,
    Look,
    Patience,
    Verdict,
    Why,
    allowance,
    judge,
    judge_first,
    judge_leaving,
)
from elasticd.core.ports import Store
from elasticd.core.reasons import Reason, WorkersHung
from elasticd.daemon.driver import Driver
from elasticd.daemon.stalls import Stalls
from elasticd.daemon.standstill import Standstill
from elasticd.procs import scene
from elasticd.procs.scene import Scene
from elasticd.procs.workers import LocalProcs
from elasticd.telemetry import words

T = TypeVar("T")

IDLE_S = 1.0  # between looks at pages where nothing is overdue; a page keeps the times of 250 steps
STALLED_S = 0.5
ERRAND_S = 0.03  # while something is under way whose end nobody tells
ANSWER_S = 0.1  # while others are asked, or ask
ANSWERS_S = 3.0  # a stopped worker is not kept for longer than that for what the others tell
LATE_S = 2.0  # called later than that, the agent itself had been stopped, and knows nothing
AGAIN = 1.3  # the next look comes when they stand still for so many times as long
WRITE_PATIENCE_S = 3.0  # the log folder may be what hangs


class _Errand(Generic[T]):
    """Something that may take long, in a thread that nobody waits for."""

    def __init__(self, call: Callable[[], T], until: float) -> None:
        self.result: T | None = None
        self.until = until
        self._call = call
        self._thread = threading.Thread(target=self._run, name="elasticd-hang", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            self.result = self._call()

    def over(self, now: float) -> bool:
        return not self._thread.is_alive() or now >= self.until


class Hangs:
    """``routine(now)`` does what is due and returns when the next is; see ``Inbox.serve``.

    ``folder``: where evidence of this run is kept. ``monotonic``: CLOCK_MONOTONIC, in which workers
    tell their steps.
    """

    def __init__(
        self,
        patience: Patience,
        driver: Driver,
        store: Store,
        procs: LocalProcs,
        folder: Callable[[], Path | None],
        say: Callable[[Reason], None],
        monotonic: Callable[[], float],
    ) -> None:
        self._patience = patience
        self._driver = driver
        self._procs = procs
        self._folder = folder
        self._say = say
        self._monotonic = monotonic
        self._still = Standstill(monotonic())
        self._stalls = Stalls(driver, store)
        self._due = monotonic()
        self._look_at_s: float | None = None  # stacks are asked for when they stand still so long
        self._looking: _Errand[tuple[Scene, ...]] | None = None
        self._scenes: tuple[Scene, ...] = ()
        self._judged: tuple[Verdict, int, _Errand[str]] | None = None
        self._judged_at = -REPEAT_S
        self._round = 0
        self._leaving_since: float | None = None  # when the first left a broken round with the state
        self._killed: dict[tuple[Why, str], float] = {}  # how long it had stood still, by place
        self._certain: tuple[Verdict, float] | None = None  # and until when the others are waited for
        self._answered: Hang | None = None

    def routine(self, now: float) -> float:
        at = self._monotonic()
        if at > self._due + LATE_S:
            self._still.aware_since = at
        delay_s = max(ERRAND_S, self._attend(at))
        self._due = at + delay_s
        return now + delay_s

    def _attend(self, at: float) -> float:
        if self._judged is not None:
            return self._carry_out(at)
        crew = self._driver.state.crew
        if crew is None or crew.round.number != self._round or not _at_work(crew):
            verdict = self._stalls.verdict_for(self._round)
            due = self._scenes and at >= self._judged_at + REPEAT_S
            if verdict is not None and due and not (self._mine(verdict) and self._too_soon(verdict, at)):
                return self._keep(self._round, verdict, at)  # another node was faster to act on it
            self._forget()
            self._round = crew.round.number if crew is not None else 0
        if crew is None or not _at_work(crew):
            return IDLE_S
        self._still.learn(self._procs.watched(), crew.alive, at)
        allowed = self._allowed()
        still_s = self._still.longest_s(at)
        if allowed is None or at < self._judged_at + REPEAT_S:
            return IDLE_S
        if still_s < allowed.stopped_s / 2:
            self._calm()
            return min(IDLE_S, allowed.stopped_s / 2 - still_s)
        self._still.sample(at)
        stopped = self._still.longest_stopped_s(at) >= allowed.stopped_s
        if self._leaving_since is None and crew.parting and self._are_awaited(crew):
            self._leaving_since = at
        if still_s < allowed.stopped_s and self._looking is None:
            return min(STALLED_S, allowed.stopped_s - still_s)
        return self._investigate(crew, allowed, still_s, stopped, at)

    def _in_step(self) -> bool:
        """Whether all of them make steps, so that standing still says something. Else they may be on
        their way to the first, and only who is stopped surely never gets there."""
        return self._still.least_made > 0

    def leaving_s(self) -> float:
        """How long leaving a round may take at least, as the job's steps have taught so far."""
        allowed = self._allowed() if self._driver.state.crew is not None else None
        return allowed.leaving_s if allowed is not None else 0.0

    def _allowed(self) -> Allowance | None:
        # Else only who is stopped is judged: by earlier rounds' steps, or as after a first one.
        steps = self._still.least_made if self._in_step() else 1
        return allowance(self._still.gaps, steps, self._patience)

    def _are_awaited(self, crew: Crew) -> bool:
        """Whether others have left the round with all there is, and want to go on. Where all leave in good
        order, that is for the leader to say, after a while."""
        state = self._driver.state
        round = state.round
        told = round is not None and round.number == crew.round.number and round.outlived
        return told or (state.outlived and not crew.planned)

    def _is_late(self, allowed: Allowance, at: float) -> bool:
        """Whether leaving takes too long for those here who have left the round, with what is in memory."""
        if self._leaving_since is None:
            return False
        return at >= max(self._leaving_since, self._still.aware_since) + allowed.leaving_s

    # ------------------------------------------------------------ looking

    def _investigate(self, crew: Crew, allowed: Allowance, still_s: float, stopped: bool, at: float) -> float:
        if self._looking is not None:
            if not self._looking.over(at):
                return ERRAND_S
            self._scenes, self._looking = self._looking.result or (), None
            return self._conclude(crew, allowed, at)
        late = self._is_late(allowed, at)
        late_to_begin = len(crew.round.members) == 1 and still_s >= allowed.first_s
        if not self._in_step() and not (stopped or late or late_to_begin):
            return STALLED_S
        verdict = self._stalls.verdict_for(self._round)
        if verdict is not None and self._is_as_it_was(verdict) and not self._too_soon(verdict, at):
            return self._keep(self._round, verdict, at)
        if self._certain is not None:
            verdict, until = self._certain
            if at >= until:
                return self._decide(self._round, verdict, at)
            if self._is_as_it_was(verdict):
                return ANSWER_S
            self._certain = None  # it goes on
        if self._look_at_s is None:
            self._look_at_s = allowed.asleep_s
        question = self._stalls.question(self._round)
        asked = question is not None and question is not self._answered
        if stopped or late or still_s >= self._look_at_s or asked:
            self._answered = question
            self._look_at_s = max(self._look_at_s, still_s * AGAIN)
            subjects = [worker.subject for worker in self._still.workers.values()]
            self._looking = _Errand(lambda: scene.look(subjects), at + 20.0)
            return ERRAND_S
        return min(STALLED_S, max(self._look_at_s - still_s, 0.0))

    def _conclude(self, crew: Crew, allowed: Allowance, at: float) -> float:
        """From what was seen here, and where that does not suffice, from what all have seen."""
        me, workers = self._driver.state.me, self._still.workers
        scenes = [seen for seen in self._scenes if seen.subject.slot in workers]
        looks = tuple(self._still.look(me.node, seen, allowed, at) for seen in scenes)
        alone, in_step = len(crew.round.members) == 1, self._in_step()
        all_told = alone and in_step
        verdict = judge(looks if all_told else [k for k in looks if k.doing is Doing.STOPPED], allowed)
        if verdict is None and self._is_late(allowed, at):
            verdict = judge_leaving(looks)
        if verdict is None and alone and not in_step:
            experienced = {w.watched.rank for w in workers.values() if w.watched.steps_before}
            verdict = judge_first(looks, experienced, allowed)
        certain = alone or not in_step or crew.parting
        if verdict is not None and (certain or self._driver.state.silent):
            return self._decide(self._round, verdict, at)
        if alone or not in_step:
            return STALLED_S
        self._stalls.tell(Stall(me.node, me.incarnation, crew.round.number, looks, allowed))
        if verdict is None:
            return STALLED_S
        self._certain = (verdict, at + ANSWERS_S)
        return ANSWER_S

    # ------------------------------------------------------------ the verdict

    def _decide(self, round_number: int, verdict: Verdict, at: float) -> float:
        return STALLED_S if self._too_soon(verdict, at) else self._keep(round_number, verdict, at)

    def _keep(self, round_number: int, verdict: Verdict, at: float) -> float:
        """The evidence comes first: what is killed tells nothing."""
        scenes = self._scenes
        base = self._folder()
        folder = base / f"hang-of-round-{round_number}" if base is not None else None
        conclusion = words.hang(verdict)

        def write() -> str:
            if folder is None:
                return ""
            with contextlib.suppress(OSError):
                scene.write(folder, conclusion, scenes)
            return str(folder) if (folder / "conclusion.txt").stat().st_size else ""  # the disk may be full

        self._judged = (verdict, round_number, _Errand(write, at + WRITE_PATIENCE_S))
        return ERRAND_S

    def _carry_out(self, at: float) -> float:
        assert self._judged is not None
        verdict, round_number, writing = self._judged
        if not writing.over(at):
            return ERRAND_S
        self._judged = None
        still_s = self._still.longest_s(at)  # as long as those that are gone by now are not forgotten
        crew = self._driver.state.crew
        if crew is not None and crew.round.number == round_number:
            self._still.learn(self._procs.watched(), crew.alive, at)
        mine = self._mine(verdict)
        if any(look.slot in self._still.workers and not self._still.as_it_was(look) for look in mine):
            return IDLE_S  # it goes on, after all
        self._judged_at = at
        place = writing.result or ""  # where the evidence is, if it could be written in time
        self._say(WorkersHung(round_number, verdict, place))
        conclusion = words.hang(verdict)
        seen = f" (see {place})" if place else ""
        for look in verdict.guilty:
            self._killed[verdict.why, look.place] = still_s
        for look in mine:
            worker = self._still.workers.get(look.slot)
            if worker is not None:
                self._procs.condemn(look.slot, worker.watched.pid, f"hung: {conclusion}{seen}")
        return IDLE_S

    def _mine(self, verdict: Verdict) -> list[Look]:
        return [look for look in verdict.guilty if look.node == self._driver.state.me.node]

    def _is_as_it_was(self, verdict: Verdict) -> bool:
        """Whether those of this node have made no step since."""
        return all(self._still.as_it_was(look) for look in self._mine(verdict))

    def _too_soon(self, verdict: Verdict, at: float) -> bool:
        """Whether one was killed here before, after less than half the time. What stands still at the same
        place again and again may be healthy, and only slow: it would never get beyond it. By how long this
        node's workers have stood still, as all nodes come to the same then."""
        if verdict.why is Why.STOPPED or self._patience.fixed_s is not None:
            return False
        still_s = self._still.longest_s(at)
        return any(still_s < 2 * self._killed.get((verdict.why, look.place), 0.0) for look in verdict.guilty)

    def _forget(self) -> None:
        """All but how long steps take: that is the job's, whoever makes them."""
        self._still.forget()
        self._leaving_since = None
        self._calm()
        self._judged_at = -REPEAT_S

    def _calm(self) -> None:
        """They make steps, or there is nobody to make any."""
        self._look_at_s = self._looking = self._judged = self._certain = None
        self._scenes = ()
        self._still.calm()
        self._stalls.untell()


def _at_work(crew: Crew) -> bool:
    """Whether its workers are expected to get on: in the round, or out of it, to keep their process. Those of
    one that is broken only wait to be told so."""
    held_up = crew.killed or crew.fenced if crew.parting else crew.stopping or crew.broken or crew.fenced
    return bool(crew.alive) and not held_up
