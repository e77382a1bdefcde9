"""The events and actions of ``core.hang.watching``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticd.core.facts import Hang, Stall
from elasticd.core.hang.judging import Verdict
from elasticd.core.hang.standstill import Beat, Inspected, Vitals

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Woke:
    """The wake-up time of the last step has come."""


@dataclass(frozen=True, slots=True)
class StepsRead:
    beats: tuple[Beat, ...]


@dataclass(frozen=True, slots=True)
class VitalsSampled:
    """The vitals of the workers, by slot."""

    vitals: Mapping[int, Vitals] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Looked:
    """The result of a look. ``number``: of the ``LookAt`` that it answers."""

    number: int
    sights: tuple[Inspected, ...] = ()


@dataclass(frozen=True, slots=True)
class EvidenceKept:
    """The evidence is written. ``place``: its folder; empty if it could not be written. ``number``: of the
    ``KeepEvidence`` that it answers."""

    number: int
    place: str = ""


@dataclass(frozen=True, slots=True)
class StallWithdrawn:
    """The withdrawal of the report ``number`` is written. Answers ``WithdrawStall``."""

    number: int


@dataclass(frozen=True, slots=True)
class HangChanged:
    """The leader has written its record of a hang, or the record was deleted (None)."""

    hang: Hang | None


Event = Woke | StepsRead | VitalsSampled | Looked | EvidenceKept | StallWithdrawn | HangChanged

# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class ReadSteps:
    """Read the workers' steps. ``StepsRead`` follows at once. ``known``: the steps already read of each
    process, by pid."""

    known: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample the processes. ``VitalsSampled`` follows at once. ``pids``: by slot."""

    pids: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LookAt:
    """Find out where these workers are in their code. ``Looked`` follows later, or never."""

    number: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeepEvidence:
    """Write the findings of the look ``look`` (0: there was none) as evidence. ``EvidenceKept`` follows
    later, or never."""

    number: int
    round: int
    verdict: Verdict
    look: int


@dataclass(frozen=True, slots=True)
class ReportStall:
    """Report workers that stand still to the leader."""

    stall: Stall


@dataclass(frozen=True, slots=True)
class WithdrawStall:
    """Withdraw the report of the look ``number``: the workers make steps again. ``StallWithdrawn`` follows
    later, or never."""

    number: int


@dataclass(frozen=True, slots=True)
class Condemn:
    """Kill this worker. ``evidence``: the folder of the evidence."""

    slot: int
    pid: int
    verdict: Verdict
    evidence: str


Action = ReadSteps | Sample | LookAt | KeepEvidence | ReportStall | WithdrawStall | Condemn
