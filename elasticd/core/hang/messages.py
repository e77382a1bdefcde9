"""What is seen of workers that stand still, and what is to be done about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticd.core.facts import Hang, Stall
from elasticd.core.hang.judging import Verdict
from elasticd.core.hang.standstill import Beat, Inspected, Vitals

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Woke:
    """The time has come that the last step asked for."""


@dataclass(frozen=True, slots=True)
class StepsRead:
    beats: tuple[Beat, ...]


@dataclass(frozen=True, slots=True)
class VitalsSampled:
    """By slot."""

    vitals: Mapping[int, Vitals] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Looked:
    """``number``: of the ``LookAt`` that it answers."""

    number: int
    sights: tuple[Inspected, ...] = ()


@dataclass(frozen=True, slots=True)
class EvidenceKept:
    """``place``: where the evidence is; empty where it could not be written. ``number``: as above."""

    number: int
    place: str = ""


@dataclass(frozen=True, slots=True)
class HangSaid:
    """The leader has written this, or what it wrote is gone."""

    hang: Hang | None


Event = Woke | StepsRead | VitalsSampled | Looked | EvidenceKept | HangSaid

# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class ReadSteps:
    """``StepsRead`` follows at once. ``known``: the steps of each process that were read before, by pid."""

    known: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """``VitalsSampled`` follows at once. ``pids``: by slot."""

    pids: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LookAt:
    """Find out where these workers are in their code. ``Looked`` follows in a while, late, or never."""

    number: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeepEvidence:
    """Write down what was found at the ``look`` of that number (0: there was none). ``EvidenceKept`` follows
    in a while, late, or never."""

    number: int
    round: int
    verdict: Verdict
    look: int


@dataclass(frozen=True, slots=True)
class Tell:
    """The leader, of workers that stand still."""

    stall: Stall


@dataclass(frozen=True, slots=True)
class Untell:
    """They make steps again."""


@dataclass(frozen=True, slots=True)
class Condemn:
    """Kill this worker. ``evidence``: where it is kept."""

    slot: int
    pid: int
    verdict: Verdict
    evidence: str


Action = ReadSteps | Sample | LookAt | KeepEvidence | Tell | Untell | Condemn
