"""The messages between an agent and a worker: one that recovers in place, or whose script writes checkpoints.

The agent listens. The name of its socket is in the worker's ``ELASTICD_LINK``; the worker connects when it
first enters its run function.

    worker                         agent
    Hello, Waiting(round 0)   ->
                              <-   Enter(round n)
    Entered(round n)          ->
                              <-   Leave(round n)
    Waiting(round n)          ->
                              <-   Enter(round m > n)
    ...
    Broken(round m)           ->
                              <-   Leave(round m)
    ...
    Done(round l)             ->

A script that works as under torchrun sends no Hello. It may send Checkpointed each time it has written a
checkpoint. The worker then waits until the agent closes the stream, or sends Leave. After Leave the worker is
to end, and the script may run to its end. A worker that has sent Hello gets no answer to Checkpointed.

When a group breaks, the agent usually knows, since another worker has ended, and sends Leave. If the agent
does not know, the worker sends Broken. The end of the stream means that the other process has exited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from elasticd.channel.codec import Codec
from elasticd.core.age import Age
from elasticd.core.state_memory import StateMemory

VERSION = 1
ADDRESS = "ELASTICD_LINK"
HANDOVER = "ELASTICD_HANDOVER"  # set in the environment of a handover round, which only passes the state on
GIVES, TAKES = "gives", "takes"  # the values of HANDOVER: whether the worker is in a later round


class Source(StrEnum):
    """Where a worker that enters a round got the training state."""

    SURVIVOR = "survivor"  # the worker itself, or another worker of an earlier round
    REPLICA = "replica"  # the same, and a lost worker's part of a sharded model from a replica of that part
    COPY = "copy"  # the same, and a lost worker's part of a sharded model from a redundant copy
    MEMORY = "memory"  # this node's memory, where the saver keeps replicas
    PEER = "peer"  # this node's memory and other nodes' memory
    DISK = "disk"  # the newest whole checkpoint
    SCRIPT = "script"  # the script's initial state, or what the script restores itself


class Holds(StrEnum):
    """How much of the training state a waiting worker has."""

    NONE = "none"  # only the script's initial state
    WHOLE = "whole"  # the whole state of its last commit
    SHARD = "shard"  # a part of the state of its last commit: the model is sharded
    TORN = "torn"  # an optimizer step that can be neither finished nor undone


@dataclass(frozen=True, slots=True)
class Hello:
    """A process has reached its run function. ``v``: its version of the protocol."""

    pid: int
    v: int = VERSION


@dataclass(frozen=True, slots=True)
class Waiting:
    """The worker is in no round and waits for the next. ``round``: its last round, 0 if there was none.
    ``step``: its last committed step. ``agreed``: see ``Age``. ``memory``: what its sharded state takes."""

    round: int
    step: int
    state: Holds
    agreed: int = 0
    memory: StateMemory | None = None

    @property
    def age(self) -> Age | None:
        """The age of the worker's state; None unless the worker has a state that others may go on with."""
        return Age(self.agreed, self.step) if self.state in (Holds.WHOLE, Holds.SHARD) else None


@dataclass(frozen=True, slots=True)
class Entered:
    """The worker has joined the group, has the state, and calls the user's function. ``group_s`` and
    ``state_s``: how long it took to join and to get the state. ``batch`` and ``rates``: the samples of a
    batch that grows with the world, and the factor of its learning rates; ``batch`` is 0 where it does not
    grow. ``shard_bytes`` and ``copies_bytes``: see ``SlotProgress``, with what the optimizers will keep."""

    round: int
    step: int
    group_s: float
    state_s: float
    batch: int = 0
    rates: float = 1.0
    source: Source = Source.SCRIPT
    shard_bytes: int = 0
    copies_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """The run function returned in every worker of the round. Only the end of the script remains."""

    round: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The worker cannot go on in the round, and waits for Leave. If it ``fails``, an exception of its own
    ends it. ``why``: the error, for people."""

    round: int
    fails: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """The script has written a whole checkpoint of its own at ``path``."""

    path: str


@dataclass(frozen=True, slots=True)
class Enter:
    """Take part in the round. ``env``: variables to set in the worker's environment."""

    round: int
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Leave:
    """The round closes.

    ``planned``: leave at a commit that all workers agree on; otherwise at once, in the middle of a step. An
    unplanned Leave may follow a planned one. ``going``: the next round is without this worker, so
    what the worker holds may be lost with it.
    """

    round: int
    planned: bool
    going: bool = False


WorkerToAgent = Hello | Waiting | Entered | Broken | Done | Checkpointed
AgentToWorker = Enter | Leave

WORKER_TO_AGENT: Codec[WorkerToAgent] = Codec(WorkerToAgent)
AGENT_TO_WORKER: Codec[AgentToWorker] = Codec(AgentToWorker)
