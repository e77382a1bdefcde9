"""Sees that a worker hangs, finds out which and where, keeps the evidence, and has it replaced.

Between the steps there is nothing to do but to wait until the next one is overdue. Only then are the
workers looked at: each as the kernel sees it, which costs nothing; and once it has stood still for
longer than one that sleeps may, its stacks, which it is asked for by a signal.

For that it takes all ranks: each agent writes what its workers do to etcd, while they stand still, and
the leader says who hangs. Only of a stopped worker its own agent is certain: it tells at once, has the
leader ask the others what theirs do, and waits no longer than a moment for what they answer.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from elasticd.core.agent.state import Crew
from elasticd.core.facts import Hang, Phase, Stall
from elasticd.core.hang import (
    Allowance,
    Doing,
    Look,
    Patience,
    ProcessState,
    Pulse,
    Verdict,
    Why,
    allowance,
    doing,
    judge,
)
from elasticd.core.ports import Delete, Entry, Listing, Put, Seen, StillThere, Store, Write
from elasticd.core.reasons import Reason, WorkersHung
from elasticd.daemon.driver import Driver
from elasticd.procs import scene
from elasticd.procs.scene import Scene, Subject
from elasticd.procs.vitals import Vitals, vitals
from elasticd.procs.workers import LocalProcs, Watched
from elasticd.telemetry import words

T = TypeVar("T")

IDLE_S = 1.0  # between looks at pages where nothing is overdue; a page keeps the times of 250 steps
STALLED_S = 0.5
ERRAND_S = 0.03  # while something is under way whose end nobody tells
ANSWER_S = 0.1  # while others are asked, or ask
ANSWERS_S = 3.0  # a stopped worker is not kept for longer than that for what the others tell
LATE_S = 2.0  # called later than that, the agent itself had been stopped, and knows nothing
AGAIN = 1.3  # the next look comes when they stand still for so many times as long
WINDOW_S = 10.0
WRITE_PATIENCE_S = 3.0  # the log folder may be what hangs
GAPS_KEPT = 256
FIRST_STEPS = 3  # of a process: they connect, allocate and compile, as no later step does
REPEAT_S = 30.0  # a verdict that changed nothing may be reached again


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


@dataclass(slots=True)
class _Worker:
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

    def pulse(self, now: float, seen: Vitals) -> Pulse:
        """How it has been of late."""
        at, before = self.sampled[0] if self.sampled else (now, seen)
        past_s = now - at
        if past_s < STALLED_S / 2:
            return Pulse(1.0)  # nothing is known: it may be busy
        return Pulse(
            (seen.cpu_s - before.cpu_s) / past_s,
            (seen.wakes - before.wakes) / past_s,
            (seen.all_wakes - before.all_wakes) / past_s,
        )


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
        self._store = store
        self._procs = procs
        self._folder = folder
        self._say = say
        self._monotonic = monotonic
        self._workers: dict[int, _Worker] = {}
        self._gaps: deque[float] = deque(maxlen=GAPS_KEPT)
        self._largest_s = 0.0
        self._due = monotonic()
        self._aware_since = monotonic()  # what happened before was not watched
        self._look_at_s: float | None = None  # stacks are asked for when they stand still so long
        self._looking: _Errand[tuple[Scene, ...]] | None = None
        self._scenes: tuple[Scene, ...] = ()
        self._judged: tuple[Verdict, int, _Errand[str]] | None = None
        self._judged_at = -REPEAT_S
        self._round = 0
        self._killed: dict[tuple[Why, str], float] = {}  # how long it had stood still, by place
        self._told = False
        self._certain: tuple[Verdict, float] | None = None  # and until when the others are waited for
        self._answered: Hang | None = None
        self._exchange = _Exchange(driver, store)

    def routine(self, now: float) -> float:
        at = self._monotonic()
        if at > self._due + LATE_S:
            self._aware_since = at
        delay_s = max(ERRAND_S, self._attend(at))
        if self._exchange.busy:
            delay_s = min(delay_s, ANSWER_S)
        self._due = at + delay_s
        return now + delay_s

    def _attend(self, at: float) -> float:
        self._exchange.lead(at)
        if self._judged is not None:
            return self._carry_out(at)
        crew = self._driver.state.crew
        same = crew is not None and crew.round.number == self._round
        if crew is None or not (same and _at_work(crew)):
            verdict = self._exchange.verdict_for(self._round)
            if verdict is not None and self._scenes and at >= self._judged_at + REPEAT_S:
                return self._decide(self._round, verdict, at)  # another node was faster to act on it
        if crew is None or not (same and (_at_work(crew) or _parts(crew))):
            self._forget()
            self._round = crew.round.number if crew is not None else 0
        if crew is None or not (_at_work(crew) or _parts(crew)):
            return IDLE_S
        self._learn(crew, at)
        allowed = self._allowed(crew)
        still_s = max((self._still_s(w, at) for w in self._workers.values()), default=0.0)
        if allowed is None or at < self._judged_at + REPEAT_S:
            return IDLE_S
        if still_s < allowed.stopped_s / 2:
            self._calm()
            return min(IDLE_S, allowed.stopped_s / 2 - still_s)
        self._sample(at)
        stopped = any(self._stopped_s(w, at) >= allowed.stopped_s for w in self._workers.values())
        if still_s < allowed.stopped_s and self._looking is None:
            return min(STALLED_S, allowed.stopped_s - still_s)
        return self._investigate(crew, allowed, still_s, stopped, at)

    def _in_step(self, crew: Crew) -> bool:
        """Whether all of them make steps, so that standing still says something. Else they may be on
        their way to the first or out of the round, and only who is stopped surely never gets there."""
        return _at_work(crew) and min((w.made for w in self._workers.values()), default=0) > 0

    def _allowed(self, crew: Crew) -> Allowance | None:
        known = self._known_gaps()
        if self._in_step(crew):
            steps = min(worker.made for worker in self._workers.values())
        else:
            steps = 1  # only who is stopped is judged: by earlier rounds' steps, or as after a first one
        return allowance(known, steps, self._patience)

    # ------------------------------------------------------------ what the job's steps are like

    def _learn(self, crew: Crew, at: float) -> None:
        for watched in self._procs.watched():
            if watched.slot not in crew.alive:
                continue
            worker = self._workers.get(watched.slot)
            if worker is None or worker.watched.pid != watched.pid:
                worker = self._workers[watched.slot] = _Worker(watched, at, watched.steps_before)
            steps, times = watched.page.step_times(worker.steps)
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
        for slot in set(self._workers) - crew.alive:
            del self._workers[slot]

    def _known_gaps(self) -> list[float]:
        return [*self._gaps, self._largest_s] if self._gaps else []

    def _still_s(self, worker: _Worker, at: float) -> float:
        return at - max(worker.last_at if worker.made else worker.since, self._aware_since)

    def _stopped_s(self, worker: _Worker, at: float) -> float:
        """How long it has been stopped: since it was last seen otherwise, or stands still."""
        still_s = self._still_s(worker, at)
        for seen_at, seen in reversed(worker.sampled):
            if seen.state is not ProcessState.STOPPED:
                return min(still_s, at - seen_at)
        return still_s if worker.sampled else 0.0

    # ------------------------------------------------------------ looking

    def _sample(self, at: float) -> None:
        """Note how each is."""
        for worker in self._workers.values():
            seen = vitals(worker.watched.pid)
            worker.sampled.append((at, seen))
            while len(worker.sampled) > 1 and worker.sampled[1][0] <= at - WINDOW_S:
                worker.sampled.popleft()

    def _investigate(self, crew: Crew, allowed: Allowance, still_s: float, stopped: bool, at: float) -> float:
        if self._looking is not None:
            if not self._looking.over(at):
                return ERRAND_S
            self._scenes, self._looking = self._looking.result or (), None
            return self._conclude(crew, allowed, at)
        if not self._in_step(crew) and not stopped:
            return STALLED_S
        verdict = self._exchange.verdict_for(self._round)
        if verdict is not None:
            mine = [g for g in verdict.guilty if g.node == self._driver.state.me.node]
            if all(self._as_it_was(look) for look in mine):
                return self._decide(self._round, verdict, at)
        if self._certain is not None:
            verdict, until = self._certain
            if at >= until:
                return self._decide(self._round, verdict, at)
            if all(self._as_it_was(look) for look in verdict.guilty):
                return ANSWER_S
            self._certain = None  # it goes on
        if self._look_at_s is None:
            self._look_at_s = allowed.asleep_s
        question = self._exchange.question(self._round)
        asked = question is not None and question is not self._answered
        if stopped or still_s >= self._look_at_s or asked:
            self._answered = question
            self._look_at_s = max(self._look_at_s, still_s * AGAIN)
            subjects = [
                Subject(w.watched.slot, w.watched.rank, w.watched.pid, w.watched.page.path)
                for w in self._workers.values()
            ]
            self._looking = _Errand(lambda: scene.look(subjects), at + 20.0)
            return ERRAND_S
        return min(STALLED_S, max(self._look_at_s - still_s, 0.0))

    def _conclude(self, crew: Crew, allowed: Allowance, at: float) -> float:
        """From what was seen here, and where that does not suffice, from what all have seen."""
        looks = tuple(self._look(s, allowed, at) for s in self._scenes if s.subject.slot in self._workers)
        alone, in_step = len(crew.round.members) == 1, self._in_step(crew)
        all_told = alone and in_step
        verdict = judge(looks if all_told else [k for k in looks if k.doing is Doing.STOPPED], allowed)
        if verdict is not None and (alone or not in_step or self._driver.state.silent):
            return self._decide(self._round, verdict, at)
        if alone or not in_step:
            return STALLED_S
        me = self._driver.state.me
        self._exchange.tell(Stall(me.node, me.incarnation, crew.round.number, looks, allowed))
        self._told = True
        if verdict is None:
            return STALLED_S
        self._certain = (verdict, at + ANSWERS_S)
        return ANSWER_S

    def _look(self, seen: Scene, allowed: Allowance, at: float) -> Look:
        of, where = seen.subject, seen.where
        worker = self._workers[of.slot]
        still_s = self._still_s(worker, at)
        kind = doing(seen.vitals.state, worker.pulse(at, seen.vitals), where)
        if kind is Doing.STOPPED:
            still_s = min(still_s, self._stopped_s(worker, at))
        elif still_s < allowed.stopped_s:
            kind = Doing.MOVING
        place, what = (where.place, where.doing) if where else ("", "")
        return Look(self._driver.state.me.node, of.slot, of.rank, worker.steps, still_s, kind, place, what)

    def _as_it_was(self, look: Look) -> bool:
        worker = self._workers.get(look.slot)
        return worker is not None and worker.steps == look.step

    # ------------------------------------------------------------ the verdict

    def _decide(self, round_number: int, verdict: Verdict, at: float) -> float:
        """The evidence comes first: what is killed tells nothing."""
        if self._too_soon(verdict, at):
            return STALLED_S
        scenes = self._scenes
        base = self._folder()
        folder = base / f"hang-of-round-{round_number}" if base is not None else None
        conclusion = words.hang(verdict)

        def write() -> str:
            if folder is None:
                return ""
            with contextlib.suppress(OSError):
                scene.write(folder, conclusion, scenes)
            return str(folder) if (folder / "conclusion.txt").exists() else ""

        self._judged = (verdict, round_number, _Errand(write, at + WRITE_PATIENCE_S))
        return ERRAND_S

    def _carry_out(self, at: float) -> float:
        assert self._judged is not None
        verdict, round_number, writing = self._judged
        if not writing.over(at):
            return ERRAND_S
        self._judged = None
        crew = self._driver.state.crew
        if crew is not None and crew.round.number == round_number:
            self._learn(crew, at)
        mine = [look for look in verdict.guilty if look.node == self._driver.state.me.node]
        if any(look.slot in self._workers and not self._as_it_was(look) for look in mine):
            return IDLE_S  # it goes on, after all
        self._judged_at = at
        place = writing.result or ""  # where the evidence is, if it could be written in time
        self._say(WorkersHung(round_number, verdict, place))
        conclusion = words.hang(verdict)
        seen = f" (see {place})" if place else ""
        for look in mine:
            worker = self._workers.get(look.slot)
            if worker is not None:
                self._killed[verdict.why, look.place] = self._still_s(worker, at)
                self._procs.condemn(look.slot, worker.watched.pid, f"hung: {conclusion}{seen}")
        return IDLE_S

    def _too_soon(self, verdict: Verdict, at: float) -> bool:
        """Whether this is where we killed before, after less than half the time. What stands still at
        the same place again and again may be healthy, and only slow: it would never get beyond it."""
        if verdict.why is Why.STOPPED or self._patience.fixed_s is not None:
            return False
        mine = [look for look in verdict.guilty if look.node == self._driver.state.me.node]
        return any(
            self._still_s(worker, at) < 2 * self._killed.get((verdict.why, look.place), 0.0)
            for look in mine
            if (worker := self._workers.get(look.slot)) is not None
        )

    def _forget(self) -> None:
        """All but how long steps take: that is the job's, whoever makes them."""
        self._workers.clear()
        self._calm()
        self._judged_at = -REPEAT_S

    def _calm(self) -> None:
        """They make steps, or there is nobody to make any."""
        self._look_at_s = self._looking = self._judged = self._certain = None
        self._scenes = ()
        for worker in self._workers.values():
            worker.sampled.clear()
        if self._told:
            self._exchange.untell()
            self._told = False


def _at_work(crew: Crew) -> bool:
    return bool(crew.alive) and not (crew.stopping or crew.fenced)


def _parts(crew: Crew) -> bool:
    """Whether workers are on their way out of the round, to keep their process."""
    return bool(crew.alive) and crew.parting and not (crew.killed or crew.fenced)


class _Exchange:
    """What agents tell each other of workers that stand still, through etcd."""

    def __init__(self, driver: Driver, store: Store) -> None:
        self._driver = driver
        self._store = store
        self._stalls: Mapping[str, tuple[Stall, float]] = {}
        self._news: deque[Seen] = deque()
        self._found: Hang | None = None
        self._following: tuple[int, Callable[[], None]] | None = None
        self._concluded = self._asked = (0, -REPEAT_S)  # of which round, and when
        store.watch("hang", self._hang_seen)

    # ------------------------------------------------------------ of this node

    def tell(self, stall: Stall) -> None:
        self._write(Put(f"stalls/{stall.node}", stall, leased=True))

    def untell(self) -> None:
        self._write(Delete(f"stalls/{self._driver.state.me.node}"))

    def _write(self, write: Write) -> None:
        """A lost one is made up for by the next look."""
        state = self._driver.state
        if state.own is not None and state.own.fact is not None and not state.silent:
            guard = StillThere(state.me.key, state.own.created)
            self._store.transact((guard,), (write,), lambda answer: None)

    @property
    def busy(self) -> bool:
        """Whether somebody tells of workers that stand still, and this agent is to conclude from it."""
        return bool(self._stalls or self._news)

    def verdict_for(self, round_number: int) -> Verdict | None:
        """The leader's, on this very round."""
        found = self._found
        known = found is not None and found.round == round_number and not found.asks
        return found.verdict if found is not None and known else None

    def question(self, round_number: int) -> Hang | None:
        """The leader's to all nodes of this round, what their workers do."""
        found = self._found
        return found if found is not None and found.round == round_number and found.asks else None

    def _hang_seen(self, seen: Seen) -> None:
        for entry in seen.entries:
            if entry.key == "hang":
                self._found = entry.fact if isinstance(entry.fact, Hang) else None

    # ------------------------------------------------------------ of all, for the leader

    def lead(self, at: float) -> None:
        """Conclude from all nodes' stalls, while this agent leads."""
        leads = self._driver.state.leads
        if self._following is not None and (leads is None or leads.created != self._following[0]):
            self._following[1]()
            self._following, self._stalls = None, {}
            self._news.clear()
        if leads is None:
            return
        if self._following is None:
            self._following = (leads.created, self._store.watch("stalls/", self._news.append, prefix=True))
        self._take_in(at)
        self._conclude(leads, at)

    def _take_in(self, at: float) -> None:
        while self._news:
            seen = self._news.popleft()
            known = {} if isinstance(seen, Listing) else dict(self._stalls)
            for entry in seen.entries:
                _keep(known, entry, at)
            self._stalls = known

    def _conclude(self, leads: Entry, at: float) -> None:
        view = self._driver.view
        round = self._driver.state.round
        if not self._stalls or view is None or round is None or round.phase is not Phase.LIVE:
            return
        if _lately(self._concluded, round.number, at):
            return
        finished = {
            name for name, r in (view.reports or {}).items() if r.round == round.number and r.finished
        }
        told: list[tuple[Stall, float]] = []
        silent = False
        for member in round.members:
            known = self._stalls.get(member.node)
            current = known is not None and known[0].round == round.number
            if known is not None and current and known[0].incarnation == member.incarnation:
                told.append(known)
            elif member.node not in finished:
                silent = True  # it makes steps, or has not said yet
        if not told:
            return
        looks = _all_looks(told, at)
        if silent:  # it is only asked where somebody hangs for certain
            looks = [look for look in looks if look.doing is Doing.STOPPED]
        verdict = judge(looks, _most_patient([stall.allowed for stall, _ in told]))
        if verdict is None or (silent and _lately(self._asked, round.number, at)):
            return
        if silent:
            self._asked = (round.number, at)
        else:
            self._concluded = (round.number, at)
        guard = StillThere("leader", leads.created)
        put = Put("hang", Hang(round.number, verdict, asks=silent), leased=True)
        self._store.transact((guard,), (put,), lambda answer: None)


def _lately(done: tuple[int, float], round_number: int, at: float) -> bool:
    """Whether it was done in this very round, and not long ago."""
    return done[0] == round_number and at < done[1] + REPEAT_S


def _keep(known: dict[str, tuple[Stall, float]], entry: Entry, at: float) -> None:
    name = entry.key.partition("/")[2]
    if isinstance(entry.fact, Stall):
        known[name] = (entry.fact, at)
    else:
        known.pop(name, None)


def _all_looks(told: Sequence[tuple[Stall, float]], at: float) -> list[Look]:
    """As old as they are by now."""
    return [
        replace(look, still_s=look.still_s + (at - since)) for stall, since in told for look in stall.looks
    ]


def _most_patient(allowances: Sequence[Allowance]) -> Allowance:
    return Allowance(
        stopped_s=max(a.stopped_s for a in allowances),
        asleep_s=max(a.asleep_s for a in allowances),
        waiting_s=max(a.waiting_s for a in allowances),
        busy_s=max(a.busy_s for a in allowances),
        unasked_s=max(a.unasked_s for a in allowances),
    )
