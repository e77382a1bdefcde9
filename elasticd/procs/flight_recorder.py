"""Torch's flight recorder of a worker: requested over a Unix socket, answered by elasticd/worker/boot."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

from elasticd.procs.page import recorder_of

ANSWER_S = 2.0
LAST = 10
_BYTES_MAX = 1 << 26


def ask(page: Path) -> bytes:
    """Return the worker's recorded collectives as torch's JSON; empty if the worker has no recorder, or does
    not answer within two seconds. ``page``: the path of its page."""
    deadline = time.monotonic() + ANSWER_S
    said = bytearray()
    try:
        with socket.socket(socket.AF_UNIX) as asker:
            asker.settimeout(ANSWER_S)
            asker.connect(str(recorder_of(page)))
            while part := asker.recv(1 << 16):
                said += part
                asker.settimeout(max(1e-3, deadline - time.monotonic()))
                if len(said) > _BYTES_MAX:
                    return b""
    except OSError:
        return b""
    return bytes(said)


def last_calls(recorded: bytes) -> list[str]:
    """Return the newest calls in a worker's answer, one per line, oldest first; none if the answer cannot be
    read."""
    try:
        calls = sorted(json.loads(recorded)["entries"], key=lambda call: int(call["record_id"]))
        return [_line(call) for call in calls[-LAST:]]
    except (ValueError, KeyError, TypeError):
        return []


def _line(call: dict[str, Any]) -> str:
    over = "over" if call["retired"] or call["state"] == "completed" else "not over"
    return f"{call['collective_seq_id']} {call['profiling_name']} of {call['input_sizes']}: {over}"
