"""Tells the leader this agent's telemetry, on one thread. The agent's own thread never waits for the leader,
except at the end (``flush``)."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final
from zlib import crc32

from elasticd.checkpoint.replication.wire import PeerGone, Wire
from elasticd.core.facts import Leadership, NodeTelemetry
from elasticd.core.ports import Heard
from elasticd.daemon.leader_link import telemetry_messages
from elasticd.daemon.leader_link.telemetry_messages import REQUEST_MAX, InvalidTold, Taken, Tell
from elasticd.telemetry import log

FIRST_S: Final = 1.0  # between two messages, before the leader has said how often it wants to hear
KEPT_S_MAX: Final = 2.0  # a connection is not kept for longer: a leader of many nodes has few connections
RETRY_S_MAX: Final = 30.0
FAILURES_SAID: Final = 5  # failed attempts in a row until a warning: about half a minute


class TelemetrySender:
    """A ``ports.LeaderLink`` over TCP. Call ``close`` at the end."""

    def __init__(self, node: str) -> None:
        self._spread = crc32(node.encode()) / 2**32  # so that agents do not all call a new leader at once
        self._change = threading.Condition()
        self._told: NodeTelemetry | None = None
        self._taken: NodeTelemetry | None = None  # what ``_taker`` has
        self._taker: Leadership | None = None
        self._leader: Leadership | None = None
        self._wire: Wire | None = None
        self._every_s = FIRST_S
        self._due = 0.0  # by time.monotonic
        self._failures = 0  # in a row
        self._refused_by: Leadership | None = None
        self._tries = 0
        self._hurry_at = math.inf  # by time.monotonic: send then, even if the leader wants to hear later
        self._closed = False
        self._listener: Callable[[Heard], None] = lambda heard: None
        self._thread = threading.Thread(target=self._run, name="elasticd-tell", daemon=True)
        self._thread.start()

    def listen(self, heard: Callable[[Heard], None]) -> None:
        self._listener = heard

    def tell(self, told: NodeTelemetry, leader: Leadership | None) -> None:
        with self._change:
            if leader != self._leader:
                self._failures = 0
                self._due = time.monotonic() + self._spread * self._every_s
            self._told, self._leader = told, leader
            self._change.notify_all()

    def flush(self, within_s: float, spread_s: float = 0.0) -> bool:
        with self._change:
            if self._leader is None or not self._leader.port:
                return False
            self._hurry_at, tries = time.monotonic() + self._spread * spread_s, self._tries
            self._change.notify_all()
            self._change.wait_for(
                lambda: self._taken == self._told or self._tries > tries + 1, spread_s + within_s
            )
            return self._taken == self._told

    def close(self) -> None:
        """End the thread, without waiting for a leader that does not answer."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (work := self._next()) is not None:
            self._try(*work)
        self._disconnect()

    def _next(self) -> tuple[NodeTelemetry, Leadership] | None:
        """Wait until there is something to tell. Return None at the end."""
        with self._change:
            while not self._closed:
                told, leader, now = self._told, self._leader, time.monotonic()
                taken = told == self._taken and leader == self._taker
                if told is None or leader is None or not leader.port or (taken and not told.asks):
                    self._change.wait()
                elif now < (due := min(self._due, self._hurry_at)):
                    self._change.wait(due - now)
                else:
                    self._hurry_at = math.inf if now >= self._hurry_at else self._hurry_at
                    return told, leader
            return None

    def _try(self, told: NodeTelemetry, leader: Leadership) -> None:
        if leader != self._taker:
            self._disconnect()
            self._taken, self._taker = None, leader
        try:
            wire = self._connected(leader)
            wire.send_raw_message(telemetry_messages.encoded(Tell((_news(told, self._taken),))))
            answer = telemetry_messages.answer(wire.receive_raw_message(REQUEST_MAX))
        except PeerGone as error:
            self._disconnect()
            answer = None
            if self._failures + 1 == FAILURES_SAID:
                _warn(leader, error)
        if isinstance(answer, InvalidTold) and self._refused_by != leader:
            self._refused_by = leader
            _say_refused(leader, answer.why)
        with self._change:
            self._tries += 1
            now = time.monotonic()
            if isinstance(answer, Taken):
                self._taken = None if told.node in answer.heard.again else told
                self._failures, self._every_s = 0, answer.heard.every_s
                self._due = now + self._every_s
            else:
                self._taken = None
                self._failures += 1
                self._due = now + min(FIRST_S * 2.0 ** (self._failures - 1), RETRY_S_MAX)
            self._change.notify_all()
        if isinstance(answer, Taken):
            if answer.heard.every_s > KEPT_S_MAX:
                self._disconnect()
            self._listener(answer.heard)

    def _connected(self, leader: Leadership) -> Wire:
        if self._wire is None:
            self._wire = Wire.connect(leader.host, leader.port, leader.secret)
        return self._wire

    def _disconnect(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


def _news(told: NodeTelemetry, taken: NodeTelemetry | None) -> NodeTelemetry:
    """Return what the leader does not have yet."""
    if taken is None:
        return told
    return replace(
        told,
        progress=told.progress if told.progress != taken.progress else None,
        paces=told.paces if told.paces != taken.paces else None,
        ledger=told.ledger if told.ledger != taken.ledger else None,
    )


def _warn(leader: Leadership, error: PeerGone) -> None:
    where = f"{leader.host}:{leader.port}"
    said = (
        f"the leader's agent on {leader.node} cannot be reached at {where} ({error}): training goes on, but "
        "`elasticd status` lacks this node's steps and times; see that the nodes reach each other's --address"
    )
    log.get("elasticd.agent").warning("leader.unreachable", sentence=said, node=leader.node, address=where)


def _say_refused(leader: Leadership, why: str) -> None:
    said = (
        f"the leader's agent on {leader.node} refuses what this agent tells ({why}): training goes on, but "
        "`elasticd status` lacks this node's steps and times; all agents need the same version of elasticd"
    )
    log.get("elasticd.agent").warning("leader.refuses", sentence=said, node=leader.node, why=why)
