"""k8s/README.md is true: its commands, names, flags and files exist."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml

from elasticd.cli.main import cli
from elasticd.cli.policy import SETTINGS
from elasticd.cli.run_command import run
from tests.cli.commandline import VARIABLES
from tests.k8s.kinds import KINDS
from tests.k8s.manifests import K8S, OVERLAYS, ROOT, build, of_kind, overlay, pods

GUIDE = (K8S / "README.md").read_text()
COMPONENTS = sorted(folder.name for folder in (K8S / "components").iterdir())


def commands() -> list[list[str]]:
    """Return the commands of the sh blocks, word by word, without comments."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", GUIDE, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def objects_named() -> set[str]:
    built = [o for name in ["base", *OVERLAYS] for o in overlay(name)]
    return {f"{o['kind'].lower()}/{o['metadata']['name']}" for o in built}


def test_the_guide_names_every_overlay_and_component() -> None:
    for name in OVERLAYS:
        assert f"(overlays/{name})" in GUIDE
    for name in COMPONENTS:
        assert f"components/{name}" in GUIDE


def test_links_and_folders_exist() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", GUIDE):
        assert (K8S / link).exists(), link
    for words in commands():
        for before, after in itertools.pairwise(words):
            if before == "-k" and after != ".":
                assert (ROOT / after / "kustomization.yaml").exists(), after
    assert (ROOT / "deploy" / "certs.sh").exists()


def test_the_guide_s_commands_name_objects_that_exist() -> None:
    known = objects_named()
    seen = 0
    for words in commands():
        if words[:3] != ["kubectl", "-n", "elasticd"]:
            continue
        seen += 1
        verb, *rest = words[3:]
        match verb:
            case "exec" | "port-forward":
                what = rest[0] if "/" in rest[0] else f"pod/{rest[0]}"
                assert what in known | {"pod/etcd-0"}, words
            case "patch" | "scale" | "delete" if rest[0] in ("job", "statefulset"):
                assert f"{rest[0]}/{rest[1]}" in known, words
            case "set" | "rollout":
                assert f"{rest[1]}/{rest[2]}" in known, words
    assert seen > 10


def test_what_is_run_in_pods_are_real_commands() -> None:
    assert isinstance(cli, click.Group)
    for words in commands():
        if "--" in words and words[words.index("--") + 1] == "elasticd":
            _, name, *args = words[words.index("--") + 1 :]
            command = cli.get_command(click.Context(cli), name)
            assert command is not None, name
            known = {option for parameter in command.params for option in parameter.opts}
            assert {word for word in args if word.startswith("--")} <= known, words


def test_flags_and_variables_are_real() -> None:
    assert set(re.findall(r"\b(?:ELASTICD|PET)_[A-Z_]+\b", GUIDE)) <= VARIABLES
    ours = {option for p in run.params for option in p.opts}
    assert "`--node-ttl`" in GUIDE and "--node-ttl" in ours
    assert "`etcd_grace_s`" in GUIDE and "etcd_grace_s" in SETTINGS


def test_growing_is_a_change_that_kubernetes_takes() -> None:
    (patch,) = [yaml.safe_load(words[words.index("-p") + 1]) for words in commands() if "-p" in words]
    assert patch["spec"]["parallelism"] == patch["spec"]["completions"]
    assert set(patch["spec"]) == {"parallelism", "completions"}


def test_certificates_are_made_for_the_members_and_put_where_pods_look() -> None:
    (etcd,) = [p for p in pods(overlay("base")) if not p.trains]
    members = [f"etcd-{i}.etcd" for i in range(etcd.count)]
    (made,) = [words for words in commands() if words[0] == "deploy/certs.sh"]
    assert made[1:4] == ["--job", "train", "certs"] and made[4:] == members
    looked_for = {
        v["secret"]["secretName"] for p in pods(overlay("base")) for v in p.spec["volumes"] if "secret" in v
    }
    created = {words[6]: words[7:] for words in commands() if words[3:6] == ["create", "secret", "generic"]}
    del created["elasticd-http"]  # files of the component http-tls, whose certificate is the reader's own
    assert set(created) == looked_for
    for sources in created.values():
        keys = [re.match(r"--from-file=([a-z.]+)=certs/([a-z.-]+)$", source) for source in sources]
        assert {key[1] for key in keys if key} == {"ca.crt", "tls.crt", "tls.key"}


def test_the_kustomization_to_copy_can_be_built(tmp_path: Path) -> None:
    (block,) = [b for b in re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL) if "kind: Kustomization" in b]
    text = "\n".join(line.removeprefix("   ") for line in block.splitlines())
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "kustomization.yaml").write_text(text.replace("../elasticd", os.path.relpath(ROOT, mine)))
    objects = build(str(mine))
    (made,) = [p for p in pods(objects) if p.trains]
    assert made.container["image"] == "registry.example.com/elasticd:0.1.0-cuda"
    assert made.container["args"] == ["/data/train.py", "--your", "--flags"]
    certificates = {c["spec"]["secretName"]: c["spec"] for c in of_kind(objects, "Certificate")}
    for o in of_kind(objects, "Certificate") + of_kind(objects, "Issuer"):
        jsonschema.validate(o, KINDS[o["apiVersion"], o["kind"]])
    wanted = {v["secret"]["secretName"] for p in pods(objects) for v in p.spec["volumes"] if "secret" in v}
    assert wanted <= set(certificates)
    members = {f"etcd-{i}.etcd" for i in range(3)}
    for secret in ("etcd-server-tls", "etcd-peer-tls"):
        assert members <= set(certificates[secret]["dnsNames"])
    assert "dnsNames" not in certificates["train-etcd-tls"]
    assert certificates["train-etcd-tls"]["commonName"] == "train", "the job, whose role in etcd is its own"


def test_only_etcds_members_have_a_certificate_of_their_authority() -> None:
    objects = yaml.safe_load_all((K8S / "components" / "cert-manager" / "certificates.yaml").read_text())
    made = [o["spec"] for o in objects if o["kind"] == "Certificate"]
    issued = {c["secretName"]: c["issuerRef"]["name"] for c in made if not c.get("isCA")}
    assert {secret for secret, issuer in issued.items() if issuer == issued["etcd-peer-tls"]} == {
        "etcd-peer-tls"
    }
    (etcd,) = [p for p in pods(overlay("base")) if not p.trains]
    (told,) = [a.partition("=")[2] for a in etcd.argv({}) if a.startswith("--peer-trusted-ca-file=")]
    (mount,) = [m["name"] for m in etcd.container["volumeMounts"] if told == f"{m['mountPath']}/ca.crt"]
    (volume,) = [v for v in etcd.spec["volumes"] if v["name"] == mount]
    assert volume["secret"]["secretName"] == "etcd-peer-tls"


def claim_of_the_guide() -> list[Any]:
    """Return the volumes that the guide gives, so that snapshots outlive all pods."""
    (block,) = [b for b in re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL) if "claimName" in b]
    volumes: list[Any] = yaml.safe_load(block)["volumes"]
    return volumes


def test_the_claim_to_copy_replaces_the_folder() -> None:
    (volume,) = claim_of_the_guide()
    made = next(p for p in pods(overlay("base")) if p.trains)
    assert volume["name"] in {v["name"] for v in made.spec["volumes"]}
    assert volume["emptyDir"] is None


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5])
def test_the_table_of_exit_codes_is_the_policy(code: int) -> None:
    (row,) = re.findall(rf"^\| {code} \|(.*)\|$", GUIDE, re.MULTILINE)
    _, job, _ = (cell.strip() for cell in row.split("|"))
    (manifest,) = of_kind(overlay("base"), "Job")
    rules: list[Any] = manifest["spec"]["podFailurePolicy"]["rules"][1:]
    actions = {c: rule["action"] for rule in rules for c in rule["onExitCodes"]["values"]}
    assert job.startswith(
        {"FailJob": "failed", "Ignore": "a new pod, not counted"}.get(actions.get(code, ""), "complete")
    )
