"""Asks the leader for the telemetry of all nodes, for live views and commands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Self

from elasticd.checkpoint.replication.wire import PeerGone, Wire
from elasticd.core.facts import Leadership, NodeTelemetry, Summary
from elasticd.daemon.leader_link import telemetry_messages
from elasticd.daemon.leader_link.telemetry_messages import ANSWER_MAX, Ask, TelemetryBatch

EVERY_S: Final = 1.0
CONNECT_S: Final = 2.0
SILENCE_S: Final = 5.0  # the leader may be stopped, and a person waits


@dataclass(frozen=True, slots=True)
class JobTelemetry:
    """What the leader knows: the telemetry of all nodes, by name, and the summary."""

    nodes: Mapping[str, NodeTelemetry]
    summary: Summary


def ask_leader(leader: Leadership) -> JobTelemetry:
    """Ask the leader over TCP for the telemetry of all nodes. Raises PeerGone if the leader does not
    answer."""
    with _Connection(leader) as connection:
        return connection.ask()


class TelemetryFollower:
    """Asks the leader once a second, and gives ``seen`` each answer; None if there is none. ``seen`` runs on
    the follower's thread."""

    def __init__(self, seen: Callable[[JobTelemetry | None], None]) -> None:
        self._seen = seen
        self._change = threading.Condition()
        self._leader: Leadership | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="elasticd-follow", daemon=True)
        self._thread.start()

    def follow(self, leader: Leadership | None) -> None:
        """Follow this leader from now on."""
        with self._change:
            if leader != self._leader:
                self._leader = leader
                self._change.notify_all()

    def close(self) -> None:
        """End the thread, without waiting for a leader that does not answer."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def _run(self) -> None:
        while (leader := self._next()) is not None:
            try:
                with _Connection(leader) as connection:
                    while self._is_followed(leader):
                        self._seen(connection.ask())
                        self._pause(leader)
            except PeerGone:
                self._seen(None)
                self._pause(leader)

    def _next(self) -> Leadership | None:
        with self._change:
            self._change.wait_for(lambda: self._closed or (self._leader is not None and self._leader.port))
            return None if self._closed else self._leader

    def _is_followed(self, leader: Leadership) -> bool:
        return not self._closed and self._leader == leader

    def _pause(self, leader: Leadership) -> None:
        with self._change:
            self._change.wait_for(lambda: not self._is_followed(leader), EVERY_S)


class _Connection:
    """A connection to the leader, and what the leader has answered so far."""

    def __init__(self, leader: Leadership) -> None:
        self._wire = Wire.connect(leader.host, leader.port, leader.secret, CONNECT_S, SILENCE_S)
        self._nodes: dict[str, NodeTelemetry] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._wire.close()

    def ask(self) -> JobTelemetry:
        while True:
            self._wire.send_raw_message(telemetry_messages.encoded(Ask()))
            answer = telemetry_messages.answer(self._wire.receive_raw_message(ANSWER_MAX))
            if not isinstance(answer, TelemetryBatch):
                raise PeerGone("the agent there does not lead")
            self._nodes |= {told.node: told for told in answer.nodes}
            if not answer.more:
                return JobTelemetry(dict(self._nodes), answer.summary)
