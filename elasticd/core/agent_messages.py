"""The events that an agent receives, and the actions that it takes: the vocabulary of ``core.agent``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elasticd.core.facts import Exit, Member, Round
from elasticd.core.ports import Answer, Entry, Guard, LeaseNews, WorkerNews, Write

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class KeySeen:
    """News of a key that every agent watches: spec, round, leader, and its own node. The entry's ``fact`` is
    None if the key does not exist."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class OtherNodesCounted:
    """Answer to ``CountOtherNodes``: the number of other registered nodes."""

    count: int


class Tag(StrEnum):
    """The kind of a write, to match its answer. At most one write of each kind is under way."""

    SPEC = "spec"
    NODE = "node"
    SUCCEED = "succeed"
    LEAD = "lead"
    REPORT = "report"
    INPLACE = "inplace"


@dataclass(frozen=True, slots=True)
class Answered:
    tag: Tag
    answer: Answer


@dataclass(frozen=True, slots=True)
class RoundWritten:
    """The leader, which is on this node, has written the round. The watch brings the round, too, perhaps
    earlier."""

    round: Round
    revision: int


@dataclass(frozen=True, slots=True)
class LeaseChanged:
    news: LeaseNews


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker's process has ended. ``steps``: see ``Report.steps``."""

    round: int
    exit: Exit
    steps: int = 0


@dataclass(frozen=True, slots=True)
class PortReserved:
    """Answer to ``RenewStore``: the port for the next store that this node hosts."""

    port: int


@dataclass(frozen=True, slots=True)
class StoreComplained:
    """The store answers with an error (credentials, certificates, not an etcd), or holds a record that this
    version cannot read.

    ``why``: a sentence. ``forgot``: the store was wiped or restored from an older state, so its records of
    this job cannot be trusted.
    """

    why: str
    forgot: bool = False


@dataclass(frozen=True, slots=True)
class StoreFilled:
    """The store answers but has no room. ``why``: a sentence; empty once the store takes writes again."""

    why: str


@dataclass(frozen=True, slots=True)
class Signalled:
    signal: int


@dataclass(frozen=True, slots=True)
class ProcessGone:
    """Answer to ``CheckProcess``: the process of that incarnation has ended."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class ResourceExhausted:
    """This process lacks a resource and cannot go on, though the job could. ``why``: a sentence."""

    why: str


@dataclass(frozen=True, slots=True)
class WardenLost:
    """The warden died, and all workers with it."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    KeySeen
    | OtherNodesCounted
    | Answered
    | RoundWritten
    | LeaseChanged
    | WorkerExited
    | WorkerNews
    | PortReserved
    | StoreComplained
    | StoreFilled
    | Signalled
    | ProcessGone
    | ResourceExhausted
    | WardenLost
    | Tick
)


# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Transact:
    tag: Tag
    guards: tuple[Guard, ...]
    writes: tuple[Write, ...]


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Start the workers of a round. If this node is the first member, host the round's store before.
    ``waiting``: see ``ports.Procs.start``."""

    round: Round
    member: Member
    waiting: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaveRound:
    """Have the workers leave the round: see ``ports.Procs.leave``."""

    planned: bool
    signal: int
    grace_s: float
    leave_s: float | None
    going: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """Stop workers. ``slots``: only these; None: every process."""

    signal: int
    grace_s: float
    slots: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ContinueWorkers:
    """Let the workers of these slots go on after their checkpoint."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartStandbys:
    """Start processes that wait for a round."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RenewStore:
    """Reserve a port for the next store. The present store serves until then, since workers of other nodes
    may still need it for a save."""


@dataclass(frozen=True, slots=True)
class Fence:
    until: float | None


@dataclass(frozen=True, slots=True)
class CountOtherNodes:
    """Count the other nodes of the job once."""


@dataclass(frozen=True, slots=True)
class CheckProcess:
    pid: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class LeaveJob:
    """Revoke the lease and end with this exit code. ``why``: a sentence for people."""

    code: int
    why: str


Action = (
    Transact
    | StartWorkers
    | LeaveRound
    | StopWorkers
    | ContinueWorkers
    | StartStandbys
    | RenewStore
    | Fence
    | CountOtherNodes
    | CheckProcess
    | LeaveJob
)
