"""Reports of the saves of checkpoints, and of the saver's memory, for metrics and for people."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec


class Fate(StrEnum):
    COPIED = "copied"  # the workers have handed over their shards
    COMMITTED = "committed"
    SKIPPED = "skipped"  # not copied, because earlier checkpoints were not durable yet
    FAILED = "failed"


BEHIND: Final = "earlier checkpoints are not written yet"  # why a checkpoint is skipped


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The progress or the end of one save. ``blocked_s``: how long training waited for the copy. ``took_s``:
    from the copy to the commit. ``size``: bytes of all ranks. ``why``: the reason of a failure, one
    clause."""

    fate: Fate
    step: int
    name: str = ""
    blocked_s: float = 0.0
    took_s: float = 0.0
    size: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of the saver's shared memory. ``own``: the buffers of this node's workers, two each;
    ``replicas``: copies of other nodes' shards."""

    own: int = 0
    replicas: int = 0


def to_line(report: SaveReport | Footprint) -> bytes:
    """Encode a report for ``from_line``. Lines of stdout, as the saver outlives the agent's connections."""
    return msgspec.json.encode(report) + b"\n"


def from_line(line: bytes) -> SaveReport | Footprint | None:
    """Decode a line. Return None for any other output of the process."""
    try:
        said = msgspec.json.decode(line, type=dict)
        return msgspec.convert(said, SaveReport) if "fate" in said else msgspec.convert(said, Footprint)
    except (msgspec.DecodeError, ValueError):
        return None


def sentence(report: SaveReport) -> str:
    """Return the report in words; empty for ``COPIED``, which is not final."""
    match report.fate:
        case Fate.COMMITTED:
            of = f"({report.size / 1e6:.1f} MB, {report.took_s:.2f} s)"
            return f"committed step {report.step} as {report.name} {of}"
        case Fate.FAILED:
            return f"step {report.step} was not saved as {report.name}: {report.why}"
        case Fate.SKIPPED:
            return f"step {report.step} was not saved: {BEHIND}"
        case Fate.COPIED:
            return ""
