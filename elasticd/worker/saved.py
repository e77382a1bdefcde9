"""Scripts that write checkpoints of their own, and say so."""

from __future__ import annotations

import os
import signal
import socket
import struct

from elasticd.core.link import ADDRESS, Checkpointed, Leave, Lines, LinkError, encode
from elasticd.core.page import Use
from elasticd.worker import told
from elasticd.worker.run import own_link

_CREDENTIALS = struct.Struct("3i")


def checkpointed(path: str | os.PathLike[str] = "") -> None:
    """Tell the agent that the script has written a checkpoint, and that it is whole: ``torch.save(...)``,
    then ``worker.checkpointed(path)``, in the worker that wrote it (or in one of them, once all have).

    Where the world is about to grow, shrink or lose a node that leaves, that has waited for this: it is
    done now, and no step is made anew. The worker is stopped in this call, which returns only where the
    script has a handler for SIGTERM of its own. Else, and without an agent, it returns at once.
    """
    address = os.environ.get(ADDRESS)
    if not address:
        return
    told.uses(Use.CHECKPOINTED)
    said = Checkpointed(os.fspath(path))
    if own_link.cache_info().currsize:  # it keeps its process, and leaves worlds at commits
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
            return  # it is gone, and nobody is there to wait for this


def _wait(agent: socket.socket) -> None:
    """Until it lets us go on, or would have us end and leaves that to the script."""
    lines = Lines()
    while data := agent.recv(65536):
        for message in lines.feed(data):
            if isinstance(message, Leave) and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                return
