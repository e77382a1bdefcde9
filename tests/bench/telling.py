"""The CPU time of a leader for what agents tell it: the real listener and gathering, over real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import cast

from elasticd.checkpoint.replication.wire import Wire
from elasticd.core.facts import NodeTelemetry
from elasticd.daemon.gathering import Gathering
from elasticd.daemon.leader_link import telemetry_listener, telemetry_messages
from elasticd.daemon.leader_link.telemetry_listener import TelemetryListener
from elasticd.daemon.leader_link.telemetry_messages import REQUEST_MAX, Taken, Tell

SECRET = "secret of the job"
HOST = "127.0.0.1"


class NotTaken(Exception):
    """The leader has not taken what an agent told it."""


class _Agents:
    """The agents of the job. ``kept``: they keep their connections."""

    def __init__(self, port: int, *, kept: bool) -> None:
        self._port = port
        self._kept = kept
        self._wires: dict[str, Wire] = {}

    def tell(self, told: NodeTelemetry) -> None:
        wire = self._wires.pop(told.node, None) or Wire.connect(HOST, self._port, SECRET)
        wire.send_raw_message(telemetry_messages.encoded(Tell((told,))))
        answer = telemetry_messages.answer(wire.receive_raw_message(REQUEST_MAX))
        if not isinstance(answer, Taken):
            raise NotTaken(f"{told.node} got the answer {answer}")
        if self._kept:
            self._wires[told.node] = wire
        else:
            wire.close()

    def close(self) -> None:
        for wire in self._wires.values():
            wire.close()


def hearing_s(gathering: Gathering, rounds: Iterable[Sequence[NodeTelemetry]], *, kept: bool) -> float:
    """Return the CPU time of the listener's thread for a message.

    ``rounds``: in each, all agents tell something. The first does not count: the leader gets to know the
    agents. ``kept``: agents keep their connections.
    """
    socket = telemetry_listener.listen(HOST)
    agents = _Agents(socket.getsockname()[1], kept=kept)
    messages, began = 0, None
    with TelemetryListener(socket, SECRET, gathering):
        thread = next(thread for thread in threading.enumerate() if thread.name == "elasticd-telemetry")
        clock = time.pthread_getcpuclockid(cast(int, thread.ident))
        for told in rounds:
            for one in told:
                agents.tell(one)
            if began is None:
                began = time.clock_gettime(clock)
            else:
                messages += len(told)
        used = time.clock_gettime(clock) - (began or 0.0)
        agents.close()
    return used / messages
