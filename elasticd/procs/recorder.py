"""Torch's flight recorder of a worker: asked for over a Unix socket, answered by elasticd/worker/boot."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from elasticd.procs.page import recorder_of

ANSWER_S = 2.0
_BYTES_MAX = 1 << 26


def ask(page: Path) -> bytes:
    """The collectives that the worker has called, pickled as torch's own ``torchfrtrace`` reads them; empty
    if it has no recorder, or does not answer within two seconds. ``page``: the path of its page."""
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
