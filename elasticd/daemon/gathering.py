"""Brings this node's telemetry to the leader, and gathers all nodes' telemetry while this agent leads. The
simulator uses the same code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from elasticd.core import gathered
from elasticd.core.agent import AgentState
from elasticd.core.facts import (
    Fact,
    ForgottenNodes,
    Leadership,
    NodeLedger,
    NodeTelemetry,
    Paces,
    Phase,
    RoomProbe,
    Round,
    Summary,
)
from elasticd.core.gathered import Gathered
from elasticd.core.leader import Registered, View
from elasticd.core.ledger import totals
from elasticd.core.persistent_map import PersistentMap
from elasticd.core.ports import Applied, Heard, LeaderLink, Put, Seen, StillThere, Store
from elasticd.daemon.store_news import news_of, read_once

# The longest wait for each of: the other nodes' last telemetry, an answer, the last summary. In a large job
# the nodes tell their last one after the other, and ``gathered.end_within_s`` comes on top.
FAREWELL_S = 2.0


@dataclass(frozen=True, slots=True)
class PacesTold:
    """Nodes have told this agent, the leader, their paces."""

    paces: tuple[Paces, ...]


@dataclass(frozen=True, slots=True)
class LedgerFound:
    """The ledger that an earlier agent of this node has left; None if there is none."""

    kept: NodeLedger | None


Told = PacesTold | LedgerFound


class Gathering:
    """Call ``begin``, ``attend`` after each event and at ``wake_at``, and ``farewell`` at the end. ``tell``
    and these belong to the agent's thread. Any thread may call ``hear`` and ``summary``, and read ``known``.

    ``known``: what all nodes have told; None unless this agent leads.
    """

    def __init__(self, state: AgentState, store: Store, link: LeaderLink) -> None:
        self.wake_at: float | None = None
        self.known: Gathered | None = None
        me = state.me
        self._me, self._alone = me, state.config.alone
        self._store, self._link = store, link
        self._post: Callable[[Told], None] = lambda news: None
        self._told = NodeTelemetry(me.node, me.incarnation, me.port, asks=True)
        self._passed_on: tuple[NodeTelemetry, Leadership | None] | None = None
        self._leader: Leadership | None = None
        self._term = 0  # the create_revision of the leader's key
        self._run = 0  # see ``NodeLedger``
        self._present: PersistentMap[Registered] | None = None
        self._change = threading.Condition()  # of ``known``
        self._kept: PersistentMap[NodeLedger] = PersistentMap()  # the forgotten nodes that etcd has
        self._writing = False
        self._due = self._probe_due = 0.0

    def begin(self, post: Callable[[Told], None]) -> None:
        self._post = post
        self._link.listen(self._heard)

    def tell(self, **changes: Any) -> None:
        """Tell the leader new values of these fields of ``NodeTelemetry``."""
        self._told = replace(self._told, **changes)
        self._pass_on()

    def attend(self, state: AgentState, view: View | None, now: float) -> None:
        """Follow the leader. If this agent leads, write the summary if it is due."""
        self._leader, entry = state.leader, state.leads
        run = state.seen["spec"].created if state.spec is not None else self._run
        begins = False
        with self._change:  # else what another thread hears now would outlive the term
            if entry is None:
                self.known, self._term = None, 0
            elif state.spec is not None and (entry.created, self._run) != (self._term, run):
                self._term, self._run, self._present, self._due = entry.created, run, None, now
                self.known, begins = Gathered(run), True
            if view is not None and view.nodes is not None:
                self._present = view.nodes
        if begins:
            self._kept = PersistentMap()
            self._read("summary", lambda kept: self._read("forgotten", partial(self._restore, kept)))
        self._pass_on()
        self.wake_at = None
        if self.known is not None and self.known.restored and not self._alone:
            if not self._writing and now >= self._due:
                self._write(self._summary(now))
            elif not self._writing and now >= self._probe_due:
                self._put(now, [Put("room", RoomProbe(now))])
            self.wake_at = max(min(self._due, self._probe_due), now + gathered.SUMMARY_S)

    def hear(self, several: Sequence[NodeTelemetry]) -> Heard | None:
        """Take what agents tell. Return None unless this agent leads, and knows who is registered."""
        with self._change:
            known, present = self.known, self._present
            if known is None or present is None:
                return None
            paces, looked_up, kept, again = [], [], [], []
            for told in several:
                its, before = present.get(told.node), known.nodes.get(told.node)
                registered = its is not None and its.node.incarnation == told.incarnation
                if before is None or not registered:
                    again.append(told.node)
                if not registered:
                    continue  # the watch of etcd may be late
                if told.asks and known.restored:
                    looked_up.append(told.node)
                    kept.append(gathered.kept_for(known, told.node))
                if told.paces is not None and (before is None or before.paces != told.paces):
                    paces.append(told.paces)
                known = gathered.hear(known, told)
            self.known = known
            self._change.notify_all()
        if paces:
            self._post(PacesTold(tuple(paces)))
        every_s = gathered.tell_every_s(len(present))
        found = tuple(one for one in kept if one is not None)
        return Heard(every_s, tuple(looked_up), found, tuple(again))

    def summary(self, now: float) -> Summary | None:
        """Return what the summary would be now; None unless this agent leads."""
        known = self.known
        return gathered.summarize(known, self._me.node, None, now)[1] if known is not None else None

    def farewell(
        self, state: AgentState, ledger: NodeLedger, now: float, *, known: bool
    ) -> tuple[tuple[NodeLedger, ...], dict[str, float]]:
        """Tell the leader the last telemetry of this node. The ledger is part of it if the ledger of the
        node's earlier agent is ``known``. Return the ledgers of the nodes, and the seconds of all nodes by
        kind. In a large job, whose round is in parts, an agent that does not lead returns its own ledger and
        no seconds.

        Blocks for a few seconds at most, and at the end of a job of 10,000 nodes for 10 more. The leader of a
        job that has ended waits for the other nodes' last telemetry, and writes the summary for them."""
        mine = (ledger,)
        if self._alone:
            return mine, totals(mine)
        round = state.round
        ended = round if round is not None and round.phase is Phase.ENDED else None
        self.tell(ledger=ledger if known else self._told.ledger, last=True)
        if self.known is not None:
            return self._collect(ended, ledger, now)
        if known and state.registered:
            self._link.flush(FAREWELL_S, _end_within_s(ended))
        if round is not None and round.extent is not None:
            return mine, {}
        summary = self._await_summary(ended)
        kept = summary.nodes if summary is not None else ()
        ledgers = {told.node: told.ledger for told in kept if told.ledger is not None} | {ledger.node: ledger}
        gone = summary.gone if summary is not None else {}
        spent = {kind: s + gone.get(kind, 0.0) for kind, s in totals(ledgers.values()).items()}
        return tuple(ledger for _, ledger in sorted(ledgers.items())), spent

    # ------------------------------------------------------------ this node

    def _pass_on(self) -> None:
        what = self._told, self._leader
        if what == self._passed_on:
            return
        if self.known is None:
            self._link.tell(*what)
        else:
            heard = self.hear((self._told,))
            if heard is None:
                return  # the nodes are not listed yet
            self._heard(heard)
            if self._me.node in heard.again and self._me.node not in self.known.nodes:
                return  # this node is not registered yet
        self._passed_on = what

    def _heard(self, heard: Heard) -> None:
        """Find the ledger that an earlier agent left. Runs on any thread."""
        mine = self._me.node
        if mine in heard.looked_up:
            self._post(LedgerFound(next((one for one in heard.kept if one.node == mine), None)))

    # ------------------------------------------------------------ the summary

    def _read(self, key: str, found: Callable[[Fact | None], None]) -> None:
        """Pass on the present value of the key. ``found`` runs on the store's thread."""
        read_once(self._store, key, lambda there: found(news_of(key, there)[0].fact))

    def _restore(self, kept: Fact | None, forgotten: Fact | None) -> None:
        with self._change:
            if self.known is None or self.known.restored:
                return
            summary = kept if isinstance(kept, Summary) else None
            its = forgotten if isinstance(forgotten, ForgottenNodes) else None
            self.known = known = gathered.restore(self.known, summary, its)
            self._kept = known.forgotten
        mine = known.nodes.get(self._me.node)
        if self._told.asks:
            self._post(LedgerFound(mine.ledger if mine is not None else None))

    def _summary(self, now: float, *, final: bool = False) -> Summary:
        with self._change:
            assert self.known is not None
            known = self.known
            self.known, summary = gathered.summarize(known, self._me.node, self._present, now, final=final)
        return summary

    def _write(self, summary: Summary, done: Callable[[], None] = lambda: None) -> None:
        known, writes, count = self.known, [Put("summary", summary)], 0
        forgotten = known.forgotten if known is not None else self._kept
        if known is not None and forgotten is not self._kept:
            writes.append(Put("forgotten", gathered.to_keep(known)))
            count = len(forgotten)
        self._due = summary.at + gathered.summarize_every_s(summary, count)

        def answered(answer: object) -> None:
            if isinstance(answer, Applied):
                self._kept = forgotten
            done()

        self._put(summary.at, writes, answered)

    def _put(
        self, now: float, writes: Sequence[Put], done: Callable[[object], None] = lambda answer: None
    ) -> None:
        self._probe_due, self._writing = now + gathered.PROBE_S, True

        def answered(answer: object) -> None:
            self._writing = False
            done(answer)

        self._store.transact((StillThere("leader", self._term),), tuple(writes), answered)

    # ------------------------------------------------------------ the end

    def _collect(
        self, ended: Round | None, mine: NodeLedger, now: float
    ) -> tuple[tuple[NodeLedger, ...], dict[str, float]]:
        with self._change:
            self._change.wait_for(
                lambda: self.known is None or gathered.is_whole(self.known, ended),
                FAREWELL_S + _end_within_s(ended),
            )
        known, written = self.known, threading.Event()
        if known is None or not known.restored:
            return (mine,), totals((mine,))
        self._write(self._summary(now, final=ended is not None), written.set)
        written.wait(FAREWELL_S)
        return known.ledgers, dict(known.spent)

    def _await_summary(self, ended: Round | None) -> Summary | None:
        """Return the newest summary. If the job has ended, wait for the final one."""
        newest: list[Summary] = []
        enough = threading.Event()

        def seen(news: Seen) -> None:
            newest.extend(entry.fact for entry in news.entries if isinstance(entry.fact, Summary))
            if ended is None or (newest and newest[-1].final and newest[-1].at >= ended.since):
                enough.set()

        end = self._store.watch("summary", seen)
        enough.wait(FAREWELL_S)
        end()
        return newest[-1] if newest else None


def _end_within_s(ended: Round | None) -> float:
    return gathered.end_within_s(ended.nodes) if ended is not None else 0.0
