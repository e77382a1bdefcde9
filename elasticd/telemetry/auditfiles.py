"""Read the files that the workers of a run wrote for an audit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from elasticd.data.auditnotes import FOLDER, SUFFIX, Numbered, as_of
from elasticd.telemetry.events import COURSE, FILE


def read(folders: Iterable[Path]) -> dict[str, Numbered]:
    """Return the notes by file name. Each folder is a run's folder, or the ``audit`` folder in it. Raises
    OSError."""
    places = [folder / FOLDER if (folder / FOLDER).is_dir() else folder for folder in folders]
    others = (FILE, COURSE)  # a run without an audit has these files as well
    paths = [p for place in places for p in sorted(place.glob(f"*{SUFFIX}")) if p.name not in others]
    sizes = [path.stat().st_size for path in paths]
    return as_of({str(path): (path.read_bytes(), size) for path, size in zip(paths, sizes, strict=True)})
