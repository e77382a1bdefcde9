"""The records that workers write in ``elasticd run --debug``, read back.

A worker has a file of notes and one file for each process group. A line is JSON, padded with spaces. The
first line says whose file it is. The others are numbered from 1 (``n``). The newest lines replace the oldest,
so that the lines may begin with any number and stand in any order. A line that was being written when the
worker died may be damaged, and is left out.

The writer is ``elasticd/worker/boot/elasticd_records.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

VERSION = 1
_RANKS_MAX = 1 << 20  # of a group
_UNUSABLE = (KeyError, TypeError, ValueError, OverflowError)  # the record is not as described
FOLDER = "debug"  # in the run's folder
VARIABLE = "ELASTICD_DEBUG_FOLDER"  # the folder, in a worker's environment
NOTES, GROUP = ".notes", ".group-"


@dataclass(frozen=True, slots=True)
class Call:
    """A collective that a rank was about to call.

    ``op``, ``how``, ``shape``, ``dtype``: what must be the same in all ranks. ``how``: the reduction and the
    root. ``shape``: as text; empty where ranks may have different shapes. ``tensors``: for people. ``place``:
    the line of the script; empty if unknown. ``chain``: a checksum over this and all earlier calls.
    """

    number: int
    at: float
    op: str
    how: str = ""
    shape: str = ""
    dtype: str = ""
    tensors: str = ""
    place: str = ""
    chain: int = 0

    @property
    def same(self) -> tuple[str, str, str, str]:
        return self.op, self.how, self.shape, self.dtype


@dataclass(frozen=True, slots=True)
class GroupCalls:
    """The last calls of one rank in a process group, in order. ``ranks``: the members of the group."""

    name: str
    ranks: tuple[int, ...]
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class SeedNote:
    """The seed of torch's generator, before the rank's first step."""

    at: float
    seed: int


@dataclass(frozen=True, slots=True)
class WeightsNote:
    """The weights of one DistributedDataParallel after ``step`` steps of its optimizer.

    ``ranks``: the first and the last rank of its group, and their number. ``first``: names and digests of the
    first parameters.
    """

    at: float
    model: int
    step: int
    ranks: tuple[int, ...]
    digest: int
    first: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class EpochNote:
    """A DataLoader begins an epoch. ``loader``: the line of the script. ``samples``, ``batches``: -1 if
    unknown. ``sampler``: the settings of a DistributedSampler; empty for other samplers."""

    at: float
    loader: str
    epoch: int
    samples: int
    batches: int
    sampler: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadedNote:
    """The digest of one of the first batches of an epoch in which an optimizer steps."""

    at: float
    loader: str
    epoch: int
    digest: int


@dataclass(frozen=True, slots=True)
class LoaderEndNote:
    """A DataLoader that the script trains with has no more batches."""

    at: float
    loader: str
    epoch: int
    batches: int


@dataclass(frozen=True, slots=True)
class ScriptEnd:
    """The script has ended. ``error``: its exception; empty without one. ``in_collective``: the exception was
    raised by a collective, so another rank may be the cause."""

    at: float
    error: str = ""
    place: str = ""
    in_collective: bool = False


DebugNote = SeedNote | WeightsNote | EpochNote | LoadedNote | LoaderEndNote | ScriptEnd


@dataclass(frozen=True, slots=True)
class RankRecords:
    """All records of one rank in one round. ``unit``: the workers of a unit."""

    rank: int
    world: int
    unit: int = 1
    groups: tuple[GroupCalls, ...] = ()
    notes: tuple[DebugNote, ...] = ()

    @property
    def end(self) -> ScriptEnd | None:
        return next((note for note in self.notes if isinstance(note, ScriptEnd)), None)


def rank_records(notes: bytes, groups: Sequence[bytes]) -> RankRecords | None:
    """Return the records in the files of one rank; None if its file of notes cannot be read."""
    head, lines = _lines(notes)
    try:
        if head["v"] != VERSION:
            return None
        rank, world, unit = int(head["rank"]), int(head["world"]), int(head["unit"])
    except _UNUSABLE:
        return None
    kept = tuple(found for found in map(_group_calls, groups) if found is not None)
    return RankRecords(rank, world, unit, kept, tuple(_notes(lines)))


def tail(data: bytes, most: int) -> str:
    """Return the first line of a file and the newest lines, at most ``most``."""
    head, lines = _lines(data)
    return "\n".join(json.dumps(line) for line in (head, *lines[-most:]))


def _lines(data: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the first line and the numbered lines in order."""
    read = []
    for line in data.split(b"\n"):
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            said = {}
        read.append(said if isinstance(said, dict) else {})
    numbered = [said for said in read[1:] if isinstance(said.get("n"), int)]
    return read[0], sorted(numbered, key=lambda said: int(said["n"]))


def _group_calls(data: bytes) -> GroupCalls | None:
    head, lines = _lines(data)
    try:
        ranges = [range(int(first), int(last) + 1) for first, last in head["ranks"]]
        if sum(map(len, ranges)) > _RANKS_MAX:
            return None
        ranks = tuple(rank for its in ranges for rank in its)
        return GroupCalls(str(head["group"]), ranks, tuple(_calls(lines)))
    except _UNUSABLE:
        return None


def _calls(lines: Sequence[dict[str, Any]]) -> Iterator[Call]:
    for said in lines:
        try:
            op, how, shape, dtype = said["same"]
            shown = "" if shape is None else str(shape)
            words = (str(op), str(how), shown, str(dtype), str(said["of"]), str(said["at"]))
            yield Call(int(said["n"]), float(said["t"]), *words, int(said["chain"]))
        except _UNUSABLE:
            continue


def _notes(lines: Sequence[dict[str, Any]]) -> Iterator[DebugNote]:
    for said in lines:
        try:
            note = _note(said, float(said["t"]))
        except _UNUSABLE:
            continue
        if note is not None:
            yield note


def _note(said: Mapping[str, Any], at: float) -> DebugNote | None:
    match said["is"]:
        case "seed":
            return SeedNote(at, int(said["seed"]))
        case "weights":
            first = tuple((str(name), int(digest)) for name, digest in said["first"])
            ranks = tuple(map(int, said["ranks"]))
            return WeightsNote(at, int(said["model"]), int(said["step"]), ranks, int(said["digest"]), first)
        case "epoch":
            sampler = {str(name): int(value) for name, value in said["sampler"].items()}
            counts = int(said["epoch"]), int(said["samples"]), int(said["batches"])
            return EpochNote(at, str(said["loader"]), *counts, sampler)
        case "batch":
            return LoadedNote(at, str(said["loader"]), int(said["epoch"]), int(said["digest"]))
        case "epoch ended":
            return LoaderEndNote(at, str(said["loader"]), int(said["epoch"]), int(said["batches"]))
        case "end":
            inside = said.get("in_collective") is True
            return ScriptEnd(at, str(said.get("error", "")), str(said.get("at", "")), inside)
    return None
