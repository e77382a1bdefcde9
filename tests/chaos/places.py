"""Where a job runs: nodes, each in namespaces of its own, on one bridge, and three etcds beside them. The
network is the one of tests/k8s; the etcds are those of tests/etcd.

A node has its own processes, network, shared memory, temporary folder and, on request, its own clock. Nodes
share the files below the run's folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from tests.k8s.network import UNDER_US, Network

SPACES: Final = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
# Process 1 of a node. It reaps processes whose parent has ended. All processes of the node end with it.
_INIT: Final = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
print("made", flush=True)
while True:
    signal.sigwait([signal.SIGCHLD])
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""
_OWN_PLACES: Final = (
    'mount -t tmpfs none /dev/shm && mount -t tmpfs none "$0" && mkdir "$0/run" "$0/tmp" && exec "$@"'
)
_LISTENS: Final = "0A"  # in /proc/net/tcp


class Host:
    """A network namespace with an address on the bridge."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.address = network.next_address()
        self.holder = subprocess.Popen(
            [*UNDER_US, "unshare", "--net", "sh", "-c", "echo made; exec sleep infinity"],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self.holder.pid
        self._await()

    def _await(self) -> None:
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline() == b"made\n", "a namespace cannot be made"
        self.network.plug(self.pid, self.address)

    @property
    def inside(self) -> list[str]:
        """The words that begin a command to be run on the host."""
        program = shutil.which("nsenter")
        assert program is not None
        return [program, "-t", str(self.pid), "-n"]

    def close(self) -> None:
        self.holder.kill()
        self.holder.wait()
        assert self.holder.stdout is not None
        self.holder.stdout.close()


class Node(Host):
    """A machine. ``ahead_s``: how far its monotonic clock is ahead. ``folder``: an empty folder whose content
    only this node sees."""

    def __init__(self, name: str, network: Network, folder: Path, ahead_s: int = 0) -> None:
        self.name, self.network, self.folder = name, network, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.address = network.next_address()
        clock = ["--time", f"--monotonic={ahead_s}", f"--boottime={ahead_s}"] if ahead_s else []
        init = ["sh", "-c", _OWN_PLACES, str(folder), sys.executable, "-I", "-S", "-c", _INIT]
        self.holder = subprocess.Popen(
            [*UNDER_US, "unshare", *SPACES, *clock, *init], stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline() == b"made\n", "a node cannot be made"
        (self.pid,) = children(self.holder.pid)
        network.plug(self.pid, self.address)
        self._space = os.readlink(f"/proc/{self.pid}/ns/pid")

    def __repr__(self) -> str:
        return f"<node {self.name} {self.address}>"

    @property
    def inside(self) -> list[str]:
        return [*super().inside[:-1], "-a"]

    def processes(self) -> list[int]:
        """Return all processes of the node but process 1 and zombies, by this machine's pids."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if folder.name.isdecimal() and os.readlink(folder / "ns" / "pid") == self._space:
                    pid = int(folder.name)
                    # A process that was killed while its parent is stopped stays a zombie until the parent
                    # continues.
                    if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                        found.append(pid)
        return [pid for pid in found if pid != self.pid]

    def numbered(self, inside: int) -> int | None:
        """Return the process that has this pid inside the node."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                (line,) = (line for line in status.splitlines() if line.startswith("NSpid:"))
                if int(line.split()[-1]) == inside:
                    return pid
        return None

    @property
    def own(self) -> list[Path]:
        """Return the node's shared memory, as a path on this machine."""
        root = Path(f"/proc/{self.pid}/root")
        mine = root / str(self.folder).lstrip("/")
        return [root / "dev" / "shm", mine / "run", mine / "tmp"]

    def left(self) -> list[str]:
        """Return what is left on the node and should be gone, once its agents have ended."""
        found = [f"process {described(pid)}" for pid in self.processes()]
        for place in self.own:
            found += [f"file {path}" for path in place.rglob("*") if not path.is_dir()]
        for table in ("tcp", "tcp6"):
            lines = Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:]
            found += [f"port {line.split()[1]}" for line in lines if line.split()[3] == _LISTENS]
        sockets = Path(f"/proc/{self.pid}/net/unix").read_text().splitlines()[1:]
        found += [f"socket {line.split()[7]}" for line in sockets if len(line.split()) > 7]
        return found


@dataclass
class Agent:
    """One ``elasticd run`` on a node. Its output goes to the files ``out`` and ``err``."""

    node: Node
    out: Path
    err: Path
    process: subprocess.Popen[bytes]  # nsenter, which ends when the agent ends
    pid: int
    pidfd: int
    drained: bool = False
    hurt: bool = False  # the test killed the agent, so the exit code says nothing
    _events: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0

    @classmethod
    def start(cls, node: Node, argv: Sequence[str], env: dict[str, str], cwd: Path, said: Path) -> Agent:
        out, err = said.with_suffix(".out"), said.with_suffix(".err")
        with out.open("wb") as to_out, err.open("wb") as to_err:
            process = subprocess.Popen(
                [*UNDER_US, *node.inside, f"--wd={cwd}", *argv],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=to_out,
                stderr=to_err,
                start_new_session=True,
            )
        while not (found := children(process.pid)):
            assert process.poll() is None, f"nsenter ended: {err.read_text()}"
        return cls(node, out, err, process, found[0], os.pidfd_open(found[0]))

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)
        if number == signal.SIGCONT:  # nsenter has stopped together with its child
            self.process.send_signal(number)

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return the events that it has logged so far."""
        with self.err.open("rb") as file:
            file.seek(self._read)
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                self._read += len(raw)
                with contextlib.suppress(ValueError):
                    said = json.loads(raw)
                    if isinstance(said, dict) and "event" in said:
                        self._events.append(said)
        return self._events

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self.reap()
        os.close(self.pidfd)

    def reap(self) -> None:
        """Reap the dead agent: nsenter may have been stopped together with it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.wait()


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def described(pid: int) -> str:
    try:
        return f"{pid}: " + Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    except OSError:
        return f"{pid}: gone meanwhile"


def environment_of(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(os.fsdecode(word).split("=", 1) for word in raw if b"=" in word)


def tasks(pids: Sequence[int]) -> Iterator[Path]:
    """Return the threads of these processes."""
    for pid in pids:
        with contextlib.suppress(OSError):
            yield from Path(f"/proc/{pid}/task").iterdir()
