"""What the workers of a job recorded last, in etcd: the agent of rank 0 compares the ranks of all nodes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from elasticd.core.facts import DebugTails, Round
from elasticd.core.ports import Applied, Put, Seen, Store

if TYPE_CHECKING:
    from elasticd.core.agent.agent_state import AgentState

FOLDER: Final = "debug/"
EVERY_S: Final = 2.0  # the least time between two writes of a node
# What all nodes together add to etcd in a second. Some etcds are compacted only after days.
BYTES_S: Final = 8192
Tails = tuple[tuple[str, ...], ...]  # see ``DebugTails.ranks``


class DebugExchange:
    """``follow`` is called now and then with the agent's state. ``offer`` and ``others`` may be called by
    another thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._facts: Mapping[str, DebugTails] = {}
        self._own: tuple[int, Tails] = (0, ())  # the round, and what is to be written
        self._written: DebugTails | None = None
        self._watches = self._writing = False
        self._due = 0.0

    def offer(self, round: int, tails: Tails) -> None:
        """Take what this node's workers recorded last."""
        with self._lock:
            self._own = round, tails

    def others(self, round: int) -> Tails:
        """Return what the workers of the other nodes recorded last in a round. Empty on a node that has never
        had rank 0."""
        return tuple(rank for fact in self._facts.values() if fact.round == round for rank in fact.ranks)

    def follow(self, state: AgentState, now: float) -> None:
        """Write what is new, or, on the node of rank 0, follow what the other nodes write."""
        crew = state.crew
        if crew is None or crew.round.extent is not None or len(crew.round.members) < 2:
            return
        if crew.member.base_rank > 0 and now >= self._due:
            self._write(state, crew.round, now)
        if crew.member.base_rank == 0 and not self._watches:
            self._watches = True
            self._store.watch(FOLDER, self._seen, prefix=True)

    def _write(self, state: AgentState, round: Round, now: float) -> None:
        """Write the tails unless a write is under way. The next write replaces a lost one."""
        with self._lock:
            number, tails = self._own
        fact = DebugTails(state.me.node, number, tails)
        nothing_new = number != round.number or not tails or fact == self._written
        if self._writing or state.guard is None or nothing_new:
            return
        self._writing, self._due = True, now + every_s(tails, len(round.members))

        def answered(answer: object) -> None:
            self._writing = False
            if isinstance(answer, Applied):
                self._written = fact

        self._store.transact((state.guard,), (Put(FOLDER + fact.node, fact, leased=True),), answered)

    def _seen(self, seen: Seen) -> None:
        """Keep what is written, also of nodes that are gone meanwhile."""
        new = {entry.key: entry.fact for entry in seen.entries if isinstance(entry.fact, DebugTails)}
        self._facts = {**self._facts, **new}


def every_s(tails: Tails, nodes: int) -> float:
    """Return the seconds that a node waits after it has written ``tails``, in a round of ``nodes`` nodes."""
    size = sum(len(text) for rank in tails for text in rank)
    return max(EVERY_S, size * (nodes - 1) / BYTES_S)
