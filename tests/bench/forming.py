"""The time to form a world, and to form the next one after a failure: light, fake agents on one real etcd,
beside torch's c10d rendezvous.

elasticd's side has the real agent and leader (``elasticd.daemon.driver``) and the real etcd client. Only the
workers, eight on each node, and the round's store are left out. torch's side has its real rendezvous
handlers. Both run as many agents in a process, in as many processes, and each agent has connections of its
own. On a cluster each agent has a machine of its own. So beside the time stands the CPU time of an agent, of
the leader's thread and of etcd.
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
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
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
WORKERS = 8  # workers of a node


@dataclass(slots=True)
class _Workers:
    """Workers that do nothing, and end when they are told to. ``started`` gets the round's number."""

    started: Callable[[int], None]
    end: Callable[[int], None] = lambda code: None  # called when all workers end, with the exit code

    def listen(self, news: Callable[[WorkerNews], None]) -> None: ...

    def standby(self, assignments: tuple[Assignment, ...], exited: Callable[[int, Exit], None]) -> None: ...

    def leave(
        self, planned: bool, signal: int, grace_s: float, leave_s: float | None, going: bool = False
    ) -> None:
        self.end(-signal)

    def go_on(self, slots: tuple[int, ...]) -> None: ...

    def start(
        self,
        round_number: int,
        assignments: tuple[Assignment, ...],
        exited: Callable[[int, Exit], None],
        waiting: Collection[int] = (),
    ) -> None:
        running = set(range(WORKERS))

        def end(code: int) -> None:
            while running:
                slot = running.pop()
                exited(round_number, Exit(slot, slot, code, time.time()))

        self.end = end
        self.started(round_number)

    def stop(self, signal: int, grace_s: float, slots: tuple[int, ...] | None = None) -> None:
        self.end(-signal)

    def fence(self, until: float | None) -> None: ...

    def steps(self) -> Mapping[int, int]:
        return {}


class _NoStore:
    def open(self) -> None: ...

    def renew(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Formed:
    """``at``: when the last agent of a process had its world, by ``time.monotonic``. ``cpu_s``: the CPU time
    of the process since the start signal. ``leads_s``: that of the agent that leads, if it is in this
    process."""

    at: float
    cpu_s: float = 0.0
    leads_s: float = 0.0


class _Fleet:
    """Several agents in this process, served by one thread."""

    def __init__(self, endpoint: str, job: str, total: int, first: int, count: int) -> None:
        self._inbox: queue.SimpleQueue[tuple[int, object]] = queue.SimpleQueue()
        self._clock = SteadyClock()
        self._in_round: Counter[int] = Counter()
        self._count = count
        self._spent_s = [0.0] * count  # of each agent, on this thread
        limits = Limits(total * WORKERS, total * WORKERS)
        policy = Policy(node_ttl_s=60.0)
        spec = Spec(limits, limits, "fake", "fake", policy)
        # All agents share the cores, so etcd may answer the last of them late.
        access = EtcdAccess((endpoint,), timeout_s=60.0)
        config = AgentConfig(etcd_grace_s=600.0, etcd_wait_s=600.0)
        self._workers = [_Workers(self._started) for _ in range(count)]
        self._drivers = [
            Driver(
                AgentState(
                    Identity(
                        f"n{first + n}",
                        uuid.uuid4().hex,
                        "127.0.0.1",
                        tuple(range(WORKERS)),
                        f"bench-{first + n}",
                        os.getpid(),
                    ),
                    spec,
                    config,
                    1,
                ),
                store=EtcdStore(EtcdLink(access, self._clock), job, policy.node_ttl_s),
                procs=workers,
                stores=_NoStore(),
                assign=lambda round, member: (),
                assign_standbys=lambda slots, began: (),
                process_alive=lambda pid: True,
                post=lambda event, n=n: self._inbox.put((n, event)),  # type: ignore[misc]
                say=lambda reason: None,
            )
            for n, workers in enumerate(self._workers)
        ]

    def begin(self) -> None:
        for driver in self._drivers:
            driver.begin()

    def fail(self) -> None:
        """Let the workers of the first agent fail."""
        self._workers[0].end(1)

    def form(self, number: int, do: Callable[[], None]) -> Formed:
        """Do something. Handle events until all agents are in this round."""
        began_s, spent_s = time.process_time(), list(self._spent_s)
        do()
        while self._in_round[number] < self._count:
            self._handle_next()
        spent = zip(self._drivers, self._spent_s, spent_s, strict=True)
        leads_s = sum(after - before for driver, after, before in spent if driver.view is not None)
        return Formed(time.monotonic(), time.process_time() - began_s, leads_s)

    def _started(self, number: int) -> None:
        self._in_round[number] += 1

    def _handle_next(self) -> None:
        try:
            n, event = self._inbox.get_nowait()
        except queue.Empty:
            wakes = [driver.wake_at for driver in self._drivers if driver.wake_at is not None]
            try:
                wait_s = max(0.0, min(wakes) - self._clock()) if wakes else None
                n, event = self._inbox.get(timeout=wait_s)
            except queue.Empty:
                for late, driver in enumerate(self._drivers):
                    if driver.wake_at is not None and self._clock() >= driver.wake_at:
                        self._handle(late, Tick())
                return
        self._handle(n, event)

    def _handle(self, n: int, event: object) -> None:
        began_s = time.thread_time()
        self._drivers[n].handle(event, self._clock())  # type: ignore[arg-type]
        self._spent_s[n] += time.thread_time() - began_s
        if (left := self._drivers[n].left) is not None:
            raise Broken(f"an agent left the job: {left.why}")


def fleet_main(endpoint: str, job: str, total: int, first: int, count: int) -> None:
    with Client(EtcdAccess((endpoint,))) as client:
        client.check()  # imports are over and etcd is reached: only the forming is measured
    fleet = _Fleet(endpoint, job, total, first, count)
    _say("ready")
    sys.stdin.readline()
    _say(json.dumps(asdict(fleet.form(1, fleet.begin))))
    sys.stdin.readline()
    _say(json.dumps(asdict(fleet.form(2, fleet.fail if first == 0 else lambda: None))))
    sys.stdin.readline()  # no process leaves while others still form the world
    os._exit(0)


def _say(line: str) -> None:
    print(line, flush=True)


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

    _say("ready")
    sys.stdin.readline()
    threads = [threading.Thread(target=join, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _say(json.dumps(asdict(Formed(time.monotonic()))))
    sys.stdin.readline()
    os._exit(0)


class Broken(Exception):
    """A process of the fleet has ended by itself, so there is nothing to measure."""


def _require_alive(fleet: Sequence[subprocess.Popen[str]], said: Sequence[IO[str]]) -> None:
    for p, errors in zip(fleet, said, strict=True):
        if p.poll() not in (None, -signal.SIGKILL):  # elasticd's processes, when the time is over
            errors.seek(0)
            raise Broken(f"a process of the fleet ended with {p.returncode}:\n{errors.read()[-3000:]}")


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds from the start signal until the last agent has its world. CPU seconds meanwhile: ``agent_s`` of
    an agent on average, ``leads_s`` of the leader's thread, ``etcd_s`` of etcd."""

    s: float
    agent_s: float = 0.0
    leads_s: float = 0.0
    etcd_s: float = 0.0

    def __str__(self) -> str:
        ours = self.agent_s, self.leads_s, self.agent_s + self.leads_s
        agent, leader, both = (f"{s * 1e3:.0f} ms" for s in ours)
        cpu = f"an agent {agent}, the leader {leader}, both {both}; etcd {self.etcd_s:.2f} s"
        return f"{self.s:.2f} s (CPU: {cpu})"


def _measure(
    kind: str, endpoint: str, total: int, timeout_s: float, words: int = 1, etcd: int | None = None
) -> list[Took] | None:
    """Measure what each of the start signals leads to; None after the timeout. The first signal forms a
    world. Each later one lets the workers of an agent fail, so that the next world forms. ``etcd``: its
    process."""
    with ExitStack() as cleanup:
        return _measured(kind, endpoint, total, timeout_s, words, etcd, cleanup)


def _measured(
    kind: str, endpoint: str, total: int, timeout_s: float, words: int, etcd: int | None, cleanup: ExitStack
) -> list[Took] | None:
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
        took = [_after_a_word(fleet, total, etcd) for _ in range(words)]
        limit.cancel()
        found = [one for one in took if one is not None]
        if len(found) < words:
            _require_alive(fleet, said)
            return None
        return found
    finally:
        alarm.cancel()
        for p in fleet:
            p.kill()
            p.wait()
            for stream in (p.stdin, p.stdout):
                if stream:
                    with suppress(BrokenPipeError):  # a word that the process did not read
                        stream.close()


def _after_a_word(fleet: Sequence[subprocess.Popen[str]], total: int, etcd: int | None) -> Took | None:
    """Send a start signal to the processes. Wait until all of them have formed a world; return None if one
    has ended."""
    began, etcd_began_s = time.monotonic(), _cpu_s(etcd)
    for p in fleet:
        assert p.stdin
        with suppress(BrokenPipeError):
            p.stdin.write("go\n")
            p.stdin.flush()
    ends = [p.stdout.readline() for p in fleet if p.stdout]
    if not all(ends):
        for p, end in zip(fleet, ends, strict=True):
            if not end:
                p.wait()
        return None
    formed = [Formed(**json.loads(end)) for end in ends]
    return Took(
        max(one.at for one in formed) - began,
        sum(one.cpu_s - one.leads_s for one in formed) / total,
        sum(one.leads_s for one in formed),
        _cpu_s(etcd) - etcd_began_s,
    )


def _cpu_s(pid: int | None) -> float:
    """Return the CPU time that a process has used."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def forming(sizes: list[int], tries: int, c10d_most: int, c10d_timeout_s: float) -> str:
    """Return the median of ``tries`` for each size. torch's back end is measured only once for a size at
    which it takes long."""
    from torch.distributed import TCPStore

    lines = [f"time to form a world of agents with {WORKERS} workers, and the next after a failure (median)"]
    gave_up = False
    for total in sizes:
        with EtcdOnPorts() as server:
            tried = [
                _measure("fleet_main", server.endpoint, total, 120.0, 2, server.pid) for _ in range(tries)
            ]
        if None in tried:
            raise Broken(f"{total} agents form no world within 120 s")
        first, again = (
            sorted((took[n] for took in tried if took is not None), key=lambda one: one.s)[tries // 2]
            for n in (0, 1)
        )
        mine = first.s
        text = f"  {total:>5} agents: elasticd {first}; again {again}"
        if total <= c10d_most and not gave_up:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            theirs: list[float] = []
            for _ in range(tries if total <= 64 else 1):
                took = _measure("c10d_main", f"127.0.0.1:{store.port}", total, c10d_timeout_s)
                theirs.append(float("inf") if took is None else took[0].s)
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
