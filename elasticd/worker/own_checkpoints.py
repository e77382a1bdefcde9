"""The report of scripts that write checkpoints of their own."""

from __future__ import annotations

import os
import signal
import socket
import struct

from elasticd.core.link import ADDRESS, Checkpointed, Leave, Lines, LinkError, encode
from elasticd.core.page import Use
from elasticd.worker import agentpage
from elasticd.worker.run import own_link

_CREDENTIALS = struct.Struct("3i")


def checkpointed(path: str | os.PathLike[str] = "") -> None:
    """Tell the agent that the script has written a whole checkpoint.

    Call ``torch.save(...)``, then ``worker.checkpointed(path)``, in the worker that wrote the checkpoint, or
    in one of them once all have.

    If the world is about to grow or shrink, or a node leaves, the change has waited for this call and happens
    now: no step is lost. The worker is then stopped in this call. The call returns only if the script handles
    SIGTERM itself. Without a change, or without an agent, it returns at once.
    """
    address = os.environ.get(ADDRESS)
    if not address:
        return
    agentpage.uses(Use.CHECKPOINTED)
    said = Checkpointed(os.fspath(path))
    if own_link.cache_info().currsize:  # this worker keeps its process, and leaves worlds at commits
        own_link(address).say(said)
        return
    with socket.socket(socket.AF_UNIX) as agent:
        try:
            agent.connect("\0" + address)
            raw = agent.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(raw)[1] != os.geteuid():
                return
            agent.sendall(encode(said))
            _wait(agent)
        except (OSError, LinkError):
            return  # the agent is gone, so there is nothing to wait for


def _wait(agent: socket.socket) -> None:
    """Wait until the agent lets this worker go on, or wants it to end while the script handles SIGTERM."""
    lines = Lines()
    while data := agent.recv(65536):
        for message in lines.feed(data):
            if isinstance(message, Leave) and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                return
