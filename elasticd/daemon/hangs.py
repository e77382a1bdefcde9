"""Ties ``core.hang`` to the inspector and the store. The simulator uses the same code."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from elasticd.core.agent.agent_state import AgentState
from elasticd.core.facts import Hang
from elasticd.core.hang import watching
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
from elasticd.core.hang.judging import Allowance, Patience
from elasticd.core.ports import Answer, Applied, Delete, Inspector, Put, Seen, Store, Write
from elasticd.core.reasons import Reason, WorkersHung
from elasticd.daemon.store_news import news_of

News = Looked | EvidenceKept | HangChanged | StallWithdrawn


class Hangs:
    """Call ``begin``, then ``handle`` with each posted event, and ``attend`` at ``wake_at``. ``look_s``: the
    least time between two looks."""

    def __init__(self, patience: Patience, inspector: Inspector, store: Store, look_s: float = 0.0) -> None:
        self.wake_at: float | None = None
        self._look_s = look_s
        self.hung = (0, 0.0)  # the last round that was found to hang, and the time of the verdict
        self._inspector = inspector
        self._store = store
        self._watching = watching.start(patience, inspector.now())
        self._post: Callable[[News], None] = lambda news: None

    def begin(self, post: Callable[[News], None]) -> None:
        def seen(news: Seen) -> None:
            for entry in news_of("hang", news):
                post(HangChanged(entry.fact if isinstance(entry.fact, Hang) else None))

        self._post = post
        self._inspector.listen(post)
        self._store.watch("hang", seen)

    @property
    def allowed(self) -> Allowance | None:
        """How long workers may make no step, learned from the job's steps."""
        return self._watching.allowed

    def leaving_s(self, state: AgentState) -> float:
        """Return the least time, in seconds, that workers get to leave a round."""
        return watching.leaving_s(self._watching) if state.crew is not None else 0.0

    def attend(self, state: AgentState, now: float, say: Callable[[Reason], None]) -> None:
        if self.wake_at is None or now >= self.wake_at:
            self.handle(Woke(), state, now, say)

    def handle(self, event: Event, state: AgentState, now: float, say: Callable[[Reason], None]) -> None:
        if isinstance(event, HangChanged) and event.hang is not None and not event.hang.asks:
            self.hung = event.hang.round, now
        todo: list[Event] = [event]
        while todo:
            at = self._inspector.now()
            result = watching.step(self._watching, todo.pop(), state, at)
            self._watching = result.watching
            if result.wake_at is not None:
                self.wake_at = now + result.wake_at - at
                if self._look_s:
                    self.wake_at = max(self.wake_at, now + self._look_s)
            for reason in result.reasons:
                if isinstance(reason, WorkersHung):
                    self.hung = reason.round, now
                say(reason)
            for action in result.actions:
                todo += self._perform(action, state)

    def _perform(self, action: Action, state: AgentState) -> tuple[Event, ...]:
        """Perform the action and return the events that follow at once."""
        match action:
            case ReadSteps(known):
                return (StepsRead(self._inspector.steps(known)),)
            case Sample(pids):
                return (VitalsSampled(self._inspector.sample(pids)),)
            case LookAt(number, slots):
                self._inspector.look(number, slots)
            case KeepEvidence(number, round, verdict, look):
                self._inspector.keep(number, round, verdict, look)
            case Condemn(slot, pid, verdict, evidence):
                self._inspector.condemn(slot, pid, verdict, evidence)
            case ReportStall(stall):
                self._write(Put(f"stalls/{stall.node}", stall, leased=True), state)
            case WithdrawStall(number):
                self._write(Delete(f"stalls/{state.me.node}"), state, StallWithdrawn(number))
            case _:
                assert_never(action)
        return ()

    def _write(self, write: Write, state: AgentState, done: News | None = None) -> None:
        """Write a key, and post ``done`` once the write is applied. The next look replaces a lost write."""

        def answered(answer: Answer) -> None:
            if done is not None and isinstance(answer, Applied):
                self._post(done)

        if state.guard is not None:
            self._store.transact((state.guard,), (write,), answered)
