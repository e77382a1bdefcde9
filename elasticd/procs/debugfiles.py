"""The files that workers write in ``elasticd run --debug``, found and read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from elasticd.data.debugrecords import GROUP, NOTES, RankRecords, rank_records, tail

NOTES_MAX, CALLS_MAX, GROUPS_MAX = 40, 16, 8  # of a rank, in ``tails``: 40 kB


def round_folder(folder: Path, number: int) -> Path:
    """Return the folder with the files of a round."""
    return folder / f"round-{number}"


def changed_at(folder: Path) -> tuple[int, ...]:
    """Return the times of the last writes to a round's files. The times change with each record."""
    with contextlib.suppress(OSError):
        return tuple(path.stat().st_mtime_ns for path in sorted(folder.glob("rank-*")))
    return ()


def read(folder: Path) -> list[RankRecords]:
    """Return the records of a round, in rank order.

    All notes are read before the collectives: a note may say that the script has ended, and no collective
    that was called before may be missed.
    """
    found = (rank_records(notes, groups) for notes, *groups in _files(folder))
    return sorted((one for one in found if one is not None), key=lambda one: one.rank)


def tails(folder: Path) -> tuple[tuple[str, ...], ...]:
    """Return the ends of the files of a round, of each rank: of its notes first, then of its groups."""
    return tuple(
        (tail(notes, NOTES_MAX), *(tail(group, CALLS_MAX) for group in groups[-GROUPS_MAX:]))
        for notes, *groups in _files(folder)
    )


def read_tails(ranks: Sequence[Sequence[str]]) -> list[RankRecords]:
    """Return the records in what ``tails`` returned."""
    found = (rank_records(of[0].encode(), [group.encode() for group in of[1:]]) for of in ranks if of)
    return [one for one in found if one is not None]


def _files(folder: Path) -> Iterator[list[bytes]]:
    """Yield the contents of the files of each rank: its notes first, then its groups."""
    notes = {path.stem: _content(path) for path in folder.glob(f"rank-*{NOTES}")}
    for rank, content in notes.items():
        yield [content, *(_content(path) for path in sorted(folder.glob(f"{rank}{GROUP}*")))]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
