"""Ties the pure agent and leader to a store and to processes. The simulator uses the same code.

``handle`` is called with one event at a time, on one thread. Edges may call back on any thread: a callback
only calls ``post``. The daemon's ``post`` is an inbox, the simulator's a scheduled call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import assert_never

from elasticd.core import agent, leader
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
    RoundWritten,
    StartStandbys,
    StartWorkers,
    StopWorkers,
    Transact,
    WorkerExited,
)
from elasticd.core.facts import Exit, Member, Node, Round
from elasticd.core.hang.hang_messages import EvidenceKept, HangChanged, Looked, StallWithdrawn
from elasticd.core.ports import (
    Assignment,
    Listing,
    Procs,
    Refused,
    RoundStores,
    Seen,
    Store,
)
from elasticd.core.reasons import Reason
from elasticd.core.round_parts import PART_SIZES, PartSizes
from elasticd.daemon.gathering import Gathering, LedgerFound, PacesTold, Told
from elasticd.daemon.hangs import Hangs
from elasticd.daemon.leading import BothAnswered, LeaderAnswered, LeaderNews, LeaderSaw, Leading
from elasticd.daemon.observer import Observer
from elasticd.daemon.round_watch import RoundWatch
from elasticd.daemon.store_news import news_of, read_once
from elasticd.daemon.timekeeper import Timekeeper

JUDGE_S = 0.1  # all nodes report a standstill at about the same time, and are judged together

Happening = Event | LeaderNews | Looked | EvidenceKept | HangChanged | StallWithdrawn | Told


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
        self._leading = Leading(store, post, say, part_sizes)
        procs.listen(self._post)

    # ------------------------------------------------------------ the leader's view

    @property
    def view(self) -> leader.View | None:
        """The leader's view; None unless this agent leads."""
        return self._leading.view

    @property
    def waiting(self) -> tuple[Reason, ...]:
        """Why the job waits; empty unless this agent leads."""
        return self._leading.waiting

    @property
    def has_half_a_decision(self) -> bool:
        """Whether the next event should be a Tick, or news of the lease: the leader of a large job decides in
        two halves, and other news might undo the first."""
        return self._leading.has_half_a_decision

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
            case KeySeen(entry) if self.state.knows(entry):  # such as what this node wrote itself
                if not self._leading.follow(entry, now):
                    return
            case LeaderSaw(scope=scope):
                if not self._leading.saw(event, now):
                    return
                if scope == "stalls/":
                    self._wake_by(now + JUDGE_S)
                    return
            case PacesTold(paces):
                if not self._leading.hear_paces(paces):
                    return
            case LedgerFound(kept):
                self._tell(asks=False)
                if self._timekeeper is not None:
                    self._timekeeper.find(kept)
            case LeaderAnswered():
                self._take_round(self._leading.answered(event, now), now)
            case BothAnswered(action=action, answer=answer):
                round = self._leading.both_answered(event, now)
                if isinstance(answer, Refused):  # perhaps by a guard of the leader
                    self._perform(action)
                else:
                    self._step(Answered(action.tag, answer), now)
                    self._take_round(round, now)
            case Looked() | EvidenceKept() | HangChanged() | StallWithdrawn():
                if self._hangs is not None:
                    self._hangs.handle(event, self.state, now, self._say)
            case _:
                self._step(event, now)
        if self.left is None:
            self._write_what_waited(now)
            self._wake_by(self._leading.lead(self.state, now))
            self._write_what_waited(now)  # if this agent leads no longer
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
        for entry in news_of(key, seen):
            self._post(KeySeen(entry))

    def _take_round(self, round: RoundWritten | None, now: float) -> None:
        if round is not None:
            self._step(round, now)

    def _step(self, event: Event, now: float) -> None:
        result = agent.step(self.state, event, now)
        self.state = result.state
        if isinstance(event, KeySeen):
            self._leading.follow(event.entry, now)
        self.wake_at = result.wake_at
        reasons = [*result.reasons]
        for action in result.actions:
            if not isinstance(action, Transact):
                self._perform(action)
            elif not self._leading.hold(action):
                reasons += self._write(action, now)
        for reason in reasons:  # last, since a line of the log takes half a millisecond
            self._say(reason)

    def _write(self, action: Transact, now: float) -> tuple[Reason, ...]:
        """Make the agent's writes, with those of the leader that follow from them. Return the reasons for
        these."""
        led = self._leading.write_both(action, self.state, now)
        if led is None:
            self._perform(action)
        return led or ()

    def _write_what_waited(self, now: float) -> None:
        for action in self._leading.let_go():
            for reason in self._write(action, now):
                self._say(reason)

    # ------------------------------------------------------------ actions

    def _perform(self, action: Action) -> None:
        match action:
            case Transact(tag, guards, writes):
                self._store.transact(guards, writes, lambda answer: self._post(Answered(tag, answer)))
            case StartWorkers(round, member, waiting):
                if member.hosts_store:
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
                self._leading.stop()
                for waited in self._leading.let_go():
                    self._perform(waited)
                self.left = action
            case _:
                assert_never(action)

    def _exited(self, round_number: int, exit: Exit) -> None:
        steps = max(self._procs.steps().values(), default=0)
        self._post(WorkerExited(round_number, exit, steps))

    def _look_around(self) -> None:
        """Count the other nodes, and read the spec afterwards: the other nodes may have replaced the spec."""

        def found(there: Listing) -> None:
            mine = self.state.me.key
            others = [e for e in there.entries if isinstance(e.fact, Node) and e.key != mine]

            def read(spec: Listing) -> None:
                self._watched("spec", spec)
                self._post(OtherNodesCounted(len(others)))

            read_once(self._store, "spec", read)

        read_once(self._store, "nodes/", found, prefix=True)

    def _wake_by(self, at: float | None) -> None:
        if at is not None:
            self.wake_at = at if self.wake_at is None else min(self.wake_at, at)
