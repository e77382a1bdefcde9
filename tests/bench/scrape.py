"""How long a scrape takes, and what watching costs the agent, by the number of members of the job."""

from __future__ import annotations

import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
from prometheus_client.parser import text_string_to_metric_families

from elasticd.core.facts import Node
from elasticd.core.ports import Applied, Put
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.blocking_client import Client
from elasticd.telemetry.exposition import expose
from tests.bench import launch
from tests.etcd.cluster import EtcdOnPorts
from tests.ports import free_port
from tests.telemetry.test_exposition import PROMETHEUS_3_ASKS as ASKED
from tests.telemetry.test_exposition import everything

SLOTS = 8
WORKER = Path(__file__).with_name("fake_steps.py")
PATIENCE_S = 120.0
AT_ONCE = 50  # records in a transaction; etcd takes 128
WATCHED_S = 10.0


@dataclass(frozen=True, slots=True)
class Cost:
    """``took_s``: of each scrape, as the client sees it. ``cpu_share``: the cores that the agent uses
    while it is scraped every second."""

    members: int
    took_s: list[float]
    body_bytes: int
    cpu_share: float

    def __str__(self) -> str:
        took = sorted(self.took_s)
        return (
            f"  {self.members:>5} members: {median(took) * 1e3:.2f} ms ({took[0] * 1e3:.2f} to "
            f"{took[-1] * 1e3:.2f}, n={len(took)}), {self.body_bytes / 1e3:.0f} kB; "
            f"the agent uses {self.cpu_share:.2%} of a core, scraped every second"
        )


def _pretend(client: Client, job: str, members: int) -> None:
    """Write records of nodes with one slot each into etcd. These nodes never leave their round."""
    lease, _ = client.grant(600)
    puts = [
        Put(
            f"nodes/sim-{n}",
            Node(f"sim-{n}", uuid.uuid4().hex, "127.0.0.1", (0,), 0, 1, 1, f"sim-{n}"),
            True,
        )
        for n in range(members)
    ]
    for first in range(0, members, AT_ONCE):
        answer = client.transact(job, (), tuple(puts[first : first + AT_ONCE]), lease=lease)
        assert isinstance(answer, Applied), answer


def _scrape(url: str) -> bytes:
    with urllib.request.urlopen(f"{url}metrics", timeout=30) as answer:
        body: bytes = answer.read()
    return body


def _trains(body: bytes, world_size: int) -> bool:
    samples = [s for family in text_string_to_metric_families(body.decode()) for s in family.samples]
    steps = [s.value for s in samples if s.name == "elasticd_worker_steps_total"]
    return ("elasticd_world_size", world_size) in [(s.name, s.value) for s in samples] and all(steps)


def _until(holds: Callable[[], bool], what: str, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if holds():
                return
        except OSError:
            pass  # the agent does not listen yet
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {PATIENCE_S:g} s: {what}\n{log.read_text()[-2000:]}")
        time.sleep(0.1)


def _cost(others: int, scrapes: int) -> Cost:
    """Measure a real agent that leads, with eight workers of its own, beside so many fake nodes."""
    total, job, port = SLOTS + others, f"scrape-{uuid.uuid4().hex[:8]}", free_port()
    url = f"http://127.0.0.1:{port}/"
    server = EtcdOnPorts()
    endpoint = server.start().endpoints[0]
    try:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            argv = [
                launch.BIN / "elasticd",
                "run",
                "--etcd",
                f"http://{endpoint}",
                "--job",
                job,
                "--node",
                "real",
            ]
            argv += ["--slots", SLOTS, "--min", total, "--max", total, "--node-ttl", 60, "--plain"]
            argv += ["--http", f"127.0.0.1:{port}", WORKER]
            launched = launch.Launched([launch.spawn([str(a) for a in argv], Path(folder, "steps"), log)])
            try:
                _until(lambda: b"elasticd_leader{" in _scrape(url), "the agent serves", log)
                with Client(EtcdAccess((endpoint,))) as client:
                    _pretend(client, job, others)
                _until(lambda: _trains(_scrape(url), total), "they train", log)
                agent = psutil.Process(launched.agents[0].pid)
                took, before, began = [], sum(agent.cpu_times()[:2]), time.monotonic()
                while time.monotonic() < began + WATCHED_S:
                    asked = time.perf_counter()
                    body = _scrape(url)
                    took.append(time.perf_counter() - asked)
                    time.sleep(1.0)
                share = (sum(agent.cpu_times()[:2]) - before) / (time.monotonic() - began)
                for _ in range(scrapes):
                    asked = time.perf_counter()
                    body = _scrape(url)
                    took.append(time.perf_counter() - asked)
                return Cost(total, took, len(body), share)
            finally:
                launched.stop()
    finally:
        server.stop()


def _writing(slots: int, tries: int = 7) -> str:
    """Return the CPU time alone, so that other work on the machine does not matter."""
    measured = everything(slots).copy()
    took = []
    for _ in range(tries):
        began = time.thread_time()
        body, _ = expose(measured, "run", "node", ASKED)
        took.append(time.thread_time() - began)
    return f"  {slots:>5} slots: {min(took) * 1e3:.1f} ms of a core, {len(body) / 1e3:.0f} kB"


def scrapes(sizes: list[int], count: int) -> str:
    """Measure each size with an etcd of its own."""
    costs = [_cost(max(0, size - SLOTS), count) for size in sizes]
    written = ["to write the answer, every metric with every label there is", *map(_writing, (8, 64, 512))]
    return "\n".join(
        [f"a scrape of an agent with {SLOTS} workers, which leads the job", *map(str, costs), *written]
    )
