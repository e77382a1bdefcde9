"""What became of a checkpoint, and what memory the saver holds, for whoever counts and for people."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec


class Fate(StrEnum):
    COPIED = "copied"  # the training has handed it over
    COMMITTED = "committed"
    SKIPPED = "skipped"  # not even copied, as those before it were not durable yet
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SaveReport:
    """``blocked_s``: for how long the training waited for the copy. ``took_s``: from the copy until it
    was committed. ``size``: bytes of all ranks. ``why``: it failed, one clause."""

    fate: Fate
    step: int
    name: str = ""
    blocked_s: float = 0.0
    took_s: float = 0.0
    size: int = 0
    why: str = ""

    def line(self) -> bytes:
        """As ``from_line`` takes it."""
        return msgspec.json.encode(self) + b"\n"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of shared memory with the saver. ``own``: what workers of this node hand over in, two buffers
    each; ``replicas``: copies for other nodes."""

    own: int = 0
    replicas: int = 0

    def line(self) -> bytes:
        """As ``from_line`` takes it."""
        return msgspec.json.encode(self) + b"\n"


def from_line(line: bytes) -> SaveReport | Footprint | None:
    """None for whatever else a process writes."""
    try:
        said = msgspec.json.decode(line, type=dict)
        return msgspec.convert(said, SaveReport) if "fate" in said else msgspec.convert(said, Footprint)
    except (msgspec.DecodeError, ValueError):
        return None


def sentence(report: SaveReport) -> str:
    """For people; empty where it is not worth their while."""
    match report.fate:
        case Fate.COMMITTED:
            of = f"({report.size / 1e6:.1f} MB, {report.took_s:.2f} s)"
            return f"committed step {report.step} as {report.name} {of}"
        case Fate.FAILED:
            return f"step {report.step} was not saved as {report.name}: {report.why}"
        case Fate.SKIPPED:
            return f"step {report.step} was not saved, as those before it were not yet durable"
        case Fate.COPIED:
            return ""
