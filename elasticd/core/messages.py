"""What happens to an agent, and what it does about it: the alphabet of ``core.agent``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elasticd.core.facts import Exit, Member, Round
from elasticd.core.ports import Answer, Entry, Guard, LeaseNews, WorkerNews, Write

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Saw:
    """News of one of the keys that every agent watches: spec, round, leader, its own node.
    ``fact`` is None where the key does not exist."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class SawOthers:
    """Answer to ``LookAround``: how many other nodes are registered."""

    count: int


class Tag(StrEnum):
    """Which of the agent's writes an answer belongs to; one of each is under way at a time."""

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
class LeaseChanged:
    news: LeaseNews


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """``steps``: see ``Report.steps``."""

    round: int
    exit: Exit
    steps: int = 0


@dataclass(frozen=True, slots=True)
class PortReserved:
    """Answer to ``RenewStore``: the port for the next store that this node hosts."""

    port: int


@dataclass(frozen=True, slots=True)
class StoreComplained:
    """The store answers but says no (credentials, certificates, not an etcd), or holds a record
    that this version cannot read. ``why``: a sentence. ``forgot``: it was wiped, or restored from
    an older state, so that nothing it says about this job can be relied on."""

    why: str
    forgot: bool = False


@dataclass(frozen=True, slots=True)
class StoreFilled:
    """The store answers, and has no room: ``why`` is a sentence, empty once it takes writes again."""

    why: str


@dataclass(frozen=True, slots=True)
class Signalled:
    signal: int


@dataclass(frozen=True, slots=True)
class ProcessGone:
    """Answer to ``CheckProcess``: no process of that incarnation is left on this machine."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Exhausted:
    """This process lacks what it needs to go on, though the job could: ``why`` is a sentence."""

    why: str


@dataclass(frozen=True, slots=True)
class KeeperLost:
    """The process keeper died and took all workers with it."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Saw
    | SawOthers
    | Answered
    | LeaseChanged
    | WorkerExited
    | WorkerNews
    | PortReserved
    | StoreComplained
    | StoreFilled
    | Signalled
    | ProcessGone
    | Exhausted
    | KeeperLost
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
    """Host the round's store first if this node is its first member."""

    round: Round
    member: Member
    hosts_store: bool


@dataclass(frozen=True, slots=True)
class CloseRound:
    """Workers that can leave the round are told to: at a commit point that all agree on if it is
    ``planned``, else at once; they are killed after ``part_s``, if there is such a limit. The others get the
    signal, and are killed after ``grace_s``. ``going``: none of them is to take part in the next round."""

    planned: bool
    signal: int
    grace_s: float
    part_s: float | None
    going: bool = False


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """``slots``: only these; None: every process there is."""

    signal: int
    grace_s: float
    slots: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class GoOn:
    """Hold the workers of these slots no longer, which have told of a checkpoint."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartStandbys:
    """Start processes that belong to no round yet."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RenewStore:
    """Reserve a port for the next store; the present one serves until then, since workers of other
    nodes may still be saving with its help."""


@dataclass(frozen=True, slots=True)
class Fence:
    until: float | None


@dataclass(frozen=True, slots=True)
class LookAround:
    """Count the other nodes of the job, once."""


@dataclass(frozen=True, slots=True)
class CheckProcess:
    pid: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Revoke the lease and end with this exit code. ``why``: a sentence for a person."""

    code: int
    why: str


Action = (
    Transact
    | StartWorkers
    | CloseRound
    | StopWorkers
    | GoOn
    | StartStandbys
    | RenewStore
    | Fence
    | LookAround
    | CheckProcess
    | Leave
)
