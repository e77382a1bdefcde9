"""Why something was decided, as values. Tests compare them; ``telemetry.words`` renders them."""

from __future__ import annotations

from dataclasses import dataclass

from elasticd.core.facts import Cause, Failure, Outcome
from elasticd.core.hang import Verdict
from elasticd.core.page import Use

# ---------------------------------------------------------------- why the leader waits


@dataclass(frozen=True, slots=True)
class BelowMinimum:
    """Too few workers; the job ends when this lasts until ``until``."""

    have: int
    need: int
    until: float


@dataclass(frozen=True, slots=True)
class Settling:
    """Enough workers to start, but more may be on their way until ``until``."""

    have: int
    most: int
    until: float


@dataclass(frozen=True, slots=True)
class AwaitingRelease:
    """Members of the closing round still have workers."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AwaitingHeirs:
    """Nodes that leave have all there is of the state; others make ready to take it until ``until``."""

    nodes: tuple[str, ...]
    until: float


@dataclass(frozen=True, slots=True)
class AwaitingCheckpoint:
    """The round is to be resized, once its script has written its next checkpoint or at ``until``."""

    until: float


@dataclass(frozen=True, slots=True)
class AwaitingReturn:
    """Members are not registered, but etcd was away, so they may come back until ``until``."""

    nodes: tuple[str, ...]
    until: float


@dataclass(frozen=True, slots=True)
class CoolingDown:
    """There is room to grow, once the round has lived until ``until``."""

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
    """It is left out, as its worker lagged behind or its GPU is bad."""

    node: str
    slot: int
    until: float


@dataclass(frozen=True, slots=True)
class WorkerStraggling:
    """``ratio``: of its own time for a step to its peers', over a window."""

    node: str
    slot: int
    rank: int
    ratio: float


@dataclass(frozen=True, slots=True)
class WorkerKeepsUp:
    """It was a straggler, and is none any more."""

    node: str
    slot: int
    rank: int


@dataclass(frozen=True, slots=True)
class SlotBad:
    """Its GPU has told of an error of its own."""

    node: str
    slot: int
    rank: int
    why: str


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
    """They leave the round and keep their process; ``planned``: at a commit point they agree on."""

    round: int
    cause: Cause
    planned: bool


@dataclass(frozen=True, slots=True)
class StandbysStarted:
    """Processes that are to wait for a round."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckpointTold:
    """A script has written a checkpoint of its own."""

    round: int
    slot: int
    path: str


@dataclass(frozen=True, slots=True)
class StandbyReady:
    """One of them waits now."""

    slot: int


@dataclass(frozen=True, slots=True)
class StandbyFailed:
    """One of them ended before it could wait; the slot is tried again at ``until``."""

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
    """``log``: where the output of one that failed is."""

    round: int
    slot: int
    rank: int
    code: int
    message: str
    hung: bool = False
    log: str = ""


@dataclass(frozen=True, slots=True)
class WorkersHung:
    """``evidence``: the folder of what was found on this node; empty if it could not be written."""

    round: int
    verdict: Verdict
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class WithoutEffect:
    """Options that were given for what the script turns out not to use. ``option``: as it was typed;
    ``wants``: what of elasticd.worker it is for."""

    option: str
    wants: Use


@dataclass(frozen=True, slots=True)
class BatchesChanged:
    """The first resize of a script that counts its data by itself, in batches or in samples."""

    before: int
    now: int


@dataclass(frozen=True, slots=True)
class BeganAgain:
    """A restarted script trains with an optimizer that has made no step, though it had come so far."""

    furthest: int


@dataclass(frozen=True, slots=True)
class Expelled:
    """A newer round exists without this node, whose workers of an older one are killed."""

    running: int
    newest: int


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The node's keys are gone; it registers again. ``late_s``: how late the agent was in asking for more
    time on a lease of ``ttl_s``."""

    ttl_s: float
    late_s: float


@dataclass(frozen=True, slots=True)
class StoreAway:
    """etcd does not answer. Workers go on, unless ``cut_off``: then they stop at ``until``."""

    cut_off: bool
    until: float | None


@dataclass(frozen=True, slots=True)
class StoreBack:
    away_s: float


@dataclass(frozen=True, slots=True)
class StoreFull:
    """etcd takes no more writes; ``why`` says what to do. Workers go on, and nothing changes until then."""

    why: str


@dataclass(frozen=True, slots=True)
class StoreHasRoom:
    """It takes writes again, after so long."""

    full_s: float


@dataclass(frozen=True, slots=True)
class Draining:
    """This node leaves: asked by a signal, or (signal 0) by ``elasticd drain``."""

    signal: int


@dataclass(frozen=True, slots=True)
class LeadsNow:
    """This agent leads the job."""


@dataclass(frozen=True, slots=True)
class NameTaken:
    """Another agent has this node name; waits until its lease must have run out."""

    until: float


@dataclass(frozen=True, slots=True)
class PolicyDiffers:
    """The job runs with the policy of its first agent, which is not what this one was told."""

    fields: tuple[str, ...]


Wait = (
    BelowMinimum
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
    | JobEnded
    | WorkersStarted
    | WorkersStopping
    | WorkersLeaving
    | StandbysStarted
    | CheckpointTold
    | StandbyReady
    | StandbyFailed
    | WorkerEnded
    | WorkersHung
    | WithoutEffect
    | BatchesChanged
    | BeganAgain
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
