"""The order in which a worker may send messages on its link. A worker that breaks the order loses its link,
and has no other effect on the agent."""

from __future__ import annotations

import math
from enum import Enum, auto

from elasticd.channel.codec import BadMessage
from elasticd.channel.worker_messages import (
    VERSION,
    Broken,
    Checkpointed,
    Done,
    Entered,
    Hello,
    Holds,
    Waiting,
    WorkerToAgent,
)


class Stage(Enum):
    SILENT = auto()  # nothing received yet; most scripts never send a message
    ARRIVED = auto()
    WAITING = auto()
    ENTERING = auto()
    INSIDE = auto()
    FAILING = auto()
    DONE = auto()


class Conversation:
    """The state of one worker's link. ``round``: the round that the worker was last told to enter; 0
    before."""

    def __init__(self) -> None:
        self.stage = Stage.SILENT
        self.round = 0

    @property
    def linked(self) -> bool:
        """Whether the worker can receive messages."""
        return self.stage is not Stage.SILENT

    def told_to_enter(self, round_number: int) -> None:
        assert self.stage is Stage.WAITING, f"told to enter {round_number} when it is {self.stage.name}"
        self.stage, self.round = Stage.ENTERING, round_number

    def hear(self, message: WorkerToAgent) -> None:
        """Process a message. Raises BadMessage if the message is out of order or cannot be true."""
        match self.stage, message:
            case Stage.SILENT, Hello(v=version):
                if version != VERSION:
                    raise BadMessage(f"it speaks version {version} of the link, and this agent {VERSION}")
                self.stage = Stage.ARRIVED
            case Stage.ARRIVED | Stage.ENTERING | Stage.INSIDE | Stage.DONE, Waiting(
                number, step, holds, agreed
            ):
                self._check(message, number, agreed, 0 if holds is Holds.NONE else step)
                self.stage = Stage.WAITING
            case Stage.ENTERING, Entered(number, step, group_s, state_s, batch, rates, _):
                self._check(message, number, step, group_s, state_s, batch, rates)
                self.stage = Stage.INSIDE
            case Stage.ENTERING | Stage.INSIDE, Broken(number, fails):
                self._check(message, number)
                self.stage = Stage.FAILING if fails else self.stage
            case Stage.INSIDE, Done(number):
                self._check(message, number)
                self.stage = Stage.DONE
            case _, Checkpointed():
                pass
            case _:
                raise BadMessage(f"it said {message} when it was {self.stage.name.lower()}")

    def _check(self, message: WorkerToAgent, number: int, *amounts: float) -> None:
        if number != self.round:
            raise BadMessage(f"it said {message}, and was told to enter round {self.round}")
        if not all(math.isfinite(amount) and amount >= 0 for amount in amounts):
            raise BadMessage(f"it said {message}")
