"""The notes that a worker writes for an audit: one line of JSON for each batch and commit.

A note belongs to the round of the last ``entered`` line before it in the file. A worker notes a batch before
any worker can commit it. So all workers' notes of every committed step exist, however the workers died.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VERSION = 1
FOLDER = "audit"  # in the run's folder
SUFFIX = ".jsonl"
VARIABLE = "ELASTICD_AUDIT_FOLDER"  # the audit folder, in a worker's environment
EVERY = "ELASTICD_AUDIT_EVERY"  # the number of steps from one digest of the weights to the next
SERIES = "ELASTICD_AUDIT_SERIES"


class BadNote(ValueError):
    """A line in a file of notes is not a note. The message says what is wrong with the line."""


@dataclass(frozen=True, slots=True)
class EntryNote:
    """A worker entered a round, with ``step`` committed steps and the data at this position.

    ``series`` orders rounds of the same number: a new etcd starts again at round 1. ``data``: the data's own
    facts; None where the State has no data.
    """

    round: int
    rank: int
    world: int
    step: int
    series: str = ""
    epoch: int = 0
    position: int = 0
    data: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class BatchNote:
    """The samples of one global batch that this worker fetched, and their losses.

    ``step``: the first uncommitted step at that time. ``turn``: the number of batches since the last commit.
    ``first`` and ``samples``: the batch's first position in the epoch, and its size. ``parts``: for each
    part, its start in the batch, its number of samples and its loss. ``ids``: the fetched samples, packed.
    """

    step: int
    turn: int
    epoch: int
    first: int
    samples: int
    parts: tuple[tuple[int, int, float], ...]
    ids: str


@dataclass(frozen=True, slots=True)
class CommitNote:
    """``step`` steps are committed. ``covers``: the number of steps that this commit adds, perhaps 0."""

    step: int
    covers: int = 1

    @property
    def first(self) -> int:
        """The first step that the commit adds."""
        return self.step - max(1, self.covers) + 1


@dataclass(frozen=True, slots=True)
class Weights:
    """The digest of the weights after ``step`` steps."""

    step: int
    digest: str


@dataclass(frozen=True, slots=True)
class Gap:
    """``notes`` notes before this one could not be written, because of ``why``. Notes exist again from
    ``step``."""

    step: int
    notes: int
    why: str


Note = EntryNote | BatchNote | CommitNote | Weights | Gap


def encode(note: Note) -> bytes:
    """Return one line, newline included."""
    said: dict[str, Any]
    match note:
        case EntryNote():
            said = {name: getattr(note, name) for name in EntryNote.__slots__}
            said = {"is": "entered", "v": VERSION, **said, "data": note.data and dict(note.data)}
        case BatchNote():
            parts = [[start, count, loss.hex()] for start, count, loss in note.parts]
            said = {
                "is": "took",
                **{name: getattr(note, name) for name in BatchNote.__slots__},
                "parts": parts,
            }
        case CommitNote(step, covers):
            said = {"is": "committed", "step": step, "covers": covers}
        case Weights(step, digest):
            said = {"is": "weights", "step": step, "digest": digest}
        case Gap(step, notes, why):
            said = {"is": "gap", "step": step, "notes": notes, "why": why}
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Note:
    """Return the note on a line. Unknown fields are ignored. Raises BadNote."""
    try:
        said = json.loads(line)
        match said:
            case {"is": "entered", "v": int(version)}:
                if version != VERSION:
                    raise BadNote(f"a note of version {version}, and this elasticd reads {VERSION}")
                return _checked(EntryNote(**{name: said[name] for name in EntryNote.__slots__}))
            case {"is": "took", "parts": list(parts)}:
                exact = tuple((int(start), int(count), float.fromhex(loss)) for start, count, loss in parts)
                return _checked(
                    BatchNote(**{**{name: said[name] for name in BatchNote.__slots__}, "parts": exact})
                )
            case {"is": "committed", "step": int(step)}:
                covers = said.get("covers", 1)
                if type(covers) is not int or not 0 <= covers <= step:
                    raise ValueError(covers)
                return CommitNote(step, covers)
            case {"is": "weights", "step": int(step), "digest": str(digest)}:
                return Weights(step, digest)
            case {"is": "gap", "step": int(step), "notes": int(notes), "why": str(why)}:
                return Gap(step, notes, why)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        if isinstance(error, BadNote):
            raise
    raise BadNote(f"not a note for an audit: {line[:80]!r}")


def _checked(note: EntryNote | BatchNote) -> EntryNote | BatchNote:
    texts = {"series", "ids"}
    for name in set(note.__slots__) - {"data", "parts"}:
        value: Any = getattr(note, name)
        if type(value) is not (str if name in texts else int):
            raise TypeError(name)
        if isinstance(value, int) and value < 0:
            raise ValueError(name)
    if isinstance(note, BatchNote):
        counts = [count for start, count, _ in note.parts if start >= 0 and count >= 0]
        if len(counts) < len(note.parts) or not len(unpack(note.ids)) == sum(counts) <= note.samples:
            raise ValueError("parts")
        if note.parts and not note.samples:
            raise ValueError("samples")
    elif note.data is not None:
        _check_data(note.data)
    return note


def _check_data(data: Mapping[str, Any]) -> None:
    match data:
        case {"order": {"kind": str(), **order}, "global_batch": int(), "drop_last": bool()}:
            length = order.get("length", 1)
            if type(length) is not int or length < 1:
                raise ValueError("length")
        case _:
            raise ValueError("data")


Numbered = list[tuple[int, Note | BadNote]]


def lines(data: bytes, first: int = 1) -> Iterator[tuple[int, Note | BadNote]]:
    """Yield the notes in a file with their line numbers. Bytes after the last newline are half a line, and
    are ignored."""
    for number, line in enumerate(data.split(b"\n")[:-1], start=first):
        try:
            yield number, decode(line)
        except BadNote as bad:
            yield number, bad


def as_of(files: Mapping[str, tuple[bytes, int]]) -> dict[str, Numbered]:
    """Return the notes of a run as of one time, although the run goes on while its files are read.

    ``files``: the bytes read from each file, and the file's size before any file was read. Commits before
    that size count. Notes after it are used only where they belong to these commits.
    """
    seen: dict[str, Numbered] = {}
    later: dict[str, Numbered] = {}
    for name, (data, size) in files.items():
        end = data.rfind(b"\n", 0, size) + 1
        seen[name] = list(lines(data[:end]))
        later[name] = list(lines(data[end:], len(seen[name]) + 1))
    # A round is over when the first worker enters a newer one.
    newest, last = ("", 0), 0
    for notes in seen.values():
        for number, note in _by_round(notes):
            if number > newest:
                newest, last = number, 0
            if number == newest and isinstance(note, CommitNote):
                last = max(last, note.step)
    for name, notes in later.items():
        before = next((n for n, _ in reversed(list(_by_round(seen[name])))), ("", 0))
        for i, (number, note) in enumerate(_by_round(notes, before)):
            if number > newest:
                break
            if (
                number < newest
                or isinstance(note, BadNote | EntryNote | BatchNote | Gap)
                or note.step <= last
            ):
                seen[name].append(notes[i])
    return seen


def _by_round(
    notes: Numbered, number: tuple[str, int] = ("", 0)
) -> Iterator[tuple[tuple[str, int], Note | BadNote]]:
    for _, note in notes:
        if isinstance(note, EntryNote):
            number = note.series, note.round
        yield number, note


# ---------------------------------------------------------------- many numbers in few characters


def pack(numbers: Iterable[int]) -> str:
    """Return the numbers as base64 of their differences, with a variable number of bytes for each."""
    packed = bytearray()
    before = 0
    for number in numbers:
        step = number - before
        before = number
        rest = step << 1 if step >= 0 else (-step << 1) - 1
        while rest > 0x7F:
            packed.append(rest & 0x7F | 0x80)
            rest >>= 7
        packed.append(rest)
    return base64.b64encode(packed).decode()


def unpack(text: str) -> Sequence[int]:
    """Return the numbers that ``pack`` packed. Raises BadNote."""
    numbers = []
    number = rest = shift = 0
    try:
        packed = base64.b64decode(text, validate=True)
    except ValueError:
        raise BadNote(f"not packed numbers: {text[:40]!r}") from None
    for byte in packed:
        rest |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            number += rest >> 1 if not rest & 1 else -((rest + 1) >> 1)
            numbers.append(number)
            rest = shift = 0
    if shift:
        raise BadNote(f"not packed numbers: {text[:40]!r}")
    return numbers
