"""The order in which a worker may send messages on its link. A worker that breaks the order loses its link,
and has no other effect on the agent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple
from typing import Final

from elasticd.channel.codec import BadMessage
from elasticd.channel.worker_messages import (
    VERSION,
    Broken,
    Checkpointed,
    Done,
    Enter,
    Entered,
    Hello,
    Holds,
    Waiting,
    WorkerToAgent,
)

# For each kind of message from a worker: the kinds of message that may precede it.
AFTER: Final[Mapping[type[WorkerToAgent], tuple[type[WorkerToAgent | Enter] | None, ...]]] = {
    Hello: (None,),
    Waiting: (Hello, Enter, Entered, Done),
    Entered: (Enter,),
    Broken: (Enter, Entered),
    Done: (Entered,),
}


class LinkProtocol:
    """The state of one worker's link. ``last``: the kind of the last message that matters for the order.
    ``round``: the round of the last ``Enter`` message; 0 before."""

    def __init__(self) -> None:
        self.last: type[WorkerToAgent | Enter] | None = None
        self.round = 0

    @property
    def linked(self) -> bool:
        """Whether the worker can receive messages."""
        return self.last is not None

    def told_to_enter(self, round_number: int) -> None:
        assert self.last is Waiting, f"told to enter {round_number} after {self.last}"
        self.last, self.round = Enter, round_number

    def receive(self, message: WorkerToAgent) -> None:
        """Process a message. Raises BadMessage if the message is out of order or has an impossible value."""
        if isinstance(message, Checkpointed):
            return
        if self.last not in AFTER[type(message)]:
            after = self.last.__name__ if self.last else "no message"
            raise BadMessage(f"the worker sent {message} after {after}")
        match message:
            case Hello(v=version):
                if version != VERSION:
                    raise BadMessage(f"the worker uses version {version} of the link, the agent {VERSION}")
            case Waiting(number, step, holds, agreed, memory):
                taken = astuple(memory) if memory is not None else ()
                self._check(message, number, agreed, 0 if holds is Holds.NONE else step, *taken)
            case Entered(number, step, group_s, state_s, batch, rates, _, shard, copies):
                self._check(message, number, step, group_s, state_s, batch, rates, shard, copies)
            case Broken(number, fails):
                self._check(message, number)
                if not fails:
                    return
            case Done(number):
                self._check(message, number)
        self.last = type(message)

    def _check(self, message: WorkerToAgent, number: int, *amounts: float) -> None:
        if number != self.round:
            raise BadMessage(f"the worker sent {message}, but was told to enter round {self.round}")
        if not all(math.isfinite(amount) and amount >= 0 for amount in amounts):
            raise BadMessage(f"the worker sent an impossible amount in {message}")
