"""Three Kubernetes versions accept every object, and so does the schema of each custom kind."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.k8s.kinds import KINDS
from tests.k8s.manifests import OVERLAYS, Object, overlay, pods

VERSIONS = (
    "1.31",
    "1.34",
    "1.37",
)  # the oldest version whose elastic Indexed Jobs are stable; one between; the newest
TRAINER = "trainer.kubeflow.org/v1alpha1"


def is_custom(o: Object) -> bool:
    group = o["apiVersion"].partition("/")[0]
    return "x-k8s.io" in group or ("." in group and not group.endswith(".k8s.io"))


def objects(*, custom: bool) -> list[Object]:
    """Return the objects of the base and of all overlays, each once."""
    found = {json.dumps(o, sort_keys=True): o for name in ["base", *OVERLAYS] for o in overlay(name)}
    return [o for o in found.values() if is_custom(o) == custom]


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_every_object_to_the_letter(version: str) -> None:
    for o in objects(custom=False):
        kubernetes_validate.validate(o, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_pods_inside_kubeflows_runtime_are_pods(version: str) -> None:
    """Kubernetes' own kinds have a schema for their pods."""
    for made in pods(overlay("kubeflow")):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": made.spec}
        kubernetes_validate.validate(pod, version, strict=True)


def test_a_wrong_word_would_be_seen() -> None:
    (job, *_) = [dict(o) for o in overlay("base") if o["kind"] == "Job"]
    wrong = {**job, "spec": {**job["spec"], "paralelism": 3}}
    for version in VERSIONS:
        with pytest.raises(kubernetes_validate.ValidationError, match="paralelism"):
            kubernetes_validate.validate(wrong, version, strict=True)


def test_custom_kinds_are_as_their_makers_publish_them() -> None:
    for o in objects(custom=True):
        if o["apiVersion"] != TRAINER:
            jsonschema.validate(o, KINDS[o["apiVersion"], o["kind"]])


def test_kubeflows_own_types_read_all_of_it() -> None:
    from kubeflow_trainer_api import models

    known = {
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    }
    seen = set()
    for o in overlay("kubeflow"):
        if o["apiVersion"] == TRAINER:
            seen.add(o["kind"])
            read = known[o["kind"]].from_dict(dict(o)).to_dict()
            assert not (lost := missing(o, read)), f"{o['kind']} does not know {lost}"
    assert seen == set(known)


def missing(wanted: Any, have: Any, path: str = "") -> list[str]:
    """Return what is in ``wanted`` and not in ``have``: a reader drops fields that it does not know."""
    lost: list[str] = []
    match wanted:
        case dict():
            for key, value in wanted.items():
                if key in have:
                    lost += missing(value, have[key], f"{path}.{key}")
                elif value not in ({}, None):
                    lost.append(f"{path}.{key}")
        case list():
            assert len(wanted) == len(have), path
            for i, (one, other) in enumerate(zip(wanted, have, strict=True)):
                lost += missing(one, other, f"{path}[{i}]")
        case _:
            if str(wanted) != str(have):
                lost.append(f"{path}: {wanted!r} is read as {have!r}")
    return lost
