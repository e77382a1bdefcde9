"""The dashboards: as their code makes them, and asking only for what is measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.promql import complaints, recorded, selectors

DEPLOY = Path(__file__).parents[2] / "deploy"
HERE = DEPLOY / "grafana"
BOARDS: dict[str, dict[str, Any]] = {
    p.stem: json.loads(p.read_text()) for p in (HERE / "dashboards").glob("*.json")
}
RECORDS = {
    rule["record"]
    for group in yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    for rule in group["rules"]
    if "record" in rule
}
QUERIES = [
    (name, panel["title"], target["expr"])
    for name, board in BOARDS.items()
    for panel in board["panels"]
    for target in panel["targets"]
]


def test_what_is_committed_is_what_the_code_makes(tmp_path: Path) -> None:
    pytest.importorskip("grafana_foundation_sdk")
    (tmp_path / "dashboards").mkdir()
    (tmp_path / "generate.py").write_text((HERE / "generate.py").read_text())
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
    assert set(re.findall(r"\$(\w+)", expr)) <= variables


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


def test_grafana_is_told_where_they_are_and_whom_to_ask() -> None:
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
