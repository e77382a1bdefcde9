"""Ties the pure agent and leader to a store and to processes. The simulator uses the same code.

``handle`` is called with one event at a time, on one thread. Edges may call back on any thread: a callback
only calls ``post``. The daemon's ``post`` is an inbox, the simulator's a scheduled call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import assert_never

from elasticd.core import agent, leader, round_parts
from elasticd.core.agent_messages import (
    Action,
    Answered,
    CheckProcess,
    ContinueWorkers,
    CountOtherNodes,
    Event,
    Fence,
    KeySeen,
    LeaseChanged,
    LeaveJob,
    LeaveRound,
    OtherNodesCounted,
    PortReserved,
    ProcessGone,
    RenewStore,
    StartStandbys,
    StartWorkers,
    StopWorkers,
    Transact,
    WorkerExited,
)
from elasticd.core.facts import Exit, Member, Node, Round
from elasticd.core.hang.hang_messages import EvidenceKept, HangChanged, Looked, StallWithdrawn
from elasticd.core.ports import (
    Answer,
    Applied,
    Assignment,
    Changes,
    Entry,
    Guard,
    Listing,
    Procs,
    Put,
    RoundStores,
    Seen,
    StillThere,
    Store,
    Write,
)
from elasticd.core.reasons import Reason
from elasticd.core.round_parts import PART_SIZES, PartSizes
from elasticd.daemon.gathering import Gathering, LedgerFound, PacesTold, Told
from elasticd.daemon.hangs import Hangs
from elasticd.daemon.observer import Observer
from elasticd.daemon.round_watch import RoundWatch
from elasticd.daemon.timekeeper import Timekeeper

LEADER_SCOPES = ("nodes/", "reports/", "budget", "stalls/", "hang", "stragglers")
LEADER_RETRY_S = 0.2
JUDGE_S = 0.1  # all nodes report a standstill at about the same time, and are judged together


@dataclass(frozen=True, slots=True)
class LeaderSaw:
    """News of keys that only the leader watches. ``term``: the leadership that watches the keys."""

    term: int
    scope: str
    seen: Seen


@dataclass(frozen=True, slots=True)
class LeaderAnswered:
    """The answer to a transaction of the leader. ``guards``, ``rest``: the transactions that follow it."""

    term: int
    answer: Answer
    guards: tuple[Guard, ...] = ()
    rest: tuple[tuple[Write, ...], ...] = ()


Happening = Event | LeaderSaw | LeaderAnswered | Looked | EvidenceKept | HangChanged | StallWithdrawn | Told


@dataclass(slots=True)
class _Term:
    """One leadership.

    ``asked``: the writes under way. ``shown_from``: the revision of the leader's own last write of the round;
    the view must reach this revision before the next decision. ``retry_at``: the earliest time of the next
    decision. ``waiting``: why the job waits. ``tried``: the reasons of a write that is not done yet; a retry
    does not log them again. ``reads_parts``: the members of a round in parts are being followed.
    """

    number: int
    created: int
    view: leader.View
    ends: list[Callable[[], None]]
    asked: tuple[Write, ...] = ()
    shown_from: int = 0
    retry_at: float = 0.0
    waiting: tuple[Reason, ...] = ()
    tried: tuple[Reason, ...] = ()
    reads_parts: bool = False


def _is_old(seen: Seen, view: leader.View) -> bool:
    """Whether the news of the round is older than the round that the agent has seen."""
    known = view.revisions.get("round", 0)
    return all(entry.revision < known for entry in seen.entries)


class Driver:
    """The driver of one agent. Call ``begin``, then ``handle`` with each posted event, and with
    ``agent_messages.Tick()`` at ``wake_at``. ``left`` is set once the agent has left the job."""

    def __init__(
        self,
        state: agent.AgentState,
        *,
        store: Store,
        procs: Procs,
        stores: RoundStores,
        assign: Callable[[Round, Member], tuple[Assignment, ...]],
        assign_standbys: Callable[[tuple[int, ...], float], tuple[Assignment, ...]],
        process_alive: Callable[[int], bool],
        post: Callable[[Happening], None],
        say: Callable[[Reason], None],
        hangs: Hangs | None = None,
        observer: Observer | None = None,
        timekeeper: Timekeeper | None = None,
        gathering: Gathering | None = None,
        part_sizes: PartSizes = PART_SIZES,
    ) -> None:
        self.state = state
        self.left: LeaveJob | None = None
        self.wake_at: float | None = None
        self._store = store
        self._procs = procs
        self._stores = stores
        self._assign = assign
        self._assign_standbys = assign_standbys
        self._process_alive = process_alive
        self._post = post
        self._say = say
        self._hangs = hangs
        self._observer = observer
        self._timekeeper = timekeeper
        self._gathering = gathering
        self._part_sizes = part_sizes
        self._term: _Term | None = None
        self._terms = 0
        procs.listen(self._post)

    # ------------------------------------------------------------ the leader's view

    @property
    def view(self) -> leader.View | None:
        """The leader's view; None unless this agent leads."""
        return self._term.view if self._term else None

    @property
    def waiting(self) -> tuple[Reason, ...]:
        """Why the job waits; empty unless this agent leads."""
        return self._term.waiting if self._term else ()

    @property
    def hung_round(self) -> int:
        """The last round that was found to hang; 0 if none was."""
        return self._hangs.hung[0] if self._hangs is not None else 0

    # ------------------------------------------------------------ events

    def begin(self) -> None:
        """Take a lease and watch the keys that every agent follows."""
        self._store.hold_lease(lambda news: self._post(LeaseChanged(news)))
        if self._hangs is not None:
            self._hangs.begin(self._post)
        if self._observer is not None:
            self._observer.begin(self._store)
        if self._gathering is not None:
            self._gathering.begin(self._post)
        for key in agent.watched(self.state.me):
            if key == "round":
                RoundWatch(self._store, partial(self._watched, key), self.state.me.node)
            else:
                self._store.watch(key, partial(self._watched, key))

    def handle(self, event: Happening, now: float) -> None:
        if self.left is not None:
            return
        match event:
            case LeaderSaw(term, scope, seen):
                if not self._term or self._term.number != term:
                    return
                if scope == "round" and _is_old(seen, self._term.view):
                    return
                self._term.view = leader.see(self._term.view, seen, scope, now)
                if scope == "stalls/":
                    self._wake_by(now + JUDGE_S)
                    return
            case PacesTold(paces):
                if not self._term:
                    return
                before, self._term.view = self._term.view, leader.hear_paces(self._term.view, paces)
                if self._term.view.comparison.found is before.comparison.found:
                    return  # the new paces change no finding
            case LedgerFound(kept):
                self._tell(asks=False)
                if self._timekeeper is not None:
                    self._timekeeper.find(kept)
            case LeaderAnswered(term, answer, guards, rest):
                if self._term and self._term.number == term:
                    if rest and isinstance(answer, Applied):
                        self._write(self._term, guards, rest)
                    else:
                        self._leader_answered(self._term, answer, now)
            case Looked() | EvidenceKept() | HangChanged() | StallWithdrawn():
                if self._hangs is not None:
                    self._hangs.handle(event, self.state, now, self._say)
            case _:
                self._step(event, now)
        self._lead(now)
        if self._hangs is not None and self.left is None:
            self._hangs.attend(self.state, now, self._say)
            self._wake_by(self._hangs.wake_at)
        if self._observer is not None and self.left is None:
            if (own := self._observer.attend(self.state, now, self._say)) is not None:
                self._tell(paces=own)
            self._wake_by(self._observer.wake_at)
        if self._timekeeper is not None:
            hung = self._hangs.hung if self._hangs is not None else (0, 0.0)
            if (ledger := self._timekeeper.attend(self.state, hung, now)) is not None:
                self._tell(ledger=ledger)
            self._wake_by(self._timekeeper.wake_at)
        if self._gathering is not None and self.left is None:
            self._gathering.attend(self.state, self.view, now)
            self._wake_by(self._gathering.wake_at)

    def _tell(self, **changes: object) -> None:
        if self._gathering is not None:
            self._gathering.tell(**changes)

    def _watched(self, key: str, seen: Seen) -> None:
        if isinstance(seen, Listing) and not any(e.key == key for e in seen.entries):
            self._post(KeySeen(Entry(key, None, seen.revision, 0)))
        for entry in seen.entries:
            if entry.key == key:
                self._post(KeySeen(entry))

    def _step(self, event: Event, now: float) -> None:
        result = agent.step(self.state, event, now)
        self.state = result.state
        if isinstance(event, KeySeen) and self._term:
            self._lead_from(self._term, event.entry, now)
        self.wake_at = result.wake_at
        for action in result.actions:
            self._perform(action)
        for reason in result.reasons:  # last, since a line of the log takes half a millisecond
            self._say(reason)

    # ------------------------------------------------------------ actions

    def _perform(self, action: Action) -> None:
        match action:
            case Transact(tag, guards, writes):
                self._store.transact(guards, writes, lambda answer: self._post(Answered(tag, answer)))
            case StartWorkers(round, member, hosts_store, waiting):
                if hosts_store:
                    self._stores.open()
                self._procs.start(round.number, self._assign(round, member), self._exited, waiting)
            case LeaveRound(planned, signal, grace_s, leave_s, going):
                if leave_s is not None and self._hangs is not None:
                    leave_s = max(leave_s, self._hangs.leaving_s(self.state))
                self._procs.leave(planned, signal, grace_s, leave_s, going)
            case StopWorkers(signal, grace_s, slots):
                self._procs.stop(signal, grace_s, slots)
            case ContinueWorkers(slots):
                self._procs.go_on(slots)
            case StartStandbys(slots):
                began = self.state.round.began if self.state.round is not None else 0.0
                self._procs.standby(self._assign_standbys(slots, began), self._exited)
            case RenewStore():
                self._post(PortReserved(self._stores.renew()))
            case Fence(until):
                self._procs.fence(until)
            case CountOtherNodes():
                self._look_around()
            case CheckProcess(pid, incarnation):
                if not self._process_alive(pid):
                    self._post(ProcessGone(incarnation))
            case LeaveJob():
                self._stop_leading()
                self.left = action
            case _:
                assert_never(action)

    def _exited(self, round_number: int, exit: Exit) -> None:
        steps = max(self._procs.steps().values(), default=0)
        self._post(WorkerExited(round_number, exit, steps))

    def _look_around(self) -> None:
        cancels: list[Callable[[], None]] = []

        def seen(news: Seen) -> None:
            if isinstance(news, Listing):
                mine = self.state.me.key
                others = [e for e in news.entries if isinstance(e.fact, Node) and e.key != mine]
                self._post(OtherNodesCounted(len(others)))
                for cancel in cancels:
                    cancel()

        cancels.append(self._store.watch("nodes/", seen, prefix=True))

    # ------------------------------------------------------------ leading

    def _lead(self, now: float) -> None:
        entry = self.state.leads
        if self._term and (entry is None or entry.created != self._term.created):
            self._stop_leading()
        if self.left is not None or entry is None:
            return
        if self._term is None:
            self._term = self._start_leading(entry, now)
        term = self._term
        if term.asked or self.state.etcd.silent is not None:
            return
        if term.view.revisions.get("round", 0) < term.shown_from:
            return
        if now < term.retry_at:
            self._wake_by(term.retry_at)
            return
        counts_from = self.state.etcd.absence_counts_from
        if term.view.absence_counts_from != counts_from:
            term.view = replace(term.view, absence_counts_from=counts_from)
        plan = leader.decide(term.view, now)
        if plan.judged is not term.view.judged:
            term.view = replace(term.view, judged=plan.judged)
        said = (*term.waiting, *term.tried)
        term.waiting = plan.waiting if plan.writes else plan.reasons
        self._wake_by(plan.wake_at)
        if plan.writes:
            term.asked, term.tried = plan.writes, plan.reasons
            guards = (StillThere("leader", term.created), *plan.guards)
            self._write(term, guards, (*plan.ahead, plan.writes))
        for reason in (*plan.waiting, *plan.reasons):
            if reason not in said:
                self._say(reason)

    def _write(self, term: _Term, guards: tuple[Guard, ...], batches: tuple[tuple[Write, ...], ...]) -> None:
        """Apply the first batch. Its answer leads to the rest."""
        number, rest = term.number, batches[1:]
        self._store.transact(
            guards, batches[0], lambda answer: self._post(LeaderAnswered(number, answer, guards, rest))
        )

    def _wake_by(self, at: float | None) -> None:
        if at is not None:
            self.wake_at = at if self.wake_at is None else min(self.wake_at, at)

    def _start_leading(self, entry: Entry, now: float) -> _Term:
        self._terms += 1
        number = self._terms
        view = leader.View(part_sizes=self._part_sizes)
        ends = [
            self._store.watch(scope, partial(self._leader_saw, number, scope), prefix=scope.endswith("/"))
            for scope in LEADER_SCOPES
        ]
        term = _Term(number, entry.created, view, ends)
        for key in ("spec", "round"):
            if key in self.state.seen:
                self._lead_from(term, self.state.seen[key], now)
        return term

    def _lead_from(self, term: _Term, entry: Entry, now: float) -> None:
        """Take a key that every agent watches into the leader's view. Of a round in parts the agent reads one
        part only. So the leader then watches the round itself, with all parts: the agent may hear of a round
        later than the leader does."""
        apart = isinstance(entry.fact, Round) and round_parts.has_parts(entry.fact)
        if entry.key != "round" or not (apart or term.reads_parts):
            term.view = leader.see(term.view, Changes((entry,)), entry.key, now)
        elif not term.reads_parts:
            term.reads_parts = True
            term.ends.append(RoundWatch(self._store, partial(self._leader_saw, term.number, "round")).end)

    def _leader_saw(self, term: int, scope: str, seen: Seen) -> None:
        self._post(LeaderSaw(term, scope, seen))

    def _stop_leading(self) -> None:
        if self._term:
            for end in self._term.ends:
                end()
            self._term = None

    def _leader_answered(self, term: _Term, answer: Answer, now: float) -> None:
        writes, term.asked = term.asked, ()
        if not isinstance(answer, Applied):
            term.retry_at = now + LEADER_RETRY_S
            return
        term.tried = ()
        if any(write.key == "round" for write in writes):
            term.shown_from = answer.revision
        for write in writes:
            if isinstance(write, Put) and write.key in leader.FINDINGS:
                entry = Entry(write.key, write.fact, answer.revision, answer.revision)
                term.view = leader.see(term.view, Changes((entry,)), write.key, now)
