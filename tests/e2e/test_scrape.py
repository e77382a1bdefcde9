"""What Prometheus would scrape of a real run in which a worker is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jsonschema
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from elasticd import __version__
from elasticd.telemetry import events, runs
from tests.e2e.conftest import Etcd
from tests.e2e.harness import PATIENCE_S, Agent, Cluster, World
from tests.e2e.prometheus import Prometheus, needs_prometheus
from tests.etcd.cluster import Authority
from tests.telemetry import promtool

T = TypeVar("T")

PROGRAMS = Path(__file__).parent / "programs"
SCHEMA = Path(__file__).parents[2] / "docs/status.schema.json"


def fetch(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def served_at(url: str) -> str | None:
    """Return the job that is served at that address, if there is one."""
    try:
        job: str = json.loads(fetch(f"{url}status"))["job"]
    except OSError:
        return None
    return job


@dataclass(frozen=True)
class Scraped:
    """The samples of one scrape."""

    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]

    def __call__(self, name: str, **labels: Any) -> float | None:
        """Return the one sample with this name and these labels, whatever other labels it has."""
        wanted = {(k, str(v)) for k, v in labels.items()}
        found = [v for (n, has), v in self.samples.items() if n == f"elasticd_{name}" and wanted <= has]
        assert len(found) < 2, f"{name} {labels} is ambiguous"
        return found[0] if found else None


def ready(agent: Agent) -> bool:
    try:
        return fetch(f"{url_of(agent)}readyz") == "ok\n"
    except urllib.error.HTTPError:
        return False


def eventually(holds: Callable[[], T]) -> T:
    """Scrape until the condition holds: no event tells the client of a change."""
    patient_until = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < patient_until, "it never came to be"
        time.sleep(0.25)
    return found


def scrape(agent: Agent, *, openmetrics: bool = False) -> Scraped:
    asked = "application/openmetrics-text; version=1.0.0" if openmetrics else "text/plain"
    body = fetch(f"{url_of(agent)}metrics", Accept=asked)
    families = (parse_openmetrics if openmetrics else parse_text)(body)
    return Scraped({(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples})


def url_of(agent: Agent) -> str:
    url: str = agent.find("agent.started")[0]["http"]
    return url


def test_a_scrape_tells_of_each_slot_and_of_the_worker_that_was_killed(cluster: Cluster) -> None:
    cluster.limits = (3, 3)
    began_at = time.time()
    (a,) = cluster.start("a", slots=2)
    cluster.until_said(a, "leader.elected")
    (b,) = cluster.start("b")
    first = cluster.world(3)
    cluster.goes_on(first)
    os.kill(first.on("b")[0].pid, signal.SIGKILL)
    second = cluster.world(3, after=first)
    cluster.goes_on(second, steps=20)

    def settled() -> tuple[Scraped, Scraped] | None:
        at_a, at_b = scrape(a), scrape(b, openmetrics=True)
        counts = [
            at_a("worker_steps_total", slot=0),
            at_a("worker_steps_total", slot=1),
            at_b("worker_steps_total"),
        ]
        recovered = at_a("recover_seconds_count") == 1
        # The counts have steps of the first round, too. An agent that has not seen a step of the second round
        # yet says that its workers are starting.
        seen = [at_a("slot_state", slot=slot, slot_state="running") for slot in (0, 1)]
        seen.append(at_b("slot_state", slot=0, slot_state="running"))
        done = recovered and seen == [1, 1, 1] and all(n and n > 20 for n in counts)
        return (at_a, at_b) if done else None

    at_a, at_b = eventually(settled)
    run = cluster.job
    for at, slots in ((at_a, (0, 1)), (at_b, (0,))):
        assert at("round", run=run) == 2
        assert (at("world_size"), at("world_min"), at("world_max"), at("world_unit")) == (3, 3, 3, 1)
        assert at("world_nodes") == 2
        assert at("job_phase", phase="live") == 1 and at("job_phase", phase="waiting") == 0
        assert at("etcd_up") == at("build_info", version=__version__) == 1
        for slot in slots:
            assert at("worker_up", slot=slot) == 1
            assert at("slot_state", slot=slot, slot_state="running") == 1
            assert at("worker_restarts_total", slot=slot, cause="worker_failed") == 1
            assert began_at < (at("worker_last_step_timestamp_seconds", slot=slot) or 0.0) <= time.time()
    assert at_b("worker_exits_total", slot=0, exit="signal") == 1
    assert at_a("worker_exits_total", slot=0, exit="signal") == 0
    assert (at_a("leader"), at_b("leader")) == (1, 0)
    assert at_a("members", node_state="member") == 2 and at_b("members", node_state="member") is None
    assert at_a("rounds_total", cause="start") == at_a("rounds_total", cause="worker_failed") == 1
    assert at_b("rounds_total", cause="worker_failed") == 0
    assert at_a("failures_charged_total") == 1
    assert at_a("restart_budget_left") == (at_a("restart_budget_size") or 0) - 1
    assert at_b("restart_budget_left") is None, "the leader alone knows which charges still count"
    detect, recover = (at_a(f"{name}_seconds_sum") for name in ("detect", "recover"))
    assert detect is not None and recover is not None and 0 < detect < recover
    assert at_a("outage_seconds_total", cause="worker_failed") == recover
    assert at_b("recover_seconds_count") == 0, "the node of rank 0 counts for all"
    requests = at_a("etcd_request_seconds_count")
    assert requests and requests > 3 and at_a("etcd_lease_renewals_total", lease="renewed")
    if promtool.PROMTOOL:
        assert promtool.lint(fetch(f"{url_of(a)}metrics").encode()) == ""

    status = json.loads(fetch(f"{url_of(a)}status"))
    assert (status["job"], status["round"], status["agent"]["ready"]) == (run, 2, True)
    (own,) = status["nodes"]
    assert (own["node"], [s["pid"] for s in own["slots"]]) == ("a", [p.pid for p in second.on("a")])
    told = json.loads(cluster.command("status", run, "--json").out)
    for document in (status, told):
        jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    assert {name for name in status if type(status[name]) is not type(told[name])} <= {
        "agent", "budget_left", "goodput", "time",
    }, "one document, of which an agent knows less"  # fmt: skip
    assert fetch(f"{url_of(a)}healthz") == fetch(f"{url_of(a)}readyz") == "ok\n"
    assert own["time"]["productive"] > 0
    assert run in fetch(url_of(a)) and "productive of" in fetch(url_of(a))
    cluster.finishes(a, b)
    for agent in (a, b):
        assert served_at(url_of(agent)) != run, "its port is free, or another test's by now"


def test_a_node_that_waits_for_a_place_is_ready(cluster: Cluster) -> None:
    cluster.limits = (1, 1)
    (a,) = cluster.start("a")
    cluster.world(1)
    (b,) = cluster.start("b", options=["--http", "127.0.0.1:0"])
    cluster.until_said(b, "agent.started")
    eventually(lambda: ready(b) and scrape(b)("round") == 1)
    assert scrape(b)("slot_state", slot=0, slot_state="idle") == 1
    assert scrape(b)("worker_up", slot=0) == 0
    cluster.finishes(a, b)


def answers_while_it_trains(cluster: Cluster, agent: Agent, world: World) -> None:
    before = scrape(agent)("worker_steps_total", slot=0) or 0.0
    cluster.goes_on(world)
    eventually(lambda: (scrape(agent)("worker_steps_total", slot=0) or 0.0) > before)
    assert json.loads(fetch(f"{url_of(agent)}status"))["round"] == world.round
    assert fetch(f"{url_of(agent)}healthz") == fetch(f"{url_of(agent)}readyz") == "ok\n"


def test_a_scrape_is_answered_while_etcd_hangs(clusters: Callable[[str | None], Cluster], etcd: Etcd) -> None:
    cluster = clusters(etcd.url)
    (a,) = cluster.start("a")
    world = cluster.world(1)
    etcd.hang()
    cluster.until_said(a, "etcd.away")
    eventually(lambda: scrape(a)("etcd_up") == 0)
    answers_while_it_trains(cluster, a, world)
    etcd.wake()
    eventually(lambda: scrape(a)("etcd_up") == 1)
    cluster.finishes(a)


def test_a_scrape_is_answered_while_the_disk_hangs(cluster: Cluster) -> None:
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler is installed, to make a disk with that hangs")
    library, hangs, blocks = (cluster.folder / name for name in ("disk.so", "hangs", "blocks"))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, PROGRAMS / "hungdisk.c", "-ldl"], check=True)
    cluster.limits = (1, 1)
    disk = {"DISK": str(cluster.folder / "state"), "DISK_HANGS": str(hangs), "DISK_BLOCKS": str(blocks)}
    (a,) = cluster.start("a", env={"LD_PRELOAD": str(library), **disk})
    world = cluster.world(1)
    cluster.goes_on(world)
    hangs.touch()
    eventually(blocks.exists)
    answers_while_it_trains(cluster, a, world)
    hangs.unlink()
    cluster.finishes(a)
    (part,) = runs.of_job(cluster.folder / "state" / "elasticd", cluster.job)
    assert events.read([part.folder])[-1]["event"] == "agent.ended", "what had waited was written"


@needs_prometheus
def test_prometheus_scrapes_over_tls_with_the_token(cluster: Cluster, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "us")
    cert, key = authority.issue("agent", "127.0.0.1")
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    cluster.limits = (1, 1)
    (a,) = cluster.start(
        "a", options=[f"--http-cert={cert}", f"--http-key={key}", f"--http-token-file={token}"]
    )
    cluster.world(1)
    url, trusting = url_of(a), authority.trusting()

    def status_of(path: str) -> int:
        try:
            with urllib.request.urlopen(f"{url}{path}", context=trusting, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert [status_of(path) for path in ("", "status", "metrics")] == [401] * 3
    eventually(lambda: status_of("readyz") == status_of("healthz") == 200)
    how = {
        "scheme": "https",
        "tls_config": {"ca_file": str(authority.cert)},
        "authorization": {"credentials_file": str(token)},
    }
    with closing(Prometheus(tmp_path / "prometheus", {"groups": []}, how)) as prometheus:
        prometheus.watch(a)
        prometheus.until("elasticd_world_size == 1", bool)
    cluster.finishes(a)


def test_with_http_off_nothing_is_served(cluster: Cluster) -> None:
    cluster.limits = (1, 1)
    (a,) = cluster.start("a", options=["--http=off"])
    cluster.world(1)
    assert url_of(a) == "off"
    cluster.finishes(a)
