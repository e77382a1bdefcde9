"""The files that workers write in ``elasticd run --debug``, found and read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from elasticd.data.debugrecords import GROUP, NOTES, RankRecords, rank_records, tail

NOTES_MAX, CALLS_MAX, GROUPS_MAX = 40, 16, 8  # of a rank, in ``tails``: up to 140 kB
TAILS_MAX = 512 << 10  # characters that ``tails`` returns: etcd takes 1.5 MiB


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
    """Return the ends of the files of a round, of each rank: of its notes first, then of its groups. They are
    shorter if there are many ranks. Empty if even the shortest are too long."""
    files = list(_files(folder))
    for share in (1, 2, 4, 8, 16):
        found = tuple(
            (
                tail(notes, NOTES_MAX // share),
                *(tail(group, CALLS_MAX // share) for group in groups[-GROUPS_MAX:]),
            )
            for notes, *groups in files
        )
        if sum(len(text) for rank in found for text in rank) <= TAILS_MAX:
            return found
    return ()


def read_tails(ranks: Sequence[Sequence[str]]) -> list[RankRecords]:
    """Return the records in what ``tails`` returned."""
    found = (rank_records(of[0].encode(), [group.encode() for group in of[1:]]) for of in ranks if of)
    return [one for one in found if one is not None]


def _files(folder: Path) -> Iterator[list[bytes]]:
    """Yield the contents of the files of each rank: its notes first, then its groups, the oldest first."""
    notes = {path.stem: _content(path) for path in folder.glob(f"rank-*{NOTES}")}
    for rank, content in notes.items():
        groups = sorted(folder.glob(f"{rank}{GROUP}*"), key=lambda path: (len(path.name), path.name))
        yield [content, *map(_content, groups)]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
