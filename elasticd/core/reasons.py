"""The reasons of decisions, as values. Tests compare them; ``telemetry.describe`` puts them into words."""

from __future__ import annotations

from dataclasses import dataclass

from elasticd.core.facts import Cause, Failure, Laggard, Outcome
from elasticd.core.hang.judging import Verdict
from elasticd.core.page_layout import Use

# ---------------------------------------------------------------- why the leader waits


@dataclass(frozen=True, slots=True)
class BelowMinimum:
    """There are too few workers, or they make too few whole units of ``unit`` workers. The job ends if this
    lasts until ``until``."""

    have: int
    need: int
    until: float
    unit: int = 1


@dataclass(frozen=True, slots=True)
class BelowMemory:
    """The workers that there are lack memory for the job's sharded state. ``need``, ``state``, ``each``: see
    ``Shortage``. ``most``: the most workers that the job may have. The job ends if this lasts until
    ``until``."""

    have: int
    need: int
    state: int
    each: int
    most: int
    until: float


@dataclass(frozen=True, slots=True)
class Settling:
    """There are enough workers to start, but more may come until ``until``."""

    have: int
    most: int
    until: float


@dataclass(frozen=True, slots=True)
class AwaitingRelease:
    """Members of the closing round still have workers in it: ``nodes``, and ``more`` other nodes."""

    nodes: tuple[str, ...]
    more: int = 0


@dataclass(frozen=True, slots=True)
class AwaitingHeirs:
    """The leaving nodes alone hold the state. They stay until ``until`` to hand the state over."""

    nodes: tuple[str, ...]
    until: float


@dataclass(frozen=True, slots=True)
class AwaitingCheckpoint:
    """The round will be resized after its script's next checkpoint, or at ``until``."""

    until: float


@dataclass(frozen=True, slots=True)
class AwaitingReturn:
    """Members, ``nodes`` and ``more`` other nodes, are not registered. etcd was away, so the members may come
    back until ``until``."""

    nodes: tuple[str, ...]
    until: float
    more: int = 0


@dataclass(frozen=True, slots=True)
class CoolingDown:
    """A larger world is possible, but the round lives until ``until`` first."""

    have: int
    could_have: int
    until: float


# ---------------------------------------------------------------- what the leader decided


@dataclass(frozen=True, slots=True)
class RoundFormed:
    number: int
    world_size: int
    nodes: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class RoundClosing:
    number: int
    cause: Cause
    nodes: tuple[str, ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class FailureCharged:
    failure: Failure
    spent: int
    allowed: int


@dataclass(frozen=True, slots=True)
class SlotQuarantined:
    node: str
    slot: int
    until: float


@dataclass(frozen=True, slots=True)
class SlotDrained:
    """The slot is left out, because its worker is a straggler or its GPU has errors. ``faults``: in words
    (``why``) in the log."""

    node: str
    slot: int
    until: float
    faults: tuple[Laggard, ...]


@dataclass(frozen=True, slots=True)
class WorkerStraggling:
    """The worker is a straggler. ``ratio``: its own time for a step over its peers', in the window."""

    node: str
    slot: int
    rank: int
    ratio: float


@dataclass(frozen=True, slots=True)
class WorkerKeepsUp:
    """The worker is no longer a straggler."""

    node: str
    slot: int
    rank: int


@dataclass(frozen=True, slots=True)
class SlotBad:
    """The slot's GPU has reported an error."""

    node: str
    slot: int
    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class GpuStrained:
    """The slot's GPU is short of memory, or something holds its clock down."""

    node: str
    slot: int
    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class GpuRelieved:
    """The slot's GPU is no longer strained."""

    node: str
    slot: int
    rank: int


@dataclass(frozen=True, slots=True)
class JobEnded:
    outcome: Outcome
    why: str


# ---------------------------------------------------------------- what an agent decided


@dataclass(frozen=True, slots=True)
class WorkersStarted:
    round: int
    ranks: tuple[int, ...]
    world_size: int


@dataclass(frozen=True, slots=True)
class WorkersLeaving:
    """The workers leave the round and keep their process. ``planned``: at a commit that they agree on."""

    round: int
    cause: Cause
    planned: bool


@dataclass(frozen=True, slots=True)
class StandbysStarted:
    """Processes were started to wait for a round."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartHeldBack:
    """Workers of these slots start once the process ``until_gone`` is gone, and perhaps others."""

    slots: tuple[int, ...]
    until_gone: int


@dataclass(frozen=True, slots=True)
class ProcessLingers:
    """The kernel has been taking a worker's process down for ``for_s``. New workers wait for it for another
    ``waits_s``; 0: they no longer wait."""

    slot: int
    pid: int
    for_s: float
    waits_s: float


@dataclass(frozen=True, slots=True)
class ScriptCheckpointed:
    """A script has written a checkpoint of its own."""

    round: int
    slot: int
    path: str


@dataclass(frozen=True, slots=True)
class StandbyReady:
    """A standby process waits for a round now."""

    slot: int


@dataclass(frozen=True, slots=True)
class StandbyFailed:
    """A standby process ended before it could wait. The slot is tried again at ``until``."""

    slot: int
    code: int
    message: str
    until: float


@dataclass(frozen=True, slots=True)
class WorkersStopping:
    round: int
    cause: Cause
    grace_s: float


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker ended, which this node noticed at ``noticed_at``. ``log``: the path of its output, if it
    failed."""

    round: int
    slot: int
    rank: int
    code: int
    message: str
    hung: bool = False
    log: str = ""
    noticed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkersHung:
    """Workers hang. ``evidence``: the folder of this node's findings; empty if it could not be written."""

    round: int
    verdict: Verdict
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class VerdictDropped:
    """This agent was late to act on a verdict, and judges its workers again. ``late_s``: by how much."""

    round: int
    verdict: Verdict
    late_s: float


@dataclass(frozen=True, slots=True)
class OptionWithoutEffect:
    """An option has no effect, since the script does not use the part of elasticd.worker that it needs.
    ``option``: as the user typed it. ``wants``: the part."""

    option: str
    wants: Use


@dataclass(frozen=True, slots=True)
class BatchesChanged:
    """The job was resized for the first time, and its script counts its data itself, in batches or
    samples."""

    before: int
    now: int


@dataclass(frozen=True, slots=True)
class TrainingBeganAgain:
    """A restarted script trains with a new optimizer, though it had made ``furthest`` steps before."""

    furthest: int


@dataclass(frozen=True, slots=True)
class Expelled:
    """A newer round was formed without this node, so its workers of the older round are killed."""

    running: int
    newest: int


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The node's lease ran out, so the node registers again. ``late_s``: how late the agent was with its
    renewal of a lease of ``ttl_s``."""

    ttl_s: float
    late_s: float


@dataclass(frozen=True, slots=True)
class StoreAway:
    """etcd does not answer. The workers go on; if ``cut_off``, they stop at ``until``."""

    cut_off: bool
    until: float | None


@dataclass(frozen=True, slots=True)
class StoreBack:
    away_s: float


@dataclass(frozen=True, slots=True)
class StoreFull:
    """etcd takes no writes, so the world stays as it is. The workers go on. ``why`` says what to do."""

    why: str


@dataclass(frozen=True, slots=True)
class StoreHasRoom:
    """etcd takes writes again, after ``full_s`` seconds."""

    full_s: float


@dataclass(frozen=True, slots=True)
class Draining:
    """This node leaves, because of a signal or (signal 0) ``elasticd drain``."""

    signal: int


@dataclass(frozen=True, slots=True)
class LeadsNow:
    """This agent leads the job."""


@dataclass(frozen=True, slots=True)
class NameTaken:
    """Another agent has this node's name. This agent waits until that agent's lease must have run out."""

    until: float


@dataclass(frozen=True, slots=True)
class PolicyDiffers:
    """The job runs with the policy of its first agent, which differs from this agent's in ``fields``."""

    fields: tuple[str, ...]


Wait = (
    BelowMinimum
    | BelowMemory
    | Settling
    | AwaitingRelease
    | AwaitingHeirs
    | AwaitingCheckpoint
    | AwaitingReturn
    | CoolingDown
)
Reason = (
    Wait
    | RoundFormed
    | RoundClosing
    | FailureCharged
    | SlotQuarantined
    | SlotDrained
    | WorkerStraggling
    | WorkerKeepsUp
    | SlotBad
    | GpuStrained
    | GpuRelieved
    | JobEnded
    | WorkersStarted
    | WorkersStopping
    | WorkersLeaving
    | StandbysStarted
    | StartHeldBack
    | ProcessLingers
    | ScriptCheckpointed
    | StandbyReady
    | StandbyFailed
    | WorkerEnded
    | WorkersHung
    | VerdictDropped
    | OptionWithoutEffect
    | BatchesChanged
    | TrainingBeganAgain
    | Expelled
    | LeaseLost
    | StoreAway
    | StoreBack
    | StoreFull
    | StoreHasRoom
    | Draining
    | LeadsNow
    | NameTaken
    | PolicyDiffers
)
