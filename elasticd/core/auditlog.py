"""What a worker notes for an audit, a line of JSON each: what it took, what was committed.

A line says what it says of the round that the last ``entered`` in its file names. A worker notes what it
has taken before anybody can commit it, so of every committed step there is a note of all its workers,
however they died.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VERSION = 1
FOLDER = "audit"  # in the folder of a run
SUFFIX = ".jsonl"
VARIABLE = "ELASTICD_AUDIT_FOLDER"  # where a worker finds that folder
EVERY = "ELASTICD_AUDIT_EVERY"  # after how many steps it notes a digest of the weights
SERIES = "ELASTICD_AUDIT_SERIES"


class BadNote(ValueError):
    """That is no note of a worker's; says what it was."""


@dataclass(frozen=True, slots=True)
class EntryNote:
    """A worker takes part in a round, with ``step`` steps committed and the data at that position.

    ``series`` tells apart, in order of time, rounds of one number: those of an etcd that was thrown away
    and its successor. ``data``: what the data says of itself, and None where the State has none.
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
class Took:
    """What this worker has fetched of one global batch, and what it lost by it.

    ``step``: the first that was not committed then; ``turn``: how many batches came before since. ``first``
    and ``samples``: where the global batch begins in the epoch, and its size. ``parts``: of each part where
    it begins in the batch, how many samples it has, and its loss. ``ids``: packed; those really fetched.
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
    """So many steps are committed; ``covers``: how many of them by this, maybe none."""

    step: int
    covers: int = 1

    @property
    def first(self) -> int:
        """The first of them."""
        return self.step - max(1, self.covers) + 1


@dataclass(frozen=True, slots=True)
class Weights:
    """The digest of what has been learned after so many steps."""

    step: int
    digest: str


@dataclass(frozen=True, slots=True)
class Gap:
    """So many notes before this one could not be written, and why; those of ``step`` on are there again."""

    step: int
    notes: int
    why: str


Note = EntryNote | Took | CommitNote | Weights | Gap


def encode(note: Note) -> bytes:
    """One line, newline included."""
    said: dict[str, Any]
    match note:
        case EntryNote():
            said = {name: getattr(note, name) for name in EntryNote.__slots__}
            said = {"is": "entered", "v": VERSION, **said, "data": note.data and dict(note.data)}
        case Took():
            parts = [[start, count, loss.hex()] for start, count, loss in note.parts]
            said = {"is": "took", **{name: getattr(note, name) for name in Took.__slots__}, "parts": parts}
        case CommitNote(step, covers):
            said = {"is": "committed", "step": step, "covers": covers}
        case Weights(step, digest):
            said = {"is": "weights", "step": step, "digest": digest}
        case Gap(step, notes, why):
            said = {"is": "gap", "step": step, "notes": notes, "why": why}
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Note:
    """Raises BadNote. Fields that this version does not know are passed over."""
    try:
        said = json.loads(line)
        match said:
            case {"is": "entered", "v": int(version)}:
                if version != VERSION:
                    raise BadNote(f"a note of version {version}, and this elasticd reads {VERSION}")
                return _checked(EntryNote(**{name: said[name] for name in EntryNote.__slots__}))
            case {"is": "took", "parts": list(parts)}:
                exact = tuple((int(start), int(count), float.fromhex(loss)) for start, count, loss in parts)
                return _checked(Took(**{**{name: said[name] for name in Took.__slots__}, "parts": exact}))
            case {"is": "committed", "step": int(step)}:
                covers = said.get("covers", 1)
                if type(covers) is not int or not 0 <= covers <= step:
                    raise ValueError(covers)
                return CommitNote(step, covers)
            case {"is": "weights", "step": int(step), "digest": str(digest)}:
                return Weights(step, digest)
            case {"is": "gap", "step": int(step), "notes": int(notes), "why": str(why)}:
                return Gap(step, notes, why)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, BadNote):
            raise
    raise BadNote(f"not a note for an audit: {line[:80]!r}")


def _checked(note: EntryNote | Took) -> EntryNote | Took:
    texts = {"series", "ids"}
    for name in set(note.__slots__) - {"data", "parts"}:
        if type(getattr(note, name)) is not (str if name in texts else int):
            raise TypeError(name)
    return note


Numbered = list[tuple[int, Note | BadNote]]


def lines(data: bytes, first: int = 1) -> Iterator[tuple[int, Note | BadNote]]:
    """The notes in a file, with their lines' numbers. What comes after the last newline was cut off when
    its writer died, and is none."""
    for number, line in enumerate(data.split(b"\n")[:-1], start=first):
        try:
            yield number, decode(line)
        except BadNote as bad:
            yield number, bad


def as_of(files: Mapping[str, tuple[bytes, int]]) -> dict[str, Numbered]:
    """The notes of a run as they stood at one time, though it goes on while its files are read.

    ``files``: what was read of each, and the size that it had before any of them was read. What is
    committed there is counted; for what was taken by then, the later notes are looked at, too.
    """
    seen: dict[str, Numbered] = {}
    later: dict[str, Numbered] = {}
    for name, (data, size) in files.items():
        end = data.rfind(b"\n", 0, size) + 1
        seen[name] = list(lines(data[:end]))
        later[name] = list(lines(data[end:], len(seen[name]) + 1))
    # Rounds before the newest were over when its first worker entered it.
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
            if number < newest or isinstance(note, BadNote | EntryNote | Took | Gap) or note.step <= last:
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
    """Differences to the one before, in as many bytes as they need."""
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
    """Raises BadNote."""
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
