"""Handlers as torchrun makes them, and real torchrun agents, for tests to drive."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

from elasticd.torchrun import create
from elasticd.torchrun.handler import EtcdV3RendezvousHandler
from tests.forkserver import TORCHRUN, Forked

PATIENCE_S = 120.0
TRAIN = Path(__file__).parent / "programs" / "train.py"


class Nodes:
    """Handlers of one run id in this process, each with a thread to join on."""

    def __init__(self, endpoint: str, run_id: str) -> None:
        self._endpoint = endpoint
        self._run_id = run_id
        self._threads = ThreadPoolExecutor(32)
        self.handlers: list[EtcdV3RendezvousHandler] = []

    def new(self, low: int = 1, high: int = 1, **conf: object) -> EtcdV3RendezvousHandler:
        conf = {"settle_s": 0, "ttl": 2, **conf}
        handler = create(RendezvousParameters("etcd-v3", self._endpoint, self._run_id, low, high, **conf))
        assert isinstance(handler, EtcdV3RendezvousHandler)
        self.handlers.append(handler)
        return handler

    def join(self, *handlers: EtcdV3RendezvousHandler) -> list[Future[RendezvousInfo]]:
        return [self._threads.submit(handler.next_rendezvous) for handler in handlers]

    def joined(self, *handlers: EtcdV3RendezvousHandler) -> list[RendezvousInfo]:
        return [future.result(PATIENCE_S) for future in self.join(*handlers)]

    def fill(self, *handlers: EtcdV3RendezvousHandler) -> list[RendezvousInfo]:
        """Join as torchrun's agents do, again with each newcomer, until all of them are in one world."""

        def join(handler: EtcdV3RendezvousHandler) -> RendezvousInfo:
            while (info := handler.next_rendezvous()).world_size < len(handlers):
                until(lambda: handler.num_nodes_waiting() > 0, handler)
            return info

        return [future.result(PATIENCE_S) for future in [self._threads.submit(join, h) for h in handlers]]

    def close(self) -> None:
        for handler in self.handlers:
            handler._leave()
        self._threads.shutdown(wait=True, cancel_futures=True)


def until(holds: Callable[[], bool], handler: EtcdV3RendezvousHandler) -> None:
    """Wait until the condition holds. Check it whenever the handler has seen a change in etcd."""
    membership = handler._membership
    assert membership is not None
    with membership.changed:
        assert membership.changed.wait_for(holds, PATIENCE_S)


class Agent:
    """One torchrun, and the output of it and its workers."""

    def __init__(
        self, endpoint: str, run_id: str, nnodes: str, *args: str, logs: Path, nproc: int, restarts: int
    ) -> None:
        self._said: list[str] = []
        self._news = threading.Condition()
        out, theirs = os.pipe()
        self.process = Forked(
            [
                "torchrun",
                *("--rdzv-backend", "etcd-v3", "--rdzv-endpoint", endpoint, "--rdzv-id", run_id),
                *("--rdzv-conf", "ttl=3,settle_s=0", "--nnodes", nnodes, "--nproc-per-node", str(nproc)),
                *("--max-restarts", str(restarts), "--log-dir", str(logs), str(TRAIN), *args),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=logs,
            stdout=theirs,
            stderr=theirs,
            entry=TORCHRUN,
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, args=(out,), daemon=True)
        self._reader.start()

    def _read(self, fd: int) -> None:
        with open(fd) as said:
            for line in said:
                with self._news:
                    self._said.append(line)
                    self._news.notify_all()

    @property
    def said(self) -> str:
        with self._news:
            return "".join(self._said)

    def hears(self, pattern: str, times: int = 1) -> list[re.Match[str]]:
        """Wait until the agent has printed this text so often."""
        found: list[re.Match[str]] = []

        def enough() -> bool:
            found[:] = re.finditer(pattern, "".join(self._said))
            return len(found) >= times

        with self._news:
            assert self._news.wait_for(enough, PATIENCE_S), f"no {pattern!r} in:\n{''.join(self._said)}"
        return found

    def joins(self, world: int, times: int = 1) -> int:
        """Wait until a worker of this agent has joined a world of this size so often. Return the worker's
        pid."""
        return int(self.hears(rf"<joined rank=\d+ world={world} pid=(\d+)", times)[times - 1][1])

    def worlds(self, world: int) -> int:
        """Return how often a worker of this agent has joined a world of this size so far."""
        return self.said.count(f" world={world} pid=")

    def rank_in(self, world: int) -> int:
        return int(self.hears(rf"<joined rank=(\d+) world={world} ")[0][1])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ends(self) -> int:
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"torchrun did not end:\n{self.said}")

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
        self._reader.join(10)


class Agents:
    def __init__(self, endpoint: str, run_id: str, folder: Path) -> None:
        self._folder = folder
        self._endpoint = endpoint
        self._run_id = run_id
        self._all: list[Agent] = []
        self.stop = folder / "stop"

    def start(self, nnodes: str, mode: str = "train", *args: str, nproc: int = 1, restarts: int = 3) -> Agent:
        asked = (nnodes, mode, str(self.stop), *args)
        agent = Agent(self._endpoint, self._run_id, *asked, logs=self._folder, nproc=nproc, restarts=restarts)
        self._all.append(agent)
        return agent

    def close(self) -> None:
        for agent in self._all:
            agent.kill()


def gone(pid: int) -> None:
    """Wait until a process has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([pidfd], [], [], PATIENCE_S)[0], f"process {pid} still runs"
    finally:
        os.close(pidfd)


def runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
