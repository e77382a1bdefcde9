"""The chart makes the same objects as kustomize, which the other tests of this folder check."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from elasticd import __version__
from tests.k8s.manifests import K8S, ROOT, Object, Pods, of_kind, overlay, pods
from tests.k8s.test_guide import commands

VALUES = sorted(path.stem for path in (K8S / "values").glob("*.yaml"))


class Refused(Exception):
    pass


HELM = """
import json, sys
import helm_python as helm

folder, release, values = json.load(sys.stdin)
try:
    with helm.Chart.load(folder) as chart:
        print(json.dumps(chart.render(values, name=release, namespace="elasticd")))
    found = helm.lint(folder, values, strict=True)["messages"]
except helm.HelmError as error:
    sys.exit(str(error))
if worse := [one for one in found if one["severity"] > 1]:
    sys.exit(str(worse))
"""


def chart(release: str, **values: Any) -> tuple[Object, ...]:
    """Return the objects that Helm makes. Raises Refused if Helm, or its linter, has a complaint.

    Helm is a library in Go, which brings threads and signal handlers along. So it runs in a process of its
    own.
    """
    asked = json.dumps([str(K8S), release, values])
    argv = [sys.executable, "-c", HELM]
    done = subprocess.run(argv, input=asked, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise Refused(done.stderr)
    made = json.loads(done.stdout).values()
    return tuple(o for text in made for o in yaml.safe_load_all(text) if o)


def values(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((K8S / "values" / f"{name}.yaml").read_text())
    return found


def plain(value: Any) -> Any:
    """Return the objects with named lists sorted by name, and without the namespace, which a release
    brings."""
    match value:
        case dict():
            return {key: plain(inner) for key, inner in value.items() if key != "namespace"}
        case list():
            plains = [plain(inner) for inner in value]
            named = all(isinstance(inner, dict) and "name" in inner for inner in plains)
            return sorted(plains, key=lambda inner: inner["name"]) if named else plains
    return value


def by_name(objects: tuple[Object, ...]) -> dict[tuple[str, str], Any]:
    return {(o["kind"], o["metadata"]["name"]): plain(o) for o in objects}


def trainers(objects: tuple[Object, ...]) -> Pods:
    (found,) = [made for made in pods(objects) if made.trains]
    return found


@pytest.mark.parametrize("name", ["base", *VALUES])
def test_the_objects_are_those_of_kustomize(name: str) -> None:
    made = chart("train", **(values(name) if name in VALUES else {}))
    expected = by_name(overlay(name))
    del expected["Namespace", "elasticd"]  # a release is put into a namespace
    assert by_name(made) == expected
    assert len(made) == len(expected)
    for index in (0, 1):
        facts = trainers(made).facts(f"train-{index}", index) | {"status.podIP": "10.0.0.1"}
        assert trainers(made).env(facts) == trainers(overlay(name)).env(facts), "which the order decides"


def test_a_release_has_the_name_of_its_job() -> None:
    text = yaml.safe_dump_all(chart("gpt"))
    assert "gpt-etcd-tls" in text
    assert not re.search(r"\btrain\b", text)


def test_an_upgrade_to_another_number_of_nodes_is_a_change_that_kubernetes_takes() -> None:
    (before,), (after,) = (of_kind(chart("train", nodes=nodes), "Job") for nodes in (3, 6))
    number = {"parallelism": 3, "completions": 3}
    assert after["spec"] == {**before["spec"], "parallelism": 6, "completions": 6}
    assert number.items() <= before["spec"].items()


def test_variables_volumes_and_fields_of_pods_are_the_users() -> None:
    made = trainers(
        chart(
            "train",
            env={"ELASTICD_MAX": "8", "OMP_NUM_THREADS": None, "MINE": "yes"},
            claim="snapshots",
            volumes=[{"name": "data", "emptyDir": {}}],
            volumeMounts=[{"name": "data", "mountPath": "/data"}],
            pod={"nodeSelector": {"pool": "{{ .Release.Name }}"}},
        )
    )
    given = {entry["name"]: entry.get("value") for entry in made.container["env"]}
    assert (given["ELASTICD_MAX"], given["MINE"]) == ("8", "yes")
    assert "OMP_NUM_THREADS" not in given
    assert {"name": "state", "persistentVolumeClaim": {"claimName": "snapshots"}} in made.spec["volumes"]
    assert made.spec["volumes"][-1]["name"] == made.container["volumeMounts"][-1]["name"] == "data"
    assert made.spec["nodeSelector"] == {"pool": "train"}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"replicas": 3}, "replicas"),
        ({"nodes": 0}, "nodes"),
        ({"env": {"ELASTICD_MAX": 8}}, "ELASTICD_MAX"),
        ({"pod": {"restartPolicy": "Always"}}, "restartPolicy"),
        ({"etcd": {"kind": "other"}}, "kind"),
        ({"etcd": {"kind": "existing"}}, "etcd.endpoints is empty"),
    ],
)
def test_values_that_mean_nothing_are_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        chart("train", **wrong)


def test_the_chart_is_of_the_version_whose_image_it_starts() -> None:
    described = yaml.safe_load((K8S / "Chart.yaml").read_text())
    assert described["version"] == described["appVersion"] == __version__


def test_each_file_of_values_has_the_name_of_its_overlay() -> None:
    assert VALUES and all((K8S / "overlays" / name).is_dir() for name in VALUES)


def test_the_guide_installs_this_chart_with_values_that_are_there() -> None:
    told = [words for words in commands() if words[0] == "helm"]
    assert {words[1] for words in told} == {"install", "upgrade", "uninstall"}
    for words in told:
        assert words[2:5] == ["-n", "elasticd", "train"]
        assert (ROOT / words[5] / "Chart.yaml").exists() if words[5:] else words[1] == "uninstall"
        assert all((ROOT / path).exists() for path in words if path.startswith("k8s/"))
