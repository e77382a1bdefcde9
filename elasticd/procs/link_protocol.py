"""The order in which a worker may send messages on its link. A worker that breaks the order loses its link,
and has no other effect on the agent."""

from __future__ import annotations

import math
from collections.abc import Mapping
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

# What may be the last message when the worker sends another. Most scripts send none.
AFTER: Final[Mapping[type[WorkerToAgent], tuple[type[WorkerToAgent | Enter] | None, ...]]] = {
    Hello: (None,),
    Waiting: (Hello, Enter, Entered, Done),
    Entered: (Enter,),
    Broken: (Enter, Entered),
    Done: (Entered,),
}


class LinkProtocol:
    """The state of one worker's link. ``last``: the kind of the last message, but for those that change
    nothing in the order. ``round``: the round that the worker was last told to enter; 0 before."""

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

    def hear(self, message: WorkerToAgent) -> None:
        """Process a message. Raises BadMessage if the message is out of order or cannot be true."""
        if isinstance(message, Checkpointed):
            return
        if self.last not in AFTER[type(message)]:
            raise BadMessage(f"it said {message} after {self.last.__name__ if self.last else 'nothing'}")
        match message:
            case Hello(v=version):
                if version != VERSION:
                    raise BadMessage(f"it speaks version {version} of the link, and this agent {VERSION}")
            case Waiting(number, step, holds, agreed):
                self._check(message, number, agreed, 0 if holds is Holds.NONE else step)
            case Entered(number, step, group_s, state_s, batch, rates, _):
                self._check(message, number, step, group_s, state_s, batch, rates)
            case Broken(number, fails):
                self._check(message, number)
                if not fails:
                    return
            case Done(number):
                self._check(message, number)
        self.last = type(message)

    def _check(self, message: WorkerToAgent, number: int, *amounts: float) -> None:
        if number != self.round:
            raise BadMessage(f"it said {message}, and was told to enter round {self.round}")
        if not all(math.isfinite(amount) and amount >= 0 for amount in amounts):
            raise BadMessage(f"it said {message}")
