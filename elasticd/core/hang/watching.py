"""What the agent of one node does about its workers' standing still.

``step(watching, event, state, at)`` takes in what was seen, and returns what is to be done: read the workers'
steps, look at these, tell the leader, condemn that one.

Between the steps of training there is nothing to do but to wait until the next one is overdue. Only then are
the workers looked at: each as the kernel sees it, which costs nothing; and once it has stood still for longer
than one that sleeps may, its stacks, which it is asked for by a signal.

For that it takes all ranks: each agent tells what its workers do, while they stand still, and the leader says
who hangs (``core.leader.hanging``). Only of a stopped worker its own agent is certain: it tells at once, has
the leader ask the others what theirs do, and waits no longer than a moment for what they answer. And where
workers are to leave a broken world, one that sleeps on is not waited for as long as it was in that world,
once others here have all it has in memory, and want to go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elasticd.core.agent.state import Crew, State
from elasticd.core.facts import Hang, Stall
from elasticd.core.hang.judging import (
    REPEAT_S,
    Allowance,
    Doing,
    Look,
    Patience,
    ProcessState,
    Verdict,
    Why,
    allowance,
    judge,
    judge_first,
    judge_leaving,
)
from elasticd.core.hang.messages import (
    Action,
    Condemn,
    Event,
    EvidenceKept,
    HangSaid,
    KeepEvidence,
    LookAt,
    Looked,
    ReadSteps,
    Sample,
    StepsRead,
    Tell,
    Untell,
    VitalsSampled,
    Woke,
)
from elasticd.core.hang.standstill import Inspected, Standstill
from elasticd.core.reasons import Reason, WorkersHung

IDLE_S = 1.0  # between looks at pages where nothing is overdue; a page keeps the times of 250 steps
STALLED_S = 0.5
BRIEF_S = 0.03  # no wait is shorter
ANSWER_S = 0.1  # while others are asked, or ask
ANSWERS_S = 3.0  # a stopped worker is not kept for longer than that for what the others tell
LATE_S = 2.0  # called later than that, the agent itself had been stopped, and knows nothing
AGAIN = 1.3  # the next look comes when they stand still for so many times as long
LOOK_PATIENCE_S = 20.0
WRITE_PATIENCE_S = 3.0  # the log folder may be what hangs


@dataclass(frozen=True, slots=True)
class Looking:
    """A look under way; ``over`` once it has been answered."""

    number: int
    until: float
    over: bool = False


@dataclass(frozen=True, slots=True)
class Keeping:
    """Evidence being written of what is to be carried out then, however that ends."""

    number: int
    round: int
    verdict: Verdict
    until: float
    over: bool = False
    place: str = ""


@dataclass(frozen=True, slots=True)
class Watching:
    """All that is known. ``due``: when it was to be woken. ``number``: of the last look or piece of evidence
    asked for. ``look_at_s``: stacks are asked for when workers stand still so long. ``sights``: of the look
    of number ``seen``. ``leaving_since``: when the first left a broken round with the state. ``killed``: how
    long they had stood still, by place. ``certain``: a verdict that takes no others, and until when they are
    waited for. ``hang``: what the leader said last; ``answered``: its last question that was."""

    patience: Patience
    still: Standstill
    due: float
    round: int = 0
    number: int = 0
    look_at_s: float | None = None
    looking: Looking | None = None
    sights: tuple[Inspected, ...] = ()
    seen: int = 0
    keeping: Keeping | None = None
    judged_at: float = float("-inf")
    leaving_since: float | None = None
    killed: Mapping[tuple[Why, str], float] = field(default_factory=dict)
    certain: tuple[Verdict, float] | None = None
    hang: Hang | None = None
    answered: Hang | None = None
    told: bool = False

    @property
    def in_step(self) -> bool:
        """Whether all of them make steps, so that standing still says something. Else they may be on
        their way to the first, and only who is stopped surely never gets there."""
        return self.still.least_made > 0

    @property
    def allowed(self) -> Allowance | None:
        # Else only who is stopped is judged: by earlier rounds' steps, or as after a first one.
        steps = self.still.least_made if self.in_step else 1
        return allowance(self.still.gaps, steps, self.patience)


@dataclass(frozen=True, slots=True)
class Step:
    """``wake_at`` is None only where an event follows at once."""

    watching: Watching
    actions: tuple[Action, ...] = ()
    reasons: tuple[Reason, ...] = ()
    wake_at: float | None = None


def start(patience: Patience, at: float) -> Watching:
    return Watching(patience, Standstill(at), at)


def leaving_s(watching: Watching) -> float:
    """How long leaving a round may take at least, as the job's steps have taught so far."""
    allowed = watching.allowed
    return allowed.leaving_s if allowed is not None else 0.0


def step(watching: Watching, event: Event, state: State, at: float) -> Step:
    """One event. ``at``: by the clock in which workers tell their steps."""
    do = _Step(watching, state, at)
    if at > watching.due + LATE_S:
        do.set(still=replace(watching.still, aware_since=at))
    delay_s: float | None
    match event:
        case StepsRead(beats):
            if state.crew is not None:
                do.set(still=do.w.still.learn(beats, state.crew.alive, at))
            delay_s = do.carry_out() if do.w.keeping is not None else do.consider()
        case VitalsSampled(vitals):
            do.set(still=do.w.still.sample(vitals, at))
            delay_s = do.investigate()
        case Woke():
            delay_s = do.attend()
        case Looked(number, sights):
            looking = watching.looking
            if looking is None or looking.number != number:
                return Step(watching, wake_at=watching.due)  # of one that nobody waits for any more
            do.set(looking=replace(looking, over=True), sights=sights, seen=number)
            delay_s = do.attend()
        case EvidenceKept(number, place):
            keeping = watching.keeping
            if keeping is None or keeping.number != number:
                return Step(watching, wake_at=watching.due)
            do.set(keeping=replace(keeping, over=True, place=place))
            delay_s = do.attend()
        case HangSaid(hang):
            do.set(hang=hang)
            delay_s = do.attend()
    if delay_s is None:
        return Step(do.w, tuple(do.actions), tuple(do.reasons))
    do.set(due=at + max(BRIEF_S, delay_s))
    return Step(do.w, tuple(do.actions), tuple(do.reasons), do.w.due)


class _Step:
    """What one step has decided so far. Each of its questions returns how long to wait, or None where an
    action brings the next event at once."""

    def __init__(self, watching: Watching, state: State, at: float) -> None:
        self.w = watching
        self.state = state
        self.at = at
        self.actions: list[Action] = []
        self.reasons: list[Reason] = []

    def set(self, **changes: object) -> None:
        self.w = replace(self.w, **changes)  # type: ignore[arg-type]

    # ------------------------------------------------------------ is there anything to see?

    def attend(self) -> float | None:
        keeping, crew, at = self.w.keeping, self.state.crew, self.at
        if keeping is not None:
            if not keeping.over and at < keeping.until:
                return keeping.until - at
            if crew is None or crew.round.number != keeping.round:
                return self.carry_out()
            self.read_steps()
            return None
        if crew is None or crew.round.number != self.w.round or not _at_work(crew):
            verdict = self.verdict()
            due = self.w.sights and at >= self.w.judged_at + REPEAT_S
            if verdict is not None and due and not (self.mine(verdict) and self.too_soon(verdict)):
                return self.keep(verdict)  # another node was faster to act on it
            self.forget()
            self.set(round=crew.round.number if crew is not None else 0)
        if crew is None or not _at_work(crew):
            return IDLE_S
        self.read_steps()
        return None

    def read_steps(self) -> None:
        known = {worker.pid: worker.steps for worker in self.w.still.workers.values()}
        self.actions.append(ReadSteps(known))

    def consider(self) -> float | None:
        """Is a step overdue?"""
        allowed, at = self.w.allowed, self.at
        if allowed is None or at < self.w.judged_at + REPEAT_S:
            return IDLE_S
        still_s = self.w.still.longest_s(at)
        if still_s < allowed.stopped_s / 2:
            self.calm()
            return min(IDLE_S, allowed.stopped_s / 2 - still_s)
        self.actions.append(Sample({w.slot: w.pid for w in self.w.still.workers.values()}))
        return None

    # ------------------------------------------------------------ looking

    def investigate(self) -> float | None:
        crew, allowed, at = self.state.crew, self.w.allowed, self.at
        assert crew is not None
        assert allowed is not None
        still_s = self.w.still.longest_s(at)
        stopped = self.w.still.longest_stopped_s(at) >= allowed.stopped_s
        if self.w.leaving_since is None and crew.parting and self.are_awaited(crew):
            self.set(leaving_since=at)
        looking = self.w.looking
        if looking is not None:
            if not looking.over and at < looking.until:
                return min(STALLED_S, looking.until - at)
            self.set(looking=None)
            if not looking.over:  # of the others nothing is known, which is not to be told for all there is
                self.set(sights=self.stopped(), seen=0)
            return self.conclude(crew, allowed) if self.w.sights else STALLED_S
        if still_s < allowed.stopped_s:
            return min(STALLED_S, allowed.stopped_s - still_s)
        late = self.is_late(allowed)
        late_to_begin = len(crew.round.members) == 1 and still_s >= allowed.first_s
        if not self.w.in_step and not (stopped or late or late_to_begin):
            return STALLED_S
        verdict = self.verdict()
        if verdict is not None and self.is_as_it_was(verdict) and not self.too_soon(verdict):
            return self.keep(verdict)
        if self.w.certain is not None:
            verdict, until = self.w.certain
            if at >= until:
                return self.decide(verdict)
            if self.is_as_it_was(verdict):
                return min(ANSWER_S, until - at)
            self.set(certain=None)  # it goes on
        if self.w.look_at_s is None:
            self.set(look_at_s=allowed.asleep_s)
        look_at_s = self.w.look_at_s
        assert look_at_s is not None
        question = self.question()
        asked = question is not None and question is not self.w.answered
        if stopped or late or still_s >= look_at_s or asked:
            number = self.w.number + 1
            self.set(
                answered=question,
                look_at_s=max(look_at_s, still_s * AGAIN),
                number=number,
                looking=Looking(number, at + LOOK_PATIENCE_S),
            )
            self.actions.append(LookAt(number, tuple(sorted(self.w.still.workers))))
            return STALLED_S
        return min(STALLED_S, look_at_s - still_s)

    def stopped(self) -> tuple[Inspected, ...]:
        """Those of which the kernel alone says enough."""
        return tuple(
            Inspected(worker.slot, worker.rank, worker.sampled[-1][1], None)
            for _, worker in sorted(self.w.still.workers.items())
            if worker.sampled and worker.sampled[-1][1].state is ProcessState.STOPPED
        )

    def conclude(self, crew: Crew, allowed: Allowance) -> float | None:
        """From what was seen here, and where that does not suffice, from what all have seen."""
        me, workers, at = self.state.me, self.w.still.workers, self.at
        looks = tuple(
            self.w.still.look(me.node, seen, allowed, at) for seen in self.w.sights if seen.slot in workers
        )
        alone, in_step = len(crew.round.members) == 1, self.w.in_step
        verdict = judge(
            looks if alone and in_step else [k for k in looks if k.doing is Doing.STOPPED], allowed
        )
        if verdict is None and self.is_late(allowed):
            verdict = judge_leaving(looks)
        if verdict is None and alone and not in_step:
            experienced = {w.rank for w in workers.values() if w.steps_before}
            verdict = judge_first(looks, experienced, allowed)
        certain = alone or not in_step or crew.parting
        if verdict is not None and (certain or self.state.silent):
            return self.decide(verdict)
        if alone or not in_step:
            return STALLED_S
        self.actions.append(Tell(Stall(me.node, me.incarnation, crew.round.number, looks, allowed)))
        self.set(told=True)
        if verdict is None:
            return STALLED_S
        self.set(certain=(verdict, at + ANSWERS_S))
        return ANSWER_S

    # ------------------------------------------------------------ the verdict

    def decide(self, verdict: Verdict) -> float:
        return STALLED_S if self.too_soon(verdict) else self.keep(verdict)

    def keep(self, verdict: Verdict) -> float:
        """The evidence comes first: what is killed tells nothing."""
        number, look = self.w.number + 1, self.w.seen if self.w.sights else 0
        until = self.at + WRITE_PATIENCE_S
        self.set(number=number, keeping=Keeping(number, self.w.round, verdict, until))
        self.actions.append(KeepEvidence(number, self.w.round, verdict, look))
        return WRITE_PATIENCE_S

    def carry_out(self) -> float:
        keeping = self.w.keeping
        assert keeping is not None
        self.set(keeping=None)
        still_s = self.w.still.longest_s(self.at)
        verdict, workers = keeping.verdict, self.w.still.workers
        mine = self.mine(verdict)
        if any(look.slot in workers and not self.w.still.as_it_was(look) for look in mine):
            return IDLE_S  # it goes on, after all
        self.reasons.append(WorkersHung(keeping.round, verdict, keeping.place))
        killed = {(verdict.why, look.place): still_s for look in verdict.guilty}
        self.set(judged_at=self.at, killed={**self.w.killed, **killed})
        crew = self.state.crew
        here = crew.alive if crew is not None and crew.round.number == keeping.round else frozenset()
        for look in mine:
            worker = workers.get(look.slot)
            if worker is not None and look.slot in here:  # else it has left the round, and may be in another
                self.actions.append(Condemn(look.slot, worker.pid, verdict, keeping.place))
        return IDLE_S

    # ------------------------------------------------------------ small questions

    def verdict(self) -> Verdict | None:
        """The leader's, on this very round."""
        found = self.w.hang
        known = found is not None and found.round == self.w.round and not found.asks
        return found.verdict if found is not None and known else None

    def question(self) -> Hang | None:
        """The leader's to all nodes of this round, what their workers do."""
        found = self.w.hang
        return found if found is not None and found.round == self.w.round and found.asks else None

    def mine(self, verdict: Verdict) -> list[Look]:
        return [look for look in verdict.guilty if look.node == self.state.me.node]

    def is_as_it_was(self, verdict: Verdict) -> bool:
        """Whether those of this node have made no step since."""
        return all(self.w.still.as_it_was(look) for look in self.mine(verdict))

    def are_awaited(self, crew: Crew) -> bool:
        """Whether others have left the round with all there is, and want to go on. Where all leave in good
        order, that is for the leader to say, after a while."""
        round = self.state.round
        told = round is not None and round.number == crew.round.number and round.outlived
        return told or (self.state.outlived and not crew.planned)

    def is_late(self, allowed: Allowance) -> bool:
        """Whether leaving takes too long for those here who have left the round, with what is in memory."""
        since = self.w.leaving_since
        return since is not None and self.at >= max(since, self.w.still.aware_since) + allowed.leaving_s

    def too_soon(self, verdict: Verdict) -> bool:
        """Whether one was killed here before, after less than half the time. What stands still at the same
        place again and again may be healthy, and only slow: it would never get beyond it. By how long this
        node's workers have stood still, as all nodes come to the same then."""
        if verdict.why is Why.STOPPED or self.w.patience.fixed_s is not None:
            return False
        still_s = self.w.still.longest_s(self.at)
        return any(still_s < 2 * self.w.killed.get((verdict.why, look.place), 0.0) for look in verdict.guilty)

    def forget(self) -> None:
        """All but how long steps take: that is the job's, whoever makes them."""
        self.set(still=self.w.still.forget(), leaving_since=None)
        self.calm()
        self.set(judged_at=float("-inf"))

    def calm(self) -> None:
        """They make steps, or there is nobody to make any. What the leader concluded has passed, and says
        nothing of the next time."""
        hang = self.w.hang if self.w.hang is not None and self.w.hang.asks else None
        still = self.w.still.calm()
        self.set(look_at_s=None, looking=None, certain=None, sights=(), seen=0, still=still, hang=hang)
        if self.w.told:
            self.set(told=False)
            self.actions.append(Untell())


def _at_work(crew: Crew) -> bool:
    """Whether its workers are expected to get on: in the round, or out of it, to keep their process. Those of
    one that is broken only wait to be told so."""
    held_up = crew.killed or crew.fenced if crew.parting else crew.stopping or crew.broken or crew.fenced
    return bool(crew.alive) and not held_up
