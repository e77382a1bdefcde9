"""The actions of a node's agent when workers stand still.

``step(watching, event, state, at)`` takes an event and returns the actions: read the workers' steps, look at
workers, report to the leader, kill a worker.

During training there is nothing to do until the next step is overdue. Then the agent reads the kernel's
figures of the workers. Once a worker has stood still for longer than a sleeping worker may, the agent asks
the worker for its stacks by a signal.

A verdict usually takes the looks of all ranks: each agent reports what its workers do while they stand still,
and the leader judges (``core.leader.hanging``). An agent alone can be certain of a stopped worker only. It
reports the worker at once, the leader asks the other agents, and the agent waits a few seconds for their
answers.

A worker may go on while others judge. So two looks at each worker are needed to see that all wait for each
other. Before an agent kills a worker that the leader condemned, it looks at the worker once more, unless the
worker is stopped. Only this agent can void the verdict, so the other agents log the hang once the round ends.

A sleeping worker gets less time while workers are to leave a broken world. The shorter limit holds once other
workers have left with the whole state and wait for the next world.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elasticd.core.agent.agent_state import AgentState, Crew, Leaving
from elasticd.core.facts import Hang, Stall
from elasticd.core.hang.hang_messages import (
    Action,
    Condemn,
    Event,
    EvidenceKept,
    HangChanged,
    KeepEvidence,
    LookAt,
    Looked,
    ReadSteps,
    ReportStall,
    Sample,
    StallWithdrawn,
    StepsRead,
    VitalsSampled,
    WithdrawStall,
    Woke,
)
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
    in_groups,
    judge,
    judge_leaving,
    judge_round,
)
from elasticd.core.hang.standstill import Inspected, Standstill
from elasticd.core.reasons import Reason, VerdictDropped, WorkersHung

IDLE_S = (
    1.0  # the time between two reads of the pages while no step is overdue; a page has the times of 250 steps
)
STALLED_S = 0.5  # the time between two reads while a step is overdue
BRIEF_S = 0.03  # the shortest time between two steps of this module
ANSWER_S = 0.1  # the time between two reads while the other agents are asked
ANSWERS_S = 3.0  # how long the agent waits for the other agents before it kills a stopped worker
LATE_S = 2.0  # an agent that wakes up this late was stopped itself, and saw nothing meanwhile
AGAIN = 1.3  # the next look comes when the standstill has grown by this factor
LOOK_PATIENCE_S = 20.0  # how long to wait for the result of a look
WRITE_PATIENCE_S = 3.0  # how long to wait for the evidence to be written: the log folder's disk may hang


@dataclass(frozen=True, slots=True)
class PendingLook:
    """A look whose result is awaited; ``over`` once the result has come."""

    number: int
    asked_at: float
    over: bool = False

    @property
    def until(self) -> float:
        return self.asked_at + LOOK_PATIENCE_S


@dataclass(frozen=True, slots=True)
class PendingEvidence:
    """Evidence that is being written. The verdict is carried out afterwards, even if the writing fails."""

    number: int
    round: int
    verdict: Verdict
    until: float
    over: bool = False
    place: str = ""


@dataclass(frozen=True, slots=True)
class Watching:
    """All that the agent knows about its workers' standstill.

    ``due``: the time of the next wake-up. ``number``: the number of the last look or evidence.
    ``look_at_s``: the standstill after which the agent asks for stacks. ``again_at``: when to look once more,
    to see whether workers still wait at the same place. ``sights``: the result of the look ``seen``.
    ``leaving_since``: when the first worker left a broken round with the state. ``killed``: the standstills
    of killed workers, by place. ``certain``: a verdict that this agent can give alone, and until when it
    waits for the other agents. ``hang``: the leader's last record; ``hang_after_look``: the last look that
    began before this record came. ``reported_look``: the look that was reported to the leader, until its
    withdrawal is written; 0 for none.
    """

    patience: Patience
    still: Standstill
    due: float
    round: int = 0
    number: int = 0
    look_at_s: float | None = None
    again_at: float | None = None
    looking: PendingLook | None = None
    sights: tuple[Inspected, ...] = ()
    seen: int = 0
    keeping: PendingEvidence | None = None
    judged_at: float = float("-inf")
    leaving_since: float | None = None
    killed: Mapping[tuple[Why, str], float] = field(default_factory=dict)
    certain: tuple[Verdict, float] | None = None
    hang: Hang | None = None
    hang_after_look: int = 0
    reported_look: int = 0

    @property
    def in_step(self) -> bool:
        """Whether all workers have made a step in this round. Before that, only a stopped worker is sure to
        hang."""
        return self.still.least_made > 0

    @property
    def allowed(self) -> Allowance | None:
        # Before the first step only stopped workers are judged. Their limit follows from the steps of earlier
        # rounds, or is that after one step.
        steps = self.still.least_made if self.in_step else 1
        return allowance(self.still.gaps, steps, self.patience)


@dataclass(frozen=True, slots=True)
class HangStep:
    """The result of one step. ``wake_at`` is None only where an event follows at once."""

    watching: Watching
    actions: tuple[Action, ...] = ()
    reasons: tuple[Reason, ...] = ()
    wake_at: float | None = None


def start(patience: Patience, at: float) -> Watching:
    return Watching(patience, Standstill(at), at)


def leaving_s(watching: Watching) -> float:
    """Return the time that leaving a round may take, learned from the job's steps."""
    allowed = watching.allowed
    return allowed.leaving_s if allowed is not None else 0.0


def step(watching: Watching, event: Event, state: AgentState, at: float) -> HangStep:
    """Process one event. ``at``: by the clock that workers' steps use."""
    do = _Decisions(watching, state, at)
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
                return HangStep(watching, wake_at=watching.due)  # the answer is to an old look
            do.set(looking=replace(looking, over=True), sights=sights, seen=number)
            delay_s = do.attend()
        case EvidenceKept(number, place):
            keeping = watching.keeping
            if keeping is None or keeping.number != number:
                return HangStep(watching, wake_at=watching.due)
            do.set(keeping=replace(keeping, over=True, place=place))
            delay_s = do.attend()
        case StallWithdrawn(number):
            if watching.reported_look == number:
                do.set(reported_look=0)
            return HangStep(do.w, wake_at=watching.due)
        case HangChanged(hang):
            do.set(hang=hang, hang_after_look=watching.number)
            delay_s = do.attend()
    if delay_s is None:
        return HangStep(do.w, tuple(do.actions), tuple(do.reasons))
    do.set(due=at + max(BRIEF_S, delay_s))
    return HangStep(do.w, tuple(do.actions), tuple(do.reasons), do.w.due)


class _Decisions:
    """The decisions of one step so far. Most methods return how long to wait, or None where an action brings
    the next event at once."""

    def __init__(self, watching: Watching, state: AgentState, at: float) -> None:
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
                return self.keep(verdict)  # another node has acted on the verdict
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
        """Sample the workers if a step is overdue."""
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
        if self.w.leaving_since is None and isinstance(crew.order, Leaving) and self.are_awaited(crew):
            self.set(leaving_since=at)
        looking = self.w.looking
        if looking is not None:
            if not looking.over and at < looking.until:
                return min(STALLED_S, looking.until - at)
            self.set(looking=None)
            if looking.over:
                self.set(still=self.w.still.see(self.w.sights, looking.asked_at, at))
            else:  # only stopped workers are known, so do not report the old looks as complete
                self.set(sights=self.stopped(), seen=0)
            verdict = self.verdict_to_keep()
            if verdict is not None:
                return self.keep(verdict)
            return self.conclude(crew, allowed) if self.w.sights else STALLED_S
        soonest_s = min(allowed.stopped_s, allowed.first_look_s)
        if still_s < soonest_s:
            return min(STALLED_S, soonest_s - still_s)
        late = self.is_late(allowed)
        if not self.w.in_step and not (stopped or late or self.is_late_to_begin(allowed)):
            return STALLED_S
        verdict = self.verdict_to_keep()
        if verdict is not None:
            return self.keep(verdict)
        if self.w.certain is not None:
            verdict, until = self.w.certain
            if at >= until:
                return self.decide(verdict)
            if self.is_as_it_was(verdict):
                return min(ANSWER_S, until - at)
            self.set(certain=None)  # the worker goes on
        if self.w.look_at_s is None:
            self.set(look_at_s=allowed.first_look_s)
        look_at_s = self.w.look_at_s
        assert look_at_s is not None
        again = self.w.again_at is not None and at >= self.w.again_at
        if stopped or late or still_s >= look_at_s or again or self.is_asked():
            number = self.w.number + 1
            next_s = max(look_at_s, min(still_s * AGAIN, allowed.next_s(still_s)))
            self.set(look_at_s=next_s, number=number, looking=PendingLook(number, at))
            self.actions.append(LookAt(number, tuple(sorted(self.w.still.workers))))
            return STALLED_S
        return min(STALLED_S, look_at_s - still_s)

    def stopped(self) -> tuple[Inspected, ...]:
        """Return the stopped workers, which the kernel's figures show without a look."""
        return tuple(
            Inspected(worker.slot, worker.rank, worker.sampled[-1][1], None)
            for _, worker in sorted(self.w.still.workers.items())
            if worker.sampled and worker.sampled[-1][1].state is ProcessState.STOPPED
        )

    def conclude(self, crew: Crew, allowed: Allowance) -> float | None:
        """Judge from this node's looks. If they are not enough for a verdict, report them to the leader."""
        me, workers, at = self.state.me, self.w.still.workers, self.at
        looks = tuple(
            self.w.still.look(me.node, seen, allowed, at) for seen in self.w.sights if seen.slot in workers
        )
        alone, in_step = crew.round.nodes == 1, self.w.in_step
        came = any(k.still_s >= allowed.waiting_s and k.there_s < allowed.settled_s for k in looks)
        due = self.w.again_at is not None and at < self.w.again_at  # this look came before again_at
        if not due:
            self.set(again_at=at + allowed.settled_s if came and self.w.again_at is None else None)
        groups = in_groups(looks)
        stopped = [group for group in groups if group.doing is Doing.STOPPED]
        verdict = judge_round(groups, allowed) if alone else judge(stopped, allowed)
        if verdict is None and self.is_late(allowed):
            verdict = judge_leaving(groups)
        certain = alone or not in_step or isinstance(crew.order, Leaving)
        if verdict is not None and (certain or self.state.etcd.silent):
            return self.decide(verdict)
        if alone or not (in_step or self.is_late_to_begin(allowed)):
            return STALLED_S
        self.actions.append(ReportStall(Stall(me.node, me.incarnation, crew.round.number, looks, allowed)))
        self.set(reported_look=self.w.number)
        if verdict is None:
            return STALLED_S
        self.set(certain=(verdict, at + ANSWERS_S))
        return ANSWER_S

    # ------------------------------------------------------------ the verdict

    def decide(self, verdict: Verdict) -> float:
        return STALLED_S if self.too_soon(verdict) else self.keep(verdict)

    def keep(self, verdict: Verdict) -> float:
        """Write the evidence first: a killed process shows nothing."""
        number, look = self.w.number + 1, self.w.seen if self.w.sights else 0
        until = self.at + WRITE_PATIENCE_S
        self.set(number=number, keeping=PendingEvidence(number, self.w.round, verdict, until))
        self.actions.append(KeepEvidence(number, self.w.round, verdict, look))
        return WRITE_PATIENCE_S

    def carry_out(self) -> float:
        keeping = self.w.keeping
        assert keeping is not None
        self.set(keeping=None)
        verdict, workers = keeping.verdict, self.w.still.workers
        mine, late_s = self.mine(verdict), self.at - keeping.until
        if mine and late_s > LATE_S:  # this agent was stopped itself: the worker may have gone on meanwhile
            self.reasons.append(VerdictDropped(keeping.round, verdict, late_s))
            return IDLE_S
        still_s = self.w.still.longest_s(self.at)
        if any(look.slot in workers and not self.is_as(look) for look in mine):
            return IDLE_S  # the worker goes on after all
        self.reasons.append(WorkersHung(keeping.round, verdict, keeping.place))
        killed = {(verdict.why, look.place): still_s for look in verdict.guilty}
        self.set(judged_at=self.at, killed={**self.w.killed, **killed})
        crew = self.state.crew
        here = crew.alive if crew is not None and crew.round.number == keeping.round else frozenset()
        for look in mine:
            worker = workers.get(look.slot)
            if worker is not None and look.slot in here:  # otherwise the worker has left the round
                self.actions.append(Condemn(look.slot, worker.pid, verdict, keeping.place))
        return IDLE_S

    # ------------------------------------------------------------ small questions

    def verdict(self) -> Verdict | None:
        """Return the leader's verdict on this round."""
        found = self.w.hang
        known = found is not None and found.round == self.w.round and not found.asks
        return found.verdict if found is not None and known else None

    def verdict_to_keep(self) -> Verdict | None:
        """Return the leader's verdict on workers of this node, once the agent has looked at them again; None
        before. The verdict is void if a worker has moved since it was judged."""
        verdict = self.verdict()
        if verdict is None or not self.mine(verdict) or self.too_soon(verdict):
            return None
        if not self.is_as_it_was(verdict):
            self.set(hang=None)
            return None
        return None if self.is_asked() else verdict

    def is_asked(self) -> bool:
        """Whether the leader's last record needs a look that this agent has not taken yet. Either the leader
        asks all nodes of the round, or it condemns workers of this node whose hang the kernel's figures do
        not show."""
        found = self.w.hang
        if found is None or found.round != self.w.round or self.w.seen > self.w.hang_after_look:
            return False
        return found.asks or (found.verdict.why is not Why.STOPPED and bool(self.mine(found.verdict)))

    def mine(self, verdict: Verdict) -> list[Look]:
        return [look for look in verdict.guilty if look.node == self.state.me.node]

    def is_as_it_was(self, verdict: Verdict) -> bool:
        """Whether this node's workers in the verdict are still in the state that was judged."""
        return all(self.is_as(look) for look in self.mine(verdict))

    def is_as(self, look: Look) -> bool:
        return self.w.still.as_it_was(look, self.w.allowed)

    def are_awaited(self, crew: Crew) -> bool:
        """Whether other workers have left the round with the whole state, and wait for the next. If workers
        leave as planned, only the leader can know (``Round.outlived``)."""
        round = self.state.round_of_crew
        told = round is not None and round.outlived
        planned = isinstance(crew.order, Leaving) and crew.order.planned
        return told or (self.state.outlived and not planned)

    def is_late(self, allowed: Allowance) -> bool:
        """Whether workers here take too long to leave, while others have left with the state."""
        since = self.w.leaving_since
        return since is not None and self.at >= max(since, self.w.still.aware_since) + allowed.leaving_s

    def is_late_to_begin(self, allowed: Allowance) -> bool:
        """Whether a worker here takes too long to the first step of the round."""
        return not self.w.in_step and self.w.still.longest_s(self.at) >= allowed.first_s

    def too_soon(self, verdict: Verdict) -> bool:
        """Whether a worker was killed at the same place before, after more than half of this standstill.

        A worker that stands still at the same place again and again may be slow but healthy. It gets twice as
        much time in each round, or else it would never get further. The longest standstill on this node is
        compared, so that all nodes decide in the same way.
        """
        if verdict.why is Why.STOPPED or self.w.patience.fixed_s is not None:
            return False
        still_s = self.w.still.longest_s(self.at)
        return any(still_s < 2 * self.w.killed.get((verdict.why, look.place), 0.0) for look in verdict.guilty)

    def forget(self) -> None:
        """Forget everything except the times of steps, which are the same for all workers of the job."""
        self.set(still=self.w.still.forget(), leaving_since=None, judged_at=float("-inf"))
        self.calm()

    def calm(self) -> None:
        """Forget the looks and the leader's verdict, because the workers make steps, or no worker is left."""
        hang = self.w.hang if self.w.hang is not None and self.w.hang.asks else None
        still = self.w.still.calm()
        self.set(look_at_s=None, again_at=None, looking=None, certain=None)
        self.set(sights=(), seen=0, still=still, hang=hang)
        if self.w.reported_look:  # ask again until the withdrawal is written, or the leader uses the report
            self.actions.append(WithdrawStall(self.w.reported_look))


def _at_work(crew: Crew) -> bool:
    """Whether the crew's workers are expected to make progress: in the round, or in leaving it with their
    process. Workers of a broken round only wait to be told to leave."""
    expected = isinstance(crew.order, Leaving) or (crew.order is None and not crew.report.broken)
    return bool(crew.alive) and not crew.fenced and expected
