"""In a cluster, the Prometheus operator and Grafana get exactly the files of ``deploy/``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.cli.commandline import VARIABLES
from tests.k8s.kinds import KINDS
from tests.k8s.manifests import K8S, ROOT, Object, Pods, build, matches, of_kind, overlay, pods
from tests.k8s.test_schemas import VERSIONS

DEPLOY = ROOT / "deploy"
RULES: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))


def test_the_rules_are_those_of_deploy() -> None:
    (rule,) = of_kind(overlay("monitoring"), "PrometheusRule")
    assert rule["spec"] == {"groups": RULES}


def dashboard_maps(objects: tuple[Object, ...]) -> list[Object]:
    return [
        m for m in of_kind(objects, "ConfigMap") if m["metadata"].get("labels", {}).get("grafana_dashboard")
    ]


def test_the_dashboards_are_the_very_files_of_deploy() -> None:
    shown = {text for m in dashboard_maps(overlay("monitoring")) for text in m["data"].values()}
    assert shown == {path.read_text() for path in DASHBOARDS}


def test_dashboards_do_not_overwrite_each_other_or_others() -> None:
    """Grafana's sidecar writes each key as a file, all into one folder."""
    maps = dashboard_maps(overlay("monitoring"))
    keys = [key for m in maps for key in m["data"]]
    assert len(set(keys)) == len(keys) == len(DASHBOARDS)
    assert all(re.fullmatch(r"elasticd-[a-z]+\.json", key) for key in keys)
    for made in maps:
        assert "binaryData" not in made and len(str(made["data"])) < 250_000, "what `kubectl apply` can note"


def test_targets_bear_the_job_that_the_rules_ask_for() -> None:
    """The operator calls a target's job <namespace>/<name>, unless a label is named that has the
    job's name."""
    asked = set(re.findall(r'\bup\{job="([^"]+)"\}', str(RULES)))
    assert asked
    objects = overlay("monitoring")
    told = {
        made.labels[monitor["spec"]["jobLabel"]]
        for monitor in of_kind(objects, "PodMonitor")
        for made in pods(objects)
        if matches(monitor["spec"]["selector"], made.labels)
    }
    assert asked <= told
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert told <= {config["job_name"] for config in scraped}, "as outside of Kubernetes"


def built(tmp_path: Path, base: str, *components: str) -> tuple[Object, ...]:
    made = {
        "resources": [os.path.relpath(K8S / "overlays" / base, tmp_path)],
        "components": [os.path.relpath(K8S / "components" / name, tmp_path) for name in components],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(made))
    return build(str(tmp_path))


def monitor_of(objects: tuple[Object, ...]) -> tuple[Pods, Object]:
    """Return the pods that train, and the only PodMonitor that watches them."""
    (trains,) = [p for p in pods(objects) if p.trains]
    (monitor,) = [m for m in of_kind(objects, "PodMonitor") if matches(m["spec"]["selector"], trains.labels)]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == "http" and "http" in {p["name"] for p in trains.container["ports"]}
    return trains, monitor


def test_kubeflows_overlay_can_be_watched(tmp_path: Path) -> None:
    objects = built(tmp_path, "kubeflow", "monitoring")
    assert len(of_kind(objects, "PrometheusRule")) == 1 and len(dashboard_maps(objects)) == len(DASHBOARDS)
    monitor_of(objects)


@pytest.mark.parametrize("base", ["monitoring", "gpu", "spot", "pool", "existing-etcd", "kueue"])
def test_any_other_overlay_can_be_watched_over_tls_with_a_token(base: str, tmp_path: Path) -> None:
    objects = built(tmp_path, base, *(["monitoring"] if base != "monitoring" else []), "http-tls")
    assert len(of_kind(objects, "PrometheusRule")) == 1 and len(dashboard_maps(objects)) == len(DASHBOARDS)
    trains, monitor = monitor_of(objects)
    for version in VERSIONS:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": trains.spec}
        kubernetes_validate.validate(pod, version, strict=True)
    env = {entry["name"]: entry.get("value", "") for entry in trains.container["env"]}
    (mount,) = [m for m in trains.container["volumeMounts"] if m["name"] == "http"]
    (secret,) = [v["secret"]["secretName"] for v in trains.spec["volumes"] if v["name"] == "http"]
    for variable in ("ELASTICD_HTTP_CERT", "ELASTICD_HTTP_KEY", "ELASTICD_HTTP_TOKEN_FILE"):
        assert variable in VARIABLES and env[variable].startswith(f"{mount['mountPath']}/")
    probes = [trains.container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert {probe["scheme"] for probe in probes} == {"HTTPS"}
    assert {probe["path"] for probe in probes} == {"/healthz", "/readyz"}, "which need no token"
    jsonschema.validate(monitor, KINDS[monitor["apiVersion"], "PodMonitor"])
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["authorization"]["credentials"] == {"name": secret, "key": "token"}
    assert endpoint["tlsConfig"]["ca"]["secret"] == {"name": secret, "key": "ca.crt"}
