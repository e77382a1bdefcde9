"""Find the folders of this machine's runs by the name of the job.

``<state>/runs/<job>/<when it began>-<node>`` is a link to the folder of one agent's logs and events, which
may lie anywhere (``--log-dir``).
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
    """One agent's folder. ``began_at``: seconds since the epoch."""

    began_at: float
    node: str
    folder: Path


def state_dir() -> Path:
    """Return the folder for state that outlives a run.

    It is ``$XDG_STATE_HOME/elasticd``, or a folder in the temporary directory if the home is not writable.
    Raises PermissionError if that folder belongs to another user.
    """
    with suppress(OSError, RuntimeError):  # Path.home raises RuntimeError where there is no home
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
    """Link the folder under the job's name. Raises OSError."""
    place = job_folder(state, job)
    _remove_dead_links(place.parent)
    place.mkdir(parents=True, exist_ok=True)
    link = place / f"{began_at:.3f}-{node}"
    with suppress(FileExistsError):
        os.symlink(folder.resolve(), link, target_is_directory=True)
    for old in sorted(place.iterdir())[:-RUNS_KEPT]:
        with suppress(OSError):
            old.unlink()


def _remove_dead_links(jobs: Path) -> None:
    """Remove the links whose folder was deleted. Every run may have a new job name, so old links would pile
    up."""
    for link in jobs.glob("*/*"):
        with suppress(OSError):
            if not link.exists():
                link.unlink()
                link.parent.rmdir()  # fails unless the folder is empty


def of_job(state: Path, job: str) -> list[KnownRun]:
    """Return the runs of a job whose folders exist, oldest first."""
    found = []
    with suppress(OSError):
        for link in sorted(job_folder(state, job).iterdir()):
            began, _, node = link.name.partition("-")
            with suppress(ValueError):
                if link.is_dir():
                    found.append(KnownRun(float(began), node, link.resolve()))
    return found


def jobs(state: Path) -> list[str]:
    """Return the names of the known jobs, the most recent last."""
    place = state / "runs"
    with suppress(OSError):
        return [f.name for f in sorted(place.iterdir(), key=lambda f: f.stat().st_mtime)]
    return []


def job_folder(state: Path, job: str) -> Path:
    return state / "runs" / job
