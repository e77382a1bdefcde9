"""Reads what the workers of a run noted for an audit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from elasticd.core.auditlog import FOLDER, SUFFIX, BadNote, Note, lines


def read(folders: Iterable[Path]) -> dict[str, list[tuple[int, Note | BadNote]]]:
    """The notes in these runs' folders (or in their ``audit`` folders), by file. Raises OSError."""
    found = {}
    for folder in folders:
        place = folder / FOLDER if (folder / FOLDER).is_dir() else folder
        for path in sorted(place.glob(f"*{SUFFIX}")):
            if path.name != "events.jsonl":
                found[str(path)] = list(lines(path.read_bytes()))
    return found
