"""The files for Prometheus: Prometheus' own tools accept them, and the catalogue has every metric in them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from elasticd.cli.main import cli
from tests.deploy.promql import complaints, recorded, selectors

ROOT = Path(__file__).parents[2]
HERE = ROOT / "deploy" / "prometheus"
UNIT_TESTS = Path(__file__).parent / "alerts.yml"
RULES = [r for g in yaml.safe_load((HERE / "rules.yml").read_text())["groups"] for r in g["rules"]]
ALERTS = {r["alert"]: r for r in RULES if "alert" in r}
RECORDS = {r["record"]: r for r in RULES if "record" in r}
RUNBOOKS = (ROOT / "docs" / "runbooks.md").read_text()


def run(tool: str, *argv: str | Path) -> tuple[int, str]:
    path = shutil.which(tool)
    if path is None:
        pytest.skip(f"{tool} is not installed (Debian: prometheus, prometheus-alertmanager)")
    done = subprocess.run([path, *argv], capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


def rule_id(rule: dict[str, Any]) -> str:
    return rule.get("alert") or rule["record"]


def test_promtool_takes_the_configuration_and_the_rules() -> None:
    code, said = run("promtool", "check", "config", HERE / "prometheus.yml")
    assert code == 0 and f"{len(RULES)} rules found" in said, said


def test_promtool_takes_the_configuration_that_the_documentation_gives_for_one_machine(
    tmp_path: Path,
) -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    given = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert given is not None
    shutil.copy(HERE / "rules.yml", tmp_path)
    (tmp_path / "here.yml").write_text(given[1])
    code, said = run("promtool", "check", "config", tmp_path / "here.yml")
    assert code == 0 and f"{len(RULES)} rules found" in said, said


def test_the_rules_for_the_prometheus_operator_are_made_of_these() -> None:
    made = subprocess.run(
        [sys.executable, "-c", "import generate, sys; print(generate.text_of(sys.stdin.read()), end='')"],
        input=(HERE / "rules.yml").read_text(),
        cwd=HERE,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert made.returncode == 0, made.stderr
    assert (HERE / "prometheus-rule.yaml").read_text() == made.stdout, (
        "run python deploy/prometheus/generate.py, for the cluster to have the same rules"
    )


def test_amtool_takes_the_example_of_an_alertmanager() -> None:
    code, said = run("amtool", "check-config", HERE / "alertmanager.yml")
    assert code == 0, said


@pytest.mark.parametrize(
    ("severity", "told"), [("critical", "people"), ("warning", "people"), ("info", "nobody")]
)
def test_alertmanager_sends_people_every_alert_but_those_that_may_be_intended(
    severity: str, told: str
) -> None:
    config = f"--config.file={HERE / 'alertmanager.yml'}"
    code, said = run("amtool", "config", "routes", "test", config, f"severity={severity}", "run=r")
    assert code == 0 and told in said.splitlines(), said


def test_each_alert_fires_when_it_should_and_not_when_it_should_not() -> None:
    code, said = run("promtool", "test", "rules", UNIT_TESTS)
    assert code == 0, said


@pytest.mark.slow
def test_the_unit_tests_fail_where_an_alert_is_wrong(tmp_path: Path) -> None:
    wrong = (HERE / "rules.yml").read_text().replace("elasticd_etcd_up) == 0", "elasticd_etcd_up) == 2")
    (tmp_path / "rules.yml").write_text(wrong)
    tests = yaml.safe_load(UNIT_TESTS.read_text()) | {"rule_files": [str(tmp_path / "rules.yml")]}
    tests["tests"] = [test for test in tests["tests"] if "ElasticdEtcdUnreachable" in str(test)]
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(tests))
    code, said = run("promtool", "test", "rules", tmp_path / "alerts.yml")
    assert code != 0 and "ElasticdEtcdUnreachable" in said


def test_every_alert_has_a_unit_test_in_which_it_fires() -> None:
    expected: set[str] = set()
    for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"]:
        expected |= {t["alertname"] for t in test.get("alert_rule_test", ()) if t["exp_alerts"]}
        for one in test.get("promql_expr_test", ()):
            for sample in one["exp_samples"]:
                expected |= set(re.findall(r'alertname="(\w+)"', sample["labels"]))
    assert expected == set(ALERTS)


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_a_rule_asks_only_for_what_is_measured_or_recorded(rule: dict[str, Any]) -> None:
    assert not complaints(rule["expr"])
    assert recorded(rule["expr"]) <= set(RECORDS)
    assert list(selectors(rule["expr"])) or recorded(rule["expr"]) or "up{" in rule["expr"]


@pytest.mark.parametrize("rule", RECORDS.values(), ids=rule_id)
def test_a_record_is_named_after_the_labels_it_keeps(rule: dict[str, Any]) -> None:
    (level,) = re.findall(r"^(\w+):elasticd_", rule["record"])
    by = [set(re.split(r",\s*", group)) for group in re.findall(r"\bby \(([^)]*)\)", rule["expr"])]
    assert by and all(group - {"le"} == set(level.split("_")) for group in by)


@pytest.mark.parametrize("rule", ALERTS.values(), ids=rule_id)
def test_an_alert_says_how_bad_it_is_what_to_do_and_where_to_read_more(rule: dict[str, Any]) -> None:
    name, annotations = rule["alert"], rule["annotations"]
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert annotations.keys() == {"summary", "description", "runbook_url"}
    assert annotations["summary"] and annotations["description"].endswith(".")
    for command in re.findall(r"`elasticd (\w+)", annotations["description"]):
        assert cli.get_command(click.Context(cli), command) is not None, command
    assert annotations["runbook_url"].endswith(f"/docs/runbooks.html#{name.lower()}")
    (section,) = re.findall(rf"^## {name}\n\n(.+?)(?=\n#|\Z)", RUNBOOKS, re.MULTILINE | re.DOTALL)
    assert len(section) > 80


def test_every_runbook_is_of_an_alert() -> None:
    assert set(re.findall(r"^## (\w+)", RUNBOOKS, re.MULTILINE)) == set(ALERTS)
    alertmanager = (HERE / "alertmanager.yml").read_text()
    assert set(re.findall(r"Elasticd\w+", RUNBOOKS + alertmanager)) <= set(ALERTS)


def test_prometheus_scrapes_the_agents_and_etcd_of_the_compose_file() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    config = yaml.safe_load((HERE / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    (dns,) = jobs["elasticd"]["dns_sd_configs"]
    agents = [s for name, s in compose.items() if name.startswith("agent")]
    for agent in agents:
        assert dns["names"] == agent["networks"]["default"]["aliases"]
        assert agent["environment"]["ELASTICD_HTTP"] == f"0.0.0.0:{dns['port']}"
    (etcd,) = jobs["etcd"]["static_configs"]
    assert etcd["targets"] == ["etcd:2381"] and "etcd" in compose


@pytest.mark.parametrize(
    "wrong",
    [
        "elasticd_nonsense > 1",
        'elasticd_world_size{slot="0"}',
        'elasticd_time_seconds_total{kind="spent"}',
        'elasticd_rounds_total{cause=~"node_lost|hurricane"}',
        "elasticd_step_seconds",
        "elasticd_world_size_bucket",
        "sum by (pid) (elasticd_worker_up)",
    ],
)
def test_metrics_missing_in_the_catalogue_are_noticed(wrong: str) -> None:
    assert complaints(wrong)
