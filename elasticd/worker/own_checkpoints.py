"""The report of scripts that write checkpoints of their own."""

from __future__ import annotations

import os
import signal
from contextlib import closing

from elasticd.channel.codec import ChannelClosed
from elasticd.channel.framing import Channel, close_all, connect
from elasticd.channel.worker_messages import (
    ADDRESS,
    AGENT_TO_WORKER,
    WORKER_TO_AGENT,
    Checkpointed,
    Leave,
)
from elasticd.core.page import Use
from elasticd.worker.agent import agentpage
from elasticd.worker.run import own_link


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
    try:
        with closing(Channel(connect(address), WORKER_TO_AGENT, AGENT_TO_WORKER)) as agent:
            agent.send(said)
            while True:  # until the agent closes, or wants this worker to end and the script handles SIGTERM
                message, files = agent.receive()
                close_all(files)
                if isinstance(message, Leave) and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                    return
    except ChannelClosed:
        return  # the agent is gone, or lets this worker go on
