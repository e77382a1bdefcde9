"""The objects that k8s/ builds, and functions to read them."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = tuple(sorted(folder.name for folder in (K8S / "overlays").iterdir()))

Object = Mapping[str, Any]


@functools.cache
def build(folder: str) -> tuple[Object, ...]:
    """Return the objects that kustomize makes of a folder of k8s/. Skip the test where there is no
    kustomize."""
    command = _kustomize()
    done = subprocess.run([*command, K8S / folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{folder} cannot be built:\n{done.stderr}"
    assert not done.stderr, f"{folder} is built with complaints:\n{done.stderr}"
    return tuple(o for o in yaml.safe_load_all(done.stdout) if o)


@functools.cache
def _kustomize() -> tuple[str, ...]:
    for command in (("kustomize", "build"), ("kubectl", "kustomize")):
        if shutil.which(command[0]) is None:
            continue
        asked = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60)
        if asked.returncode == 0:
            return command
    pytest.skip("needs kubectl 1.28 or newer, or kustomize 5, on the PATH")


def overlay(name: str) -> tuple[Object, ...]:
    return build("base" if name == "base" else f"overlays/{name}")


@dataclass(frozen=True)
class Pods:
    """The pods that an object makes: their number and their template."""

    kind: str
    name: str
    count: int
    labels: Mapping[str, str]
    spec: Object

    @property
    def container(self) -> Object:
        (only,) = self.spec["containers"]
        found: Object = only
        return found

    @property
    def trains(self) -> bool:
        return self.labels.get("app.kubernetes.io/name") == "elasticd"

    def facts(self, name: str, index: int) -> dict[str, str]:
        """Return what the downward API says about the pod of this name and index."""
        instance = "app.kubernetes.io/instance"
        return {
            "metadata.name": name,
            "metadata.labels['batch.kubernetes.io/job-name']": self.name,
            "metadata.labels['batch.kubernetes.io/job-completion-index']": str(index),
            "metadata.labels['apps.kubernetes.io/pod-index']": str(index),
            "metadata.labels['jobset.sigs.k8s.io/jobset-name']": "train",
            f"metadata.labels['{instance}']": self.labels.get(instance, ""),
        }

    def env(self, facts: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the container, as the kubelet makes it. ``facts`` answers the downward
        API's paths."""
        made: dict[str, str] = {}
        for entry in self.container.get("env", ()):
            if "value" in entry:
                made[entry["name"]] = expanded(entry["value"], made)
            else:
                made[entry["name"]] = facts[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        return made

    def argv(self, env: Mapping[str, str]) -> list[str]:
        words = [*self.container["command"], *self.container.get("args", ())]
        return [expanded(word, env) for word in words]


def expanded(text: str, env: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` if the name is known by then. Kubernetes leaves other names as they are."""
    for name, value in env.items():
        text = text.replace(f"$({name})", value)
    return text


def pods(objects: tuple[Object, ...]) -> list[Pods]:
    """Return all pods that these objects make, of any kind of object."""
    return [found for o in objects for found in _pods(o)]


def _pods(o: Object) -> Iterator[Pods]:
    spec, name = o.get("spec", {}), o["metadata"]["name"]
    match o["kind"]:
        case "Job":
            yield _made(o["kind"], name, spec["parallelism"], spec["template"])
        case "StatefulSet":
            yield _made(o["kind"], name, spec["replicas"], spec["template"])
        case "TrainingRuntime":
            for replicated in spec["template"]["spec"]["replicatedJobs"]:
                job = replicated["template"]["spec"]
                yield _made(o["kind"], name, job["parallelism"], job["template"])
        case "Deployment" | "DaemonSet" | "Pod" | "CronJob" | "ReplicaSet" | "JobSet":
            raise AssertionError(f"say here where the pods of a {o['kind']} are")


def _made(kind: str, name: str, count: int, template: Object) -> Pods:
    return Pods(kind, name, count, template["metadata"].get("labels", {}), template["spec"])


def of_kind(objects: tuple[Object, ...], kind: str) -> list[Object]:
    return [o for o in objects if o["kind"] == kind]


def matches(selector: Object, labels: Mapping[str, str]) -> bool:
    assert not selector.get("matchExpressions"), "not understood here"
    wanted = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items())


def quantity(text: str | int) -> float:
    """Return a quantity such as 4Gi, 500m or 2 as a number."""
    text = str(text)
    for suffix, factor in {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "m": 1e-3, "": 1}.items():
        if suffix and text.endswith(suffix):
            return float(text.removesuffix(suffix)) * factor
    return float(text)


def endpoints(urls: str) -> list[tuple[str, str, int]]:
    """Return the scheme, host and port of each."""
    from urllib.parse import urlsplit

    split = [urlsplit(url) for url in urls.split(",")]
    return [(url.scheme, url.hostname or "", url.port or 0) for url in split]


def http_gets(container: Object) -> dict[str, Object]:
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    return {probe: container[probe]["httpGet"] for probe in probes if probe in container}
