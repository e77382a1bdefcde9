"""Cleanup after an agent that was killed together with its warden.

The agent's folder in shared memory names its owner. When the owner has exited, the next agent of the same
user kills the processes that the owner's workers left, and removes the folder. The environment of these
processes names a page in the folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

import psutil

from elasticd.procs.linux import kill_tree, started_at

_NAME = re.compile(r"elasticd-(\d+)-(\d+)-(\d+)-.+")


def make_owned_dir(place: str | None, variable: str) -> Path:
    """Make a folder that only this user may enter, after a sweep of ``place`` (None: the temporary folder).

    ``variable``: the environment variable of workers that names a file in the folder. Raises OSError if
    nothing can be written.
    """
    place = place or tempfile.gettempdir()
    sweep(Path(place), variable)
    pid = os.getpid()
    return Path(tempfile.mkdtemp(prefix=f"elasticd-{_namespace()}-{pid}-{started_at(pid)}-", dir=place))


def sweep(place: Path, variable: str) -> None:
    """Remove the folders whose owner has exited, and kill the remaining processes of the owner's workers."""
    with contextlib.suppress(OSError):
        for folder in list(place.iterdir()):
            name = _NAME.fullmatch(folder.name)
            # The processes of another PID namespace are invisible here, so its folders stay.
            if name is None or int(name[1]) != _namespace():
                continue
            pid, started = int(name[2]), int(name[3])
            with contextlib.suppress(OSError):
                found = folder.lstat()
                if found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode) and started_at(pid) != started:
                    _kill_marked(f"{folder}/", variable)
                    shutil.rmtree(folder, ignore_errors=True)


def _kill_marked(prefix: str, variable: str) -> None:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # has exited, or belongs to another user
            if process.environ().get(variable, "").startswith(prefix):
                kill_tree(process.pid)


def _namespace() -> int:
    """Return the number of this process's PID namespace, which psutil does not report; 0 if unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
