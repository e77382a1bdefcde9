"""The registry of this machine's standalone runs and their embedded etcds.

The registry is a folder that only this user can write to, with one small JSON file per job. ``elasticd
status`` finds a run without ``--etcd`` there. A file whose run has ended is stale: it is removed, together
with the data that a killed run may have left. Containers may share the folder but cannot see each other's
processes, so file names contain the PID namespace.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from urllib.parse import quote

import msgspec

from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.names import check_name

_NAME_MAX = 160  # characters of a job's name in the name of its file
_DATA_PREFIX = "elasticd-etcd-"  # of embedded.Embedded's folders; no other folder is ever removed


@dataclass(frozen=True, slots=True)
class StandaloneRun:
    """A standalone run. ``pid``: its etcd, which may be restarted. ``owner``: the process that registered the
    run, and whose end is the run's end. ``owner_started`` (clock ticks since boot) distinguishes it from a
    later process with the same pid. ``started``: seconds since the epoch. ``folder``: the data of its
    etcd."""

    job: str
    endpoint: str
    pid: int
    started: float
    folder: str
    owner: int = 0
    owner_started: int = 0

    @property
    def access(self) -> EtcdAccess:
        return EtcdAccess(endpoints=(self.endpoint,))


_STANDALONES = msgspec.json.Decoder(StandaloneRun)


def registry_folder() -> Path:
    """Return ``$XDG_RUNTIME_DIR/elasticd``, else ``/tmp/elasticd-<uid>``, made if missing.

    Raises PermissionError, with one sentence, if other users could have written to the folder.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = (
        Path(runtime, "elasticd")
        if runtime and os.access(runtime, os.W_OK | os.X_OK)
        else Path(tempfile.gettempdir(), f"elasticd-{os.getuid()}")
    )
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must be a folder that belongs to you and that only you may enter (mode 0700); "
            "remove it, or set XDG_RUNTIME_DIR to a folder of your own"
        )
    return folder


def register(
    job: str, endpoint: str, pid: int, started: float, folder: Path, *, owner: int | None = None
) -> None:
    """Register a job's embedded etcd for as long as ``owner`` (default: this process) lives. Call again after
    a restart of the etcd.

    Raises FileExistsError, with one sentence, if a live run of that name is registered on this machine.
    """
    check_name(job, "job")
    other = find(job)
    if other is not None and other.folder != str(folder):
        raise FileExistsError(f"a standalone run named {job!r} is running on this machine already")
    owner = os.getpid() if owner is None else owner
    run = StandaloneRun(job, endpoint, pid, started, str(folder), owner, _start_of(owner))
    path = _path(job)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.touch(mode=0o600)
    fresh.write_bytes(msgspec.json.encode(run))
    fresh.replace(path)


def unregister(job: str, folder: Path) -> None:
    """Remove the run's file, unless the file belongs to another run."""
    found = _read(_path(job))
    if found is not None and found.folder == str(folder):
        _path(job).unlink(missing_ok=True)


def find(job: str) -> StandaloneRun | None:
    """Return the live standalone run of that name, or None."""
    return next((run for run in standalone_runs() if run.job == job), None)


def standalone_runs() -> list[StandaloneRun]:
    """Return all live runs of this user on this machine (in this container), oldest first."""
    found = []
    for path in registry_folder().glob(f"{_namespace()}-*.json"):
        run = _read(path)
        if run is None:
            continue
        if _start_of(run.owner) == run.owner_started != 0:
            found.append(run)
        else:
            path.unlink(missing_ok=True)
            _remove_data(Path(run.folder))
    return sorted(found, key=lambda run: run.started)


def _path(job: str) -> Path:
    name = quote(job, safe="")
    if len(name) > _NAME_MAX:  # of characters that take many bytes each
        name = f"{name[:_NAME_MAX]}-{blake2b(job.encode(), digest_size=8).hexdigest()}"
    return registry_folder() / f"{_namespace()}-{name}.json"


def _namespace() -> int:
    """Return the number of this process's PID namespace, which psutil does not report; 0 if unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _read(path: Path) -> StandaloneRun | None:
    try:
        return _STANDALONES.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return None  # just removed, or not written by elasticd


def _start_of(pid: int) -> int:
    """When a live process started, in clock ticks since boot; 0 if there is none (or a zombie). psutil's
    ``create_time`` moves when the machine's clock is set, and a live run would count as dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def _remove_data(folder: Path) -> None:
    """Remove the data of a killed run. Both name and owner of the folder are checked."""
    with suppress(OSError):
        found = folder.lstat()
        if (
            folder.name.startswith(_DATA_PREFIX)
            and stat.S_ISDIR(found.st_mode)
            and found.st_uid == os.getuid()
        ):
            shutil.rmtree(folder, ignore_errors=True)
