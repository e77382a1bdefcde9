"""The CPU time of a leader for the agents' messages: the real listener and gathering, over real sockets.

The agents are in a process of their own, ``python -m tests.bench.telling PORT KEPT``. The process reads lines
up to an empty line, and sends the message of each line to the leader as one agent. Then it prints a line.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import cast

from elasticd.checkpoint.replication.wire import Wire
from elasticd.core.facts import NodeTelemetry
from elasticd.daemon.gathering import Gathering
from elasticd.daemon.leader_link import telemetry_messages
from elasticd.daemon.leader_link.telemetry_listener import TelemetryListener
from elasticd.daemon.leader_link.telemetry_messages import REQUEST_MAX, Taken, Tell
from elasticd.telemetry import accepting

SECRET = "secret of the job"
HOST = "127.0.0.1"
KEPT = "kept"


class NotTaken(Exception):
    """The leader has not received what the agents sent."""


def hearing_s(gathering: Gathering, rounds: Iterable[Sequence[NodeTelemetry]], *, kept: bool) -> float:
    """Return the CPU time of the listener's thread for a message.

    ``rounds``: in each, all agents send a message. The first round does not count: the leader gets to know
    the agents. ``kept``: agents keep their connections.
    """
    socket = accepting.listen(HOST)
    port = socket.getsockname()[1]
    command = [sys.executable, "-m", "tests.bench.telling", str(port), KEPT if kept else ""]
    messages, began = 0, None
    with (
        TelemetryListener(socket, SECRET, gathering),
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agents,
    ):
        assert agents.stdin is not None and agents.stdout is not None
        thread = next(thread for thread in threading.enumerate() if thread.name == "elasticd-telemetry")
        clock = time.pthread_getcpuclockid(cast(int, thread.ident))
        for told in rounds:
            agents.stdin.writelines(telemetry_messages.encoded(Tell((one,))) + b"\n" for one in told)
            agents.stdin.write(b"\n")
            agents.stdin.flush()
            if not agents.stdout.readline():
                raise NotTaken("the process of the agents has ended")
            if began is None:
                began = time.clock_gettime(clock)
            else:
                messages += len(told)
        used = time.clock_gettime(clock) - (began or 0.0)
        agents.stdin.close()
    return used / messages


def _tell_all(port: int, *, kept: bool) -> None:
    wires: dict[int, Wire] = {}
    number = 0
    for line in sys.stdin.buffer:
        raw = line.rstrip()
        if not raw:
            number = 0
            print("told", flush=True)
            continue
        wire = wires.get(number) or Wire.connect(HOST, port, SECRET)
        wire.send_raw_message(raw)
        answer = telemetry_messages.answer(wire.receive_raw_message(REQUEST_MAX))
        if not isinstance(answer, Taken):
            raise NotTaken(f"the answer is {answer}")
        if kept:
            wires[number] = wire
        else:
            wire.close()
        number += 1


if __name__ == "__main__":
    _tell_all(int(sys.argv[1]), kept=sys.argv[2] == KEPT)
