"""The dashboards are what their code makes, and ask only for metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from elasticd.telemetry.catalog import BY_NAME
from tests.deploy.promql import complaints, recorded, selectors

DEPLOY = Path(__file__).parents[2] / "deploy"
HERE = DEPLOY / "grafana"
BOARDS: dict[str, dict[str, Any]] = {
    p.stem: json.loads(p.read_text()) for p in (HERE / "dashboards").glob("*.json")
}
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
RECORDS = {rule["record"] for rule in RULES if "record" in rule}
ALERTS = {rule["alert"]: rule["expr"] for rule in RULES if "alert" in rule}
PANELS = [(name, panel) for name, board in BOARDS.items() for panel in board["panels"]]
QUERIES = [
    *((name, panel["title"], target["expr"]) for name, panel in PANELS for target in panel["targets"]),
    *(
        (name, event["name"], event["expr"])
        for name, board in BOARDS.items()
        for event in board["annotations"]["list"]
    ),
]


def panels(kind: str) -> list[Any]:
    """Return the panels of this kind, as parameters of a test."""
    return [pytest.param(p, id=f"{name}: {p['title']}") for name, p in PANELS if p["type"] == kind]


def test_committed_dashboards_are_what_the_code_makes(tmp_path: Path) -> None:
    pytest.importorskip("grafana_foundation_sdk")
    (tmp_path / "dashboards").mkdir()
    for program in ("boards.py", "generate.py"):
        (tmp_path / program).write_text((HERE / program).read_text())
    subprocess.run([sys.executable, tmp_path / "generate.py"], check=True, timeout=60)
    made = {p.stem: p.read_text() for p in (tmp_path / "dashboards").iterdir()}
    assert made == {name: (HERE / "dashboards" / f"{name}.json").read_text() for name in BOARDS}
    assert set(made) == {"job", "workers", "fleet"}


@pytest.mark.parametrize(("board", "title", "expr"), QUERIES)
def test_a_panel_asks_only_for_what_is_measured_or_recorded(board: str, title: str, expr: str) -> None:
    assert not complaints(expr)
    assert recorded(expr) <= RECORDS
    assert list(selectors(expr)) or recorded(expr) or "up{" in expr or "ALERTS{" in expr
    variables = {v["name"] for v in BOARDS[board]["templating"]["list"]}
    assert set(re.findall(r"\$(\w+)", expr)) <= variables | {"__rate_interval"}


@pytest.mark.parametrize("panel", panels("timeseries"))
def test_a_curve_is_of_whatever_time_is_shown_and_has_a_table_for_its_legend(panel: dict[str, Any]) -> None:
    assert panel["options"]["legend"]["displayMode"] == "table" and panel["options"]["legend"]["calcs"]
    for target in panel["targets"]:
        assert set(re.findall(r"\[(.*?)\]", target["expr"])) <= {"$__rate_interval"}


@pytest.mark.parametrize("panel", panels("state-timeline"))
def test_a_state_is_drawn_as_the_catalogue_calls_it(panel: dict[str, Any]) -> None:
    (target,), (mapping,) = panel["targets"], panel["fieldConfig"]["defaults"]["mappings"]
    (metric,) = {selector.name for selector in selectors(target["expr"])}
    asked = re.findall(r'(\d+) \* \w+\{\w+="(\w+)"', target["expr"])
    assert [value for _, value in asked] == list(BY_NAME[metric].values)
    assert {number: text["text"] for number, text in mapping["options"].items()} == dict(asked)


@pytest.mark.parametrize(
    ("board", "title", "alert"),
    [
        ("job", "Since the last step", "ElasticdStalled"),
        ("job", "Goodput, last hour", "ElasticdGoodputLow"),
        ("job", "Age of the newest checkpoint", "ElasticdCheckpointOld"),
        ("job", "From a fault to the next step", "ElasticdRecoverySlow"),
        ("job", "etcd request time, 99th percentile", "ElasticdEtcdSlow"),
    ],
)
def test_a_panel_turns_red_where_its_alert_fires(board: str, title: str, alert: str) -> None:
    (panel,) = (p for name, p in PANELS if (name, p["title"]) == (board, title))
    first, *more = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    red = more[0] if first["color"] == "red" else more[-1]
    limit, *_ = re.findall(r"[<>] ([\d.]+)(?= and|$)", ALERTS[alert])
    assert float(limit) == red["value"], alert


def test_each_link_leads_to_a_dashboard_and_chooses_only_what_it_has() -> None:
    led: set[tuple[str, str]] = set()
    for name, board in BOARDS.items():
        for url in re.findall(r'"/d/elasticd-([^"]*)"', json.dumps(board)):
            to, _, chosen = url.partition("?")
            assert {f"var-{v['name']}" for v in BOARDS[to]["templating"]["list"]} >= set(
                re.findall(r"var-\w+", chosen)
            )
            led.add((name, to))
    assert led == {
        ("fleet", "job"),
        ("job", "fleet"),
        ("job", "workers"),
        ("workers", "fleet"),
        ("workers", "job"),
    }


def test_each_panel_that_an_alert_or_its_runbook_names_exists() -> None:
    pages = (DEPLOY / "prometheus" / "rules.yml", DEPLOY.parent / "docs" / "runbooks.md")
    told = "".join(page.read_text() for page in pages)
    named = set(re.findall(r'panel \\?"(.*?)\\?"', told))
    assert named and named <= {panel["title"] for _, panel in PANELS}


@pytest.mark.parametrize("name", BOARDS)
def test_panels_have_numbers_of_their_own_and_none_covers_another(name: str) -> None:
    panels = BOARDS[name]["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    cells = [
        (x, y)
        for p in panels
        for x in range(p["gridPos"]["x"], p["gridPos"]["x"] + p["gridPos"]["w"])
        for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


def test_grafana_finds_the_dashboards_and_the_prometheus_of_compose() -> None:
    grafana = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["grafana"]
    mounted = dict(v.split(":")[:2] for v in grafana["volumes"])
    (provider,) = yaml.safe_load((HERE / "provisioning" / "dashboards" / "elasticd.yml").read_text())[
        "providers"
    ]
    assert provider["options"]["path"] == mounted["./grafana/dashboards"]
    (source,) = yaml.safe_load((HERE / "provisioning" / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
