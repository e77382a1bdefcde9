"""Instants of a save at which processes are killed: certain calls of a process.

``CHAOS_ARMED`` names a file with an order (JSON), if there is one. The process ``who`` (a name, or the
beginning of names) kills ``pids`` (or itself, if there are none) at its call ``event``, after ``skip`` such
calls. Processes report their calls to ``CHAOS_SOCKET``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import suppress
from typing import Any

MARK = f"ELASTICD_E2E_MARK={os.environ.get('ELASTICD_E2E_MARK', '')}".encode()
_armed = os.environ.get("CHAOS_ARMED", "")
_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
_seen: dict[str, int] = {}  # how many events have passed, by the order in the file
_real_open, _real_unlink = os.open, os.unlink


def tell(what: str, **facts: Any) -> None:
    said = {"is": what, "pid": os.getpid(), "at": time.monotonic(), "node": os.environ["E2E_NODE"], **facts}
    with suppress(OSError):  # the test has ended
        _socket.sendto(json.dumps(said).encode(), f"\0{os.environ['CHAOS_SOCKET']}")


def armed(who: str, event: str) -> dict[str, Any] | None:
    """Return the order, if it is to be carried out at this event; else None."""
    try:
        with open(_armed, opener=lambda path, flags: _real_open(path, flags | os.O_CLOEXEC)) as file:
            raw = file.read()
    except OSError:
        return None
    order = json.loads(raw)
    if order["event"] != event or not who.startswith(order["who"]):
        return None
    _seen[raw] = _seen.get(raw, 0) + 1
    return order if _seen[raw] == order["skip"] + 1 else None


def fire(order: dict[str, Any]) -> None:
    """Kill the processes of the order, and this process last."""
    with suppress(OSError):
        _real_unlink(_armed)
    pids = [pid for pid in order["pids"] or [os.getpid()] if _is_ours(pid)]
    tell("fired", pids=pids)
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def instant(who: str, event: str) -> None:
    if (order := armed(who, event)) is not None:
        fire(order)


def _is_ours(pid: int) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return MARK in file.read().split(b"\0")
    return False
