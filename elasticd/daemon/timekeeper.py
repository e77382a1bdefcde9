"""Ties ``core.timekeeping`` to the workers' steps and the store. The simulator uses the same code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from elasticd.core import timekeeping
from elasticd.core.agent import AgentState
from elasticd.core.facts import NodeLedger, Phase, Round, SlotProgress
from elasticd.core.ledger import Ledger
from elasticd.core.ports import Listing, Put, Store
from elasticd.core.ports import Seen as News

LOOK_S = 0.5
FAREWELL_S = 2.0  # the longest wait for this node's last write, and for the other nodes' last writes


class Timekeeper:
    """Call ``begin``, then ``attend`` after each event and at ``wake_at``.

    ``progress`` returns the heartbeats of a round's workers. ``step_times`` returns the times of a slot's
    steps in the round after a given step, oldest first; some may be missing.
    """

    def __init__(
        self,
        state: AgentState,
        began_at: float,
        store: Store,
        progress: Callable[[int], Sequence[SlotProgress]],
        step_times: Callable[[int, int], tuple[float, ...]],
    ) -> None:
        self.wake_at = began_at
        self._key = f"ledger/{state.me.node}"
        self._store = store
        self._progress = progress
        self._step_times = step_times
        self._seen: tuple[object, ...] = ()
        # By slot: a round, and the time of the round's first step.
        self._first_at: dict[int, tuple[int, float]] = {}
        self._found: tuple[NodeLedger | None] | None = None  # the record in etcd, once it has been read
        self._known = timekeeping.start(state, began_at)

    @property
    def ledger(self) -> Ledger:
        return self._known.ledger

    def begin(self) -> None:
        self._store.watch(self._key, self._own_seen)

    def attend(self, state: AgentState, hung: tuple[int, float], now: float) -> Put | None:
        """Return the write of the record if it is due. ``hung``: see ``timekeeping.keep_time``.

        Reading all workers' pages costs milliseconds, so most events lead to no look.
        """
        seen = (timekeeping.concerned(state), hung, self._found is not None)
        if now < self.wake_at and seen == self._seen:
            return None
        self._seen, self.wake_at = seen, now + LOOK_S
        if self._found is not None:
            self._known = timekeeping.find(self._known, *self._found)
        number = state.crew.round.number if state.crew is not None else 0
        beats = self._progress(number) if number else ()
        first_at = {beat.slot: self._first_step_at(beat, number) for beat in beats if beat.step}
        self._known, record = timekeeping.keep_time(self._known, state, beats, first_at, hung, now)
        return Put(self._key, record) if record is not None else None

    def farewell(self, state: AgentState, now: float, *, alone: bool) -> tuple[NodeLedger, ...]:
        """Close the ledger, write the record, and return the records of all nodes. ``alone``: etcd is this
        agent's own. In a job so large that its round is in parts, only the leader asks for the records of
        the other nodes. Blocks for a few seconds at most, until the other nodes of an ended job have written
        their records."""
        self._known, mine = timekeeping.close(self._known, state, now)
        if alone:
            return (mine,)
        written = threading.Event()
        if self._known.resumed and state.guard is not None:
            self._store.transact((state.guard,), (Put(self._key, mine),), lambda answer: written.set())
            written.wait(FAREWELL_S)
        if not self.knows_all(state):
            return (mine,)
        return (mine, *_others(self._store, mine.node, state.round))

    def knows_all(self, state: AgentState) -> bool:
        """Whether this agent asks for the records of all nodes."""
        large = state.round is not None and state.round.extent is not None
        return not large or state.leads is not None

    def _first_step_at(self, beat: SlotProgress, round: int) -> float:
        """Return the time of the worker's first step in the round; 0 if its page no longer holds the time."""
        known_round, at = self._first_at.get(beat.slot, (0, 0.0))
        if known_round != round:
            times = self._step_times(beat.slot, 0)
            at = times[0] if len(times) >= beat.step else 0.0
            self._first_at[beat.slot] = round, at
        return at

    def _own_seen(self, news: News) -> None:
        kept = [entry.fact for entry in news.entries if entry.key == self._key]
        if kept or isinstance(news, Listing):
            self._found = (kept[-1] if kept and isinstance(kept[-1], NodeLedger) else None,)


def _others(store: Store, node: str, ended: Round | None) -> list[NodeLedger]:
    """Return the other nodes' records. If the job has ended, wait up to ``FAREWELL_S`` for the last records
    of the last round's members."""
    known: dict[str, NodeLedger] = {}
    whole = threading.Event()
    over = ended is not None and ended.phase is Phase.ENDED
    awaited = ended.by_node.keys() - {node} if ended is not None and over else set()
    least = ended.nodes - 1 if ended is not None and over else 0  # not all members may be known
    last: set[str] = set()  # nodes whose last record has come

    def seen(news: News) -> None:
        for ledger in (e.fact for e in news.entries if isinstance(e.fact, NodeLedger)):
            known[ledger.node] = ledger
            if ended is not None and ledger.node != node and ledger.at >= ended.since:
                last.add(ledger.node)
        if len(last) >= least and awaited <= last:
            whole.set()

    end = store.watch("ledger/", seen, prefix=True)
    whole.wait(FAREWELL_S)
    end()
    return [ledger for name, ledger in sorted(known.items()) if name != node]
