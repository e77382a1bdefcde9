"""A real Prometheus that scrapes the agents of a test, evaluates elasticd's rules, and sends its alerts to
the test."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from tests.e2e.harness import PATIENCE_S, Agent

T = TypeVar("T")

SERVER = shutil.which("prometheus")
needs_prometheus = pytest.mark.skipif(
    SERVER is None, reason="prometheus is not installed (Debian: prometheus)"
)
DEPLOY = Path(__file__).parents[2] / "deploy"
EVERY_S = 0.25
_DURATION = r"(\d+)(ms|s|m|h)"
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


# ---------------------------------------------------------------- the queries


@dataclass(frozen=True)
class Query:
    """One query of a panel. ``now``: the panel shows one number, not a curve."""

    board: str
    panel: str
    expr: str
    now: bool


def queries() -> list[Query]:
    """Return all queries of the dashboards, those of marks included. Rates are taken over five minutes, as
    Grafana takes them if it shows some days."""

    def of_all(expr: str) -> str:
        return re.sub(r'="\$(run|node)"', '=~".+"', expr).replace("$__rate_interval", "5m")

    found = []
    for path in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json")):
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                now = bool(target.get("instant"))
                found.append(Query(path.stem, panel["title"], of_all(target["expr"]), now))
        found += [
            Query(path.stem, event["name"], of_all(event["expr"]), now=False)
            for event in board["annotations"]["list"]
        ]
    return found


def texts(panel: str, board: str) -> dict[float, str]:
    """Return the text for each number of a panel of states."""
    shown = json.loads((DEPLOY / "grafana" / "dashboards" / f"{board}.json").read_text())["panels"]
    (found,) = (p for p in shown if p["title"] == panel)
    (mapping,) = found["fieldConfig"]["defaults"]["mappings"]
    return {float(number): text["text"] for number, text in mapping["options"].items()}


# Queries that show nothing after a mere kill. The tests of test_alerts_fire.py have each of them show
# something.
SHOWN_BY = {
    "test_workers_that_are_killed": {("fleet", "Firing alerts")},
    "test_a_worker_that_lags_behind": {
        ("workers", "Time of a step relative to peers"),
        ("job", "Each worker"),
    },
    "test_checkpoints_that_are_no_longer_made": {
        ("job", "Loss"),
        ("job", "Age of the newest checkpoint"),
        ("job", "Size of the newest checkpoint"),
        ("job", "Time for a checkpoint"),
        ("job", "Checkpoints by result"),
        ("fleet", "Age of the newest checkpoint"),
    },
    "test_gpus_that_have_errors": {
        ("workers", "GPU in use"),
        ("workers", "GPU memory in use"),
        ("workers", "GPU temperature"),
        ("workers", "GPU power"),
        ("workers", "GPU throttled"),
        ("workers", "GPU errors"),
        ("workers", "Stragglers and bad GPUs"),
    },
}


def rules() -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
    return made


def names(kind: str) -> list[str]:
    """Return the names of all rules of this kind: "alert" or "record"."""
    return [rule[kind] for group in rules()["groups"] for rule in group["rules"] if kind in rule]


def hastened(haste: int) -> dict[str, Any]:
    """Return the rules with all times divided by this factor: windows, ``for:``, and limits that are times of
    a minute or more. Nothing else changes."""

    def shorter(duration: str) -> str:
        amount, unit = re.fullmatch(_DURATION, duration).groups()  # type: ignore[union-attr]
        return f"{round(int(amount) * _UNIT_S[unit] * 1000 / haste)}ms"

    def in_expr(expr: str) -> str:
        expr = re.sub(rf"(?<=\[){_DURATION}(?=\])|(?<=offset ){_DURATION}", lambda m: shorter(m[0]), expr)
        return re.sub(r"(?<=> )\d{2,}\b", lambda m: f"{int(m[0]) / haste:g}", expr)

    made = rules()
    for group in made["groups"]:
        for rule in group["rules"]:
            rule["expr"] = in_expr(rule["expr"])
            if "for" in rule:
                rule["for"] = shorter(rule["for"])
    return made


# ---------------------------------------------------------------- the server


class Answer:
    """The result of a query: for each set of labels the values over time. The last value is the
    present one."""

    def __init__(self, series: list[tuple[Mapping[str, str], list[float]]]) -> None:
        self.series = series

    def __bool__(self) -> bool:
        return bool(self.series)

    def __repr__(self) -> str:
        return "; ".join(f"{dict(labels)}: {values[-1]:g}" for labels, values in self.series) or "nothing"

    def over(self, **labels: object) -> list[float]:
        """The values of the one series that has these labels, whatever other labels it has."""
        wanted = {(k, str(v)) for k, v in labels.items()}
        found = [values for has, values in self.series if wanted <= set(has.items())]
        assert len(found) == 1, f"{len(found)} series have {labels}: {self}"
        return found[0]

    def __call__(self, **labels: object) -> float:
        """Return the last value of that series."""
        return self.over(**labels)[-1]

    def by(self, *names: str) -> dict[tuple[str, ...], float]:
        """Return the last values by the values of these labels, which distinguish the series."""
        found = {tuple(has.get(name, "") for name in names): values[-1] for has, values in self.series}
        assert len(found) == len(self.series), f"{names} do not tell them apart: {self}"
        return found


class Prometheus:
    """A Prometheus on loopback. It keeps all files below ``folder``. ``how``: further lines of its scrape
    config."""

    def __init__(self, folder: Path, by: Mapping[str, Any], how: Mapping[str, Any] = {}) -> None:
        assert SERVER is not None
        folder.mkdir()
        self.began_at = time.time()
        self.alerts = Alerts()
        self._targets = folder / "targets.json"
        self._watched: list[Agent] = []
        self.watch()
        (folder / "rules.yml").write_text(yaml.safe_dump(by, width=1000))
        config = {
            "global": {
                "scrape_interval": f"{EVERY_S * 1000:.0f}ms",
                "scrape_timeout": f"{EVERY_S * 1000:.0f}ms",
                "evaluation_interval": f"{EVERY_S * 1000:.0f}ms",
            },
            "rule_files": ["rules.yml"],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [self.alerts.address]}]}]},
            "scrape_configs": [
                # Prometheus reads the file before it watches the file, so it notices a change in between at
                # the next refresh
                {
                    "job_name": "elasticd",
                    "file_sd_configs": [{"files": ["targets.json"], "refresh_interval": "1s"}],
                    **how,
                },
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._process = subprocess.Popen(
            [
                SERVER,
                "--config.file=prometheus.yml",
                "--storage.tsdb.path=data",
                "--web.listen-address=127.0.0.1:0",
                "--log.format=json",
            ],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._log: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = f"http://{self._until_logged('Listening on')['address']}"
        self._until_logged("Server is ready to receive web requests.")

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._news:
                self._log.append(json.loads(line))
                self._news.notify_all()
        self._process.stderr.close()
        with self._news:
            self._log.append({"msg": "it has ended"})
            self._news.notify_all()

    def _until_logged(self, message: str) -> dict[str, Any]:
        def said(message: str) -> list[dict[str, Any]]:
            return [line for line in self._log if line.get("msg") == message]

        with self._news:
            self._news.wait_for(lambda: said(message) or said("it has ended"), PATIENCE_S)
            assert said(message), f"prometheus did not say {message!r} but {self._log}"
            return said(message)[0]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._reader.join()
        self.alerts.close()

    def forget(self, *agents: Agent) -> None:
        """Stop scraping these agents."""
        self._watched = [agent for agent in self._watched if agent not in agents]
        self.watch()

    def watch(self, *agents: Agent) -> None:
        """Scrape these agents, too. They must have started."""
        self._watched += agents
        urls = [urllib.parse.urlsplit(a.find("agent.started")[0]["http"]) for a in self._watched]
        new = self._targets.with_suffix(".new")
        new.write_text(json.dumps([{"targets": [url.netloc for url in urls]}]))
        new.rename(self._targets)

    def _ask(self, path: str, **fields: object) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            said = json.load(answer)
        assert said["status"] == "success" and not said.get("warnings"), said
        return said["data"]

    def query(self, expr: str) -> Answer:
        """Return the present answer to the query."""
        found = self._ask("query", query=expr)["result"]
        return Answer([(one["metric"], [float(one["value"][1])]) for one in found])

    def over_time(self, expr: str) -> Answer:
        """Return the values since this server began, as a curve shows them: with gaps where there is no
        value."""
        end = time.time()
        start = end - (end - self.began_at) // EVERY_S * EVERY_S  # so that the last value is the present one
        found = self._ask("query_range", query=expr, start=start, end=end, step=EVERY_S)
        series = [
            (one["metric"], [float(v) for _, v in one["values"] if v != "NaN"]) for one in found["result"]
        ]
        return Answer([(labels, values) for labels, values in series if values])

    def shows(self, panel: str, board: str) -> list[Answer]:
        """Return what the queries of a panel return, each sent as Grafana sends it."""
        asked = [q for q in queries() if (q.board, q.panel) == (board, panel)]
        assert asked, f"{board} has no panel {panel}"
        return [self.query(q.expr) if q.now else self.over_time(q.expr) for q in asked]

    def until(self, expr: str, holds: Callable[[Answer], T]) -> T:
        """Wait until the condition holds for the answer to a query. This polls, since no event tells of a
        scrape."""
        patient_until = time.monotonic() + PATIENCE_S
        while not (found := holds(answer := self.query(expr))):
            assert time.monotonic() < patient_until, (
                f"{expr} never became so, but is {answer}; targets: {self._ask('targets')['activeTargets']}"
            )
            time.sleep(EVERY_S)
        return found


# ---------------------------------------------------------------- the receiver of alerts


@dataclass(frozen=True)
class Alert:
    """An alert as it was sent: its ``labels`` and its summary."""

    labels: Mapping[str, str]
    summary: str
    over: bool


class Alerts:
    """Stands in for an Alertmanager: receives each alert when it begins and when it ends."""

    def __init__(self) -> None:
        self.told: list[Alert] = []
        self._news = threading.Condition()
        alerts = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()
                alerts._hear(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _hear(self, body: list[dict[str, Any]]) -> None:
        now = datetime.now(UTC)
        with self._news:
            for one in body:
                ends_at = datetime.fromisoformat(one["endsAt"])
                self.told.append(Alert(one["labels"], one["annotations"]["summary"], ends_at <= now))
            self._news.notify_all()

    def of(self, name: str, **labels: object) -> list[Alert]:
        """Return the messages about this alert so far."""
        wanted = {("alertname", name), *((k, str(v)) for k, v in labels.items())}
        return [alert for alert in self.told if wanted <= set(alert.labels.items())]

    def fires(self, name: str, **labels: object) -> Alert:
        """Wait until the alert fires. Return the first message about it."""
        return self._until(lambda: [a for a in self.of(name, **labels) if not a.over], f"{name} fires")

    def resolves(self, name: str, **labels: object) -> Alert:
        """Wait until the alert no longer fires."""
        return self._until(lambda: [a for a in self.of(name, **labels)[-1:] if a.over], f"{name} resolves")

    def _until(self, found: Callable[[], list[Alert]], what: str) -> Alert:
        with self._news:
            assert self._news.wait_for(found, 3 * PATIENCE_S), f"never: {what}; told were {self.told}"
            return found()[0]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
