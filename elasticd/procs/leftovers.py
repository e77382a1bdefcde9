"""What an agent leaves when it and its warden are killed at one stroke, and nobody was left to tidy up.

Its shared memory names its owner, so that the next agent of the same user can tell that the owner is
gone, end what its workers had started (known by the page in their environment), and remove it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

from elasticd.procs.linux import kill_tree, started_at, variable_of

_NAME = re.compile(r"elasticd-(\d+)-(\d+)-(\d+)-.+")


def make_owned_dir(place: str | None, variable: str) -> Path:
    """Make a folder only its owner may enter, after sweeping the place (None: the temporary folder).

    ``variable``: the one in workers' environments that names a file in the folder.
    Raises OSError where nothing can be written.
    """
    place = place or tempfile.gettempdir()
    sweep(Path(place), variable)
    pid = os.getpid()
    return Path(tempfile.mkdtemp(prefix=f"elasticd-{_namespace()}-{pid}-{started_at(pid)}-", dir=place))


def sweep(place: Path, variable: str) -> None:
    """Remove the folders of owners that are gone, and end what is left of their workers."""
    with contextlib.suppress(OSError):
        for folder in list(place.iterdir()):
            name = _NAME.fullmatch(folder.name)
            # Another namespace's processes cannot be seen from here, so nothing is known of them.
            if name is None or int(name[1]) != _namespace():
                continue
            pid, started = int(name[2]), int(name[3])
            with contextlib.suppress(OSError):
                found = folder.lstat()
                if found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode) and started_at(pid) != started:
                    _end_users(f"{folder}/", variable)
                    shutil.rmtree(folder, ignore_errors=True)


def _end_users(prefix: str, variable: str) -> None:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and variable_of(int(entry), variable).startswith(prefix):
            kill_tree(int(entry))


def _namespace() -> int:
    """Tells the PID namespace we are in; 0 if the kernel does not say."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
