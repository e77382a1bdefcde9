"""Where the runs on this machine keep what they write: a link per agent, by the name of its job.

``<state>/runs/<job>/<when it began>-<node>`` leads to the folder of its logs and events, wherever
``--log-dir`` may have put that.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

RUNS_KEPT = 50


@dataclass(frozen=True, slots=True)
class KnownRun:
    """One agent's part. ``began_at``: seconds since the epoch."""

    began_at: float
    node: str
    folder: Path


def state_dir() -> Path:
    """Where runs keep what outlives them: ``$XDG_STATE_HOME/elasticd``, or a temporary folder where
    there is no home to write to. Raises PermissionError where that is somebody else's."""
    with suppress(OSError, RuntimeError):  # the latter where nobody knows of a home
        home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        folder = Path(home) / "elasticd"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    folder = Path(tempfile.gettempdir()) / f"elasticd-state-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is not yours; set XDG_STATE_HOME to a folder that is")
    return folder


def note(state: Path, job: str, node: str, began_at: float, folder: Path) -> None:
    """Have the folder found by the job's name from now on. Raises OSError."""
    place = jobs_place(state, job)
    _forget_those_gone(place.parent)
    place.mkdir(parents=True, exist_ok=True)
    link = place / f"{began_at:.3f}-{node}"
    with suppress(FileExistsError):
        os.symlink(folder.resolve(), link, target_is_directory=True)
    for old in sorted(place.iterdir())[:-RUNS_KEPT]:
        with suppress(OSError):
            old.unlink()


def _forget_those_gone(jobs: Path) -> None:
    """Runs whose folder was removed since: jobs are named anew each time, and would add up."""
    for link in jobs.glob("*/*"):
        with suppress(OSError):
            if not link.exists():
                link.unlink()
                link.parent.rmdir()  # if it was the last


def of_job(state: Path, job: str) -> list[KnownRun]:
    """Oldest first, without those whose folder is gone."""
    found = []
    with suppress(OSError):
        for link in sorted(jobs_place(state, job).iterdir()):
            began, _, node = link.name.partition("-")
            with suppress(ValueError):
                if link.is_dir():
                    found.append(KnownRun(float(began), node, link.resolve()))
    return found


def jobs(state: Path) -> list[str]:
    """The jobs of which something is known, the most recent last."""
    place = state / "runs"
    with suppress(OSError):
        return [f.name for f in sorted(place.iterdir(), key=lambda f: f.stat().st_mtime)]
    return []


def jobs_place(state: Path, job: str) -> Path:
    return state / "runs" / job
