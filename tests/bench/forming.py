"""Time to form a world: light fake agents against one real etcd, beside torch's c10d rendezvous.

Ours are the real agent and leader (``elasticd.daemon.driver``) and the real etcd client; only the
workers and the round's store are left out. Torch's are its real rendezvous handlers. Both run as
many agents in a process, in as many processes: connections are shared within a process on our
side, while each of torch's handlers has its own, as its API wants.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO

from elasticd.core.agent import AgentConfig, AgentState, Identity
from elasticd.core.agent_messages import Tick
from elasticd.core.facts import Exit, Limits, Policy, Spec
from elasticd.core.ports import Assignment, WorkerNews
from elasticd.daemon.driver import Driver
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.blocking_client import Client
from elasticd.etcd.clock import SteadyClock
from elasticd.etcd.store import EtcdLink, EtcdStore
from tests.etcd.cluster import EtcdOnPorts

PROCESSES_MAX = 8


@dataclass(slots=True)
class _NoWorkers:
    """Starts no workers, and notes when the agent would have started them."""

    started: Callable[[], None]

    def listen(self, news: Callable[[WorkerNews], None]) -> None: ...

    def standby(self, assignments: tuple[Assignment, ...], exited: Callable[[int, Exit], None]) -> None: ...

    def leave(
        self, planned: bool, signal: int, grace_s: float, leave_s: float | None, going: bool = False
    ) -> None: ...

    def go_on(self, slots: tuple[int, ...]) -> None: ...

    def start(
        self,
        round_number: int,
        assignments: tuple[Assignment, ...],
        exited: Callable[[int, Exit], None],
        waiting: Collection[int] = (),
    ) -> None:
        self.started()

    def stop(self, signal: int, grace_s: float, slots: tuple[int, ...] | None = None) -> None: ...

    def fence(self, until: float | None) -> None: ...

    def steps(self) -> Mapping[int, int]:
        return {}


class _NoStore:
    def open(self) -> None: ...

    def renew(self) -> int:
        return 1


@dataclass(slots=True)
class _Fleet:
    """Several agents in this process, served by one thread."""

    link: EtcdLink
    job: str
    total: int
    inbox: queue.SimpleQueue[tuple[int, object]] = field(default_factory=queue.SimpleQueue)
    formed: int = 0

    def run(self, first: int, count: int) -> None:
        clock = SteadyClock()
        limits = Limits(self.total, self.total)
        policy = Policy(node_ttl_s=60.0)
        spec = Spec(limits, limits, "fake", "fake", policy)
        drivers: list[Driver] = []
        stores: list[EtcdStore] = []

        def formed() -> None:
            self.formed += 1

        for n in range(count):
            name = f"n{first + n}"
            store = EtcdStore(self.link, self.job, policy.node_ttl_s)
            stores.append(store)
            me = Identity(name, uuid.uuid4().hex, "127.0.0.1", (0,), "bench", os.getpid())
            drivers.append(
                Driver(
                    AgentState(me, spec, AgentConfig(etcd_grace_s=600.0), 1),
                    store=store,
                    procs=_NoWorkers(formed),
                    stores=_NoStore(),
                    assign=lambda round, member: (),
                    assign_standbys=lambda slots: (),
                    process_alive=lambda pid: True,
                    post=lambda event, n=n: self.inbox.put((n, event)),  # type: ignore[misc]
                    say=lambda reason: None,
                )
            )
        for driver in drivers:
            driver.begin()
        while self.formed < count:
            wakes = [d.wake_at for d in drivers if d.wake_at is not None]
            now = clock()
            try:
                n, event = self.inbox.get(timeout=max(0.0, min(wakes) - now) if wakes else None)
                drivers[n].handle(event, clock())  # type: ignore[arg-type]
            except queue.Empty:
                for d in drivers:
                    if d.wake_at is not None and clock() >= d.wake_at:
                        d.handle(Tick(), clock())
        print(json.dumps({"formed_at": time.monotonic()}), flush=True)
        sys.stdin.readline()  # until told: nobody leaves while others still join
        os._exit(0)


def fleet_main(endpoint: str, job: str, total: int, first: int, count: int) -> None:
    link = EtcdLink(EtcdAccess((endpoint,)), SteadyClock())
    with Client(link.access) as client:
        client.check()  # imports done, etcd reached: only the forming is measured
    print("ready", flush=True)
    sys.stdin.readline()
    _Fleet(link, job, total).run(first, count)


def c10d_main(endpoint: str, job: str, total: int, first: int, count: int) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    def join() -> None:
        parameters = RendezvousParameters(
            "c10d", endpoint, job, total, total, local_addr="127.0.0.1", is_host=False, join_timeout=600
        )
        backend, store = create_backend(parameters)
        handler = create_handler(store, backend, parameters)
        handler.next_rendezvous()

    print("ready", flush=True)
    sys.stdin.readline()
    threads = [threading.Thread(target=join, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"formed_at": time.monotonic()}), flush=True)
    sys.stdin.readline()
    os._exit(0)


class Broken(Exception):
    """A process of the fleet has ended by itself, so there is nothing to measure."""


def _require_alive(fleet: Sequence[subprocess.Popen[str]], said: Sequence[IO[str]]) -> None:
    for p, errors in zip(fleet, said, strict=True):
        if p.poll() not in (None, -signal.SIGKILL):  # ours, when the time is over
            errors.seek(0)
            raise Broken(f"a process of the fleet ended with {p.returncode}:\n{errors.read()[-3000:]}")


def _measure(kind: str, endpoint: str, total: int, timeout_s: float) -> float | None:
    """Seconds from the word "go" until the last agent has its world; None after the timeout."""
    with ExitStack() as cleanup:
        return _measured(kind, endpoint, total, timeout_s, cleanup)


def _measured(kind: str, endpoint: str, total: int, timeout_s: float, cleanup: ExitStack) -> float | None:
    processes = min(PROCESSES_MAX, total)
    job = f"form-{uuid.uuid4().hex[:8]}"
    shares = [total // processes + (i < total % processes) for i in range(processes)]
    fleet: list[subprocess.Popen[str]] = []
    said = [cleanup.enter_context(tempfile.TemporaryFile("w+")) for _ in shares]  # noqa: SIM115
    for i, share in enumerate(shares):
        args = (endpoint, job, total, sum(shares[:i]), share)
        call = f"from tests.bench.forming import {kind}; {kind}{args!r}"
        fleet.append(
            subprocess.Popen(
                [sys.executable, "-c", call],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said[i],
                text=True,
            )
        )
    alarm = threading.Timer(timeout_s + 60, lambda: [p.kill() for p in fleet])
    alarm.start()
    try:
        for p in fleet:
            assert p.stdout
            if p.stdout.readline() != "ready\n":
                p.wait()
                _require_alive(fleet, said)
                raise Broken("a process of the fleet did not start in time")
        limit = threading.Timer(timeout_s, lambda: [p.kill() for p in fleet])
        limit.start()
        began = time.monotonic()
        for p in fleet:
            assert p.stdin
            p.stdin.write("go\n")
            p.stdin.flush()
        ends = [p.stdout.readline() for p in fleet if p.stdout]
        limit.cancel()
        if not all(ends):
            for p, end in zip(fleet, ends, strict=True):
                if not end:
                    p.wait()
            _require_alive(fleet, said)
            return None
        return max(float(json.loads(e)["formed_at"]) for e in ends) - began
    finally:
        alarm.cancel()
        for p in fleet:
            p.kill()
            p.wait()
            for stream in (p.stdin, p.stdout):
                if stream:
                    stream.close()


def forming(sizes: list[int], tries: int, c10d_most: int, c10d_timeout_s: float) -> str:
    """Return the median of ``tries`` for each size. torch's back end is measured only once for a size at
    which it takes long."""
    from torch.distributed import TCPStore

    lines = ["time to form a world of so many agents (median)"]
    gave_up = False
    for total in sizes:
        with EtcdOnPorts() as server:
            ours = sorted(
                _measure("fleet_main", server.endpoint, total, 120.0) or float("inf") for _ in range(tries)
            )
        mine = ours[len(ours) // 2]
        text = f"  {total:>5} agents: elasticd {mine:.3f} s"
        if total <= c10d_most and not gave_up:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            theirs: list[float] = []
            for _ in range(tries if total <= 64 else 1):
                took = _measure("c10d_main", f"127.0.0.1:{store.port}", total, c10d_timeout_s)
                theirs.append(float("inf") if took is None else took)
            del store
            peer = sorted(theirs)[len(theirs) // 2]
            gave_up = peer == float("inf")
            text += (
                f", c10d not within {c10d_timeout_s:g} s (more than {c10d_timeout_s / mine:.0f}x)"
                if gave_up
                else f", c10d {peer:.3f} s ({peer / mine:.1f}x)"
            )
        lines.append(text)
    return "\n".join(lines)
