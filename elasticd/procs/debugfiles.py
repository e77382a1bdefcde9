"""The files that workers write in ``elasticd run --debug``, found and read."""

from __future__ import annotations

import contextlib
from pathlib import Path

from elasticd.data.debugrecords import GROUP, NOTES, RankRecords, rank_records


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
    notes = {path.stem: _content(path) for path in folder.glob(f"rank-*{NOTES}")}
    found = []
    for rank, content in notes.items():
        groups = [_content(path) for path in sorted(folder.glob(f"{rank}{GROUP}*"))]
        records = rank_records(content, groups)
        if records is not None:
            found.append(records)
    return sorted(found, key=lambda one: one.rank)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
