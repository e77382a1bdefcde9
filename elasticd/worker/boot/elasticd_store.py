"""The process that serves the stores of a node's rounds, torch's TCPStore. Standard library and torch only.

The zygote forks the process, with torch imported; without a zygote it is a Python process of its own. So the
agent does not import torch.

Each message of the agent is JSON with ``host``, ``port`` and ``timeout_s``, and one file: the socket that
listens there. The next message closes that store, and needs no file. The process ends when the agent closes
its end.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from datetime import timedelta

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MESSAGE_BYTES_MAX = 4096


def serve(control_fd: int) -> None:
    """Serve until the agent closes its end. A store opens when the first client connects, so that torch is
    imported only for scripts that use it."""
    control = socket.socket(fileno=control_fd)
    stores: list[object] = []  # the open one, if any; a store closes when it is forgotten
    listener: int | None = None
    where: dict[str, Any] = {}
    while True:
        watched = [control.fileno()] if listener is None else [control.fileno(), listener]
        readable = select.select(watched, [], [])[0]
        if control.fileno() in readable:
            message, files, _, _ = socket.recv_fds(control, _MESSAGE_BYTES_MAX, 1)
            if not message:
                return
            stores.clear()
            if listener is not None:
                os.close(listener)
            where, listener = json.loads(message), files[0] if files else None
        elif listener is not None:
            stores.append(_open(where, listener))
            listener = None


def _open(where: dict[str, Any], listener: int) -> object:
    from torch.distributed import TCPStore

    _ask_no_name_server()
    return TCPStore(
        where["host"],
        where["port"],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=where["timeout_s"]),
        master_listen_fd=listener,  # the store closes the descriptor
    )


def _ask_no_name_server() -> None:
    """Have this process look up names only in /etc/hosts.

    torch looks up the name of each client that connects, for messages only, and meanwhile serves no other
    client. Without this, a job with many workers waits for as many answers of the name server, and longer if
    answers are lost.
    """
    import ctypes

    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)  # a function of glibc
    if configure is not None:
        configure(b"hosts", b"files")


if __name__ == "__main__":
    if "--ahead" in sys.argv:
        import torch.distributed  # noqa: F401  # meanwhile the workers import it, too
    serve(3)
