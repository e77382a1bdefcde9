"""Harnesses: the same tests run with a real etcd and with the simulated one.

A harness makes stores (one for each agent of a job) and faults, and knows how to wait. A test collects the
calls of its callbacks in an ``Inbox`` of the harness.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

from elasticd.core.ports import Store
from elasticd.etcd.embedded import Embedded
from elasticd.etcd.store import EtcdStore
from tests.etcd.cluster import freeze

TTL_S = 2.0
PATIENCE_S = 60.0  # a machine may be busy; no test waits longer than it must


class Inbox(list[Any]):
    """Collects the calls of a callback: pass the inbox as the callback."""

    def __init__(self, changed: Callable[[], None]) -> None:
        super().__init__()
        self._changed = changed

    def __call__(self, what: Any) -> None:
        self.append(what)
        self._changed()


class Harness(Protocol):
    def store(self, agent: str) -> Store:
        """Return the store of this agent: the same object each time."""

    def inbox(self) -> Inbox: ...

    def until(self, holds: Callable[[], Any]) -> None:
        """Let time pass until the condition holds. Fail if that takes too long."""

    def close(self, agent: str) -> None:
        """Let the agent leave in good order."""

    def expire(self, agent: str) -> None:
        """Let etcd drop the agent's lease. The agent lives on."""

    def outage(self) -> None:
        """Kill etcd."""

    def hang(self) -> None:
        """Stop etcd: it accepts connections and answers nothing."""

    def restore(self) -> None:
        """Bring etcd back, with everything that it had."""


class RealHarness:
    def __init__(self) -> None:
        self.etcd = Embedded()
        self.etcd.start()
        self._stores: dict[str, EtcdStore] = {}
        self._changed = threading.Condition()

    def store(self, agent: str) -> EtcdStore:
        if agent not in self._stores:
            self._stores[agent] = EtcdStore(self.etcd.access, "job", TTL_S)
        return self._stores[agent]

    def inbox(self) -> Inbox:
        def changed() -> None:
            with self._changed:
                self._changed.notify_all()

        return Inbox(changed)

    def until(self, holds: Callable[[], Any]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, PATIENCE_S), f"not within {PATIENCE_S} s"

    def close(self, agent: str) -> None:
        self._stores.pop(agent).close()

    def expire(self, agent: str) -> None:
        from elasticd.etcd.blocking_client import Client

        lease = self._stores[agent]._lease
        assert lease is not None and lease.id
        with Client(self.etcd.access) as client:
            client.revoke(lease.id)

    def outage(self) -> None:
        os.kill(self.etcd.pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while self.etcd.alive:
            assert time.monotonic() < deadline

    def hang(self) -> None:
        freeze(self.etcd.pid)

    def restore(self) -> None:
        if self.etcd.alive:
            os.kill(self.etcd.pid, signal.SIGCONT)
        else:
            self.etcd.start()

    def end(self) -> None:
        if self.etcd.alive:
            os.kill(self.etcd.pid, signal.SIGCONT)
        try:
            for store in self._stores.values():
                store.close()
        finally:
            self.etcd.stop()


class SimulatedHarness:
    def __init__(self) -> None:
        from tests.sim.clock import Clock
        from tests.sim.store import SimEtcd, SimStore

        self.clock = Clock(seed=1)
        self.etcd = SimEtcd(self.clock)
        self._stores: dict[str, SimStore] = {}

    def store(self, agent: str) -> Store:
        from tests.sim.host import SimHost
        from tests.sim.store import Network, SimStore

        if agent not in self._stores:
            self._stores[agent] = SimStore(self.etcd, SimHost(self.clock, agent), Network(), ttl_s=TTL_S)
        return self._stores[agent]

    def inbox(self) -> Inbox:
        return Inbox(lambda: None)

    def until(self, holds: Callable[[], Any]) -> None:
        limit = self.clock.now() + PATIENCE_S
        assert holds() or self.clock.run(until=limit, done=holds), f"not within {PATIENCE_S} simulated s"

    def close(self, agent: str) -> None:
        self._stores.pop(agent).close()

    def expire(self, agent: str) -> None:
        self.etcd.revoke(self._stores[agent]._lease)

    def outage(self) -> None:
        self.etcd.kill()

    def hang(self) -> None:
        self.etcd.hang()

    def restore(self) -> None:
        self.etcd.recover()

    def end(self) -> None:
        pass


@pytest.fixture(params=["real", "simulated"])
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    built = RealHarness() if request.param == "real" else SimulatedHarness()
    try:
        yield built
    finally:
        built.end()
