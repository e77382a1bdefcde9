"""The compose file, as far as it can be checked without Docker."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from elasticd.etcd.embedded import find_etcd
from tests.cli.commandline import planned

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
AGENTS = {name: s for name, s in SERVICES.items() if name.startswith("agent")}


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def judged_by_its_specification(path: Path) -> subprocess.CompletedProcess[str]:
    checker = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    return subprocess.run([*checker, str(path)], capture_output=True, text=True, timeout=60)


def test_the_file_follows_the_compose_specification_and_the_check_finds_wrong_words(tmp_path: Path) -> None:
    done = judged_by_its_specification(DEPLOY / "compose.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((DEPLOY / "compose.yaml").read_text().replace("stop_grace_period:", "stop_grace:"))
    done = judged_by_its_specification(wrong)
    assert done.returncode == 1 and "stop_grace" in done.stdout


def test_every_file_that_compose_names_exists() -> None:
    volumes = set(COMPOSE["volumes"])
    used = set()
    for service in SERVICES.values():
        assert set(service.get("depends_on", ())) <= set(SERVICES)
        conditions = service.get("depends_on", ())
        for name, how in conditions.items() if isinstance(conditions, dict) else ():
            assert how["condition"] == "service_healthy" and "healthcheck" in SERVICES[name]
        for volume in service.get("volumes", ()):
            source, target, *mode = volume.split(":")
            assert target.startswith("/") and mode in ([], ["ro"])
            if source.startswith("./"):
                assert mode == ["ro"]
            else:
                used.add(source)
    assert used == volumes


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_pinned_and_root_needs_a_reason(name: str) -> None:
    image = SERVICES[name]["image"]
    assert re.fullmatch(r"\S+:v?\d+\.\d+\.\d+(@sha256:[0-9a-f]{64})?", image)
    assert SERVICES[name]["cap_drop"] == ["ALL"]
    assert SERVICES[name]["security_opt"] == ["no-new-privileges:true"]
    user = SERVICES[name].get("user")
    if name in AGENTS:  # the user of the image
        *_, user = re.findall(r"^USER (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert user is not None
    if user.startswith("0:"):
        lines = (DEPLOY / "compose.yaml").read_text().splitlines()
        (line,) = [line for line in lines if f'user: "{user}"' in line]
        assert "# root" in line, "with the reason beside it"


def test_nothing_can_be_reached_from_other_machines() -> None:
    for service in SERVICES.values():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")


def test_no_user_of_the_image_has_a_password_or_can_log_in() -> None:
    env = SERVICES["grafana"]["environment"]
    assert env["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert env["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert env["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    for name, service in SERVICES.items():
        assert not re.search(r"password|secret|token", str(service), re.IGNORECASE), name


def test_with_tls_each_service_gets_files_that_are_made_and_an_agent_those_of_its_job_alone(
    tmp_path: Path,
) -> None:
    done = judged_by_its_specification(DEPLOY / "compose.tls.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    told = yaml.safe_load((DEPLOY / "compose.tls.yaml").read_text())
    assert told["name"] == COMPOSE["name"] and set(told["services"]) <= set(SERVICES)
    made = tmp_path / "certs"
    words = ["sh", DEPLOY / "certs.sh", "--job", "gpt", made, "etcd"]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    for name, service in told["services"].items():
        targets = {}
        for volume in service["volumes"]:
            source, target, mode = volume.split(":")
            assert source.startswith("./certs/") and (made / Path(source).name).exists() and mode == "ro"
            targets[target] = made / Path(source).name
        if name not in AGENTS:
            continue
        assert {path.name for path in targets.values()} == {"ca.crt", "job-gpt.crt", "job-gpt.key"}
        env = {
            key: str(value) for key, value in (AGENTS[name]["environment"] | service["environment"]).items()
        }
        env = {key: str(targets.get(value, value)) for key, value in env.items()}
        script = AGENTS[name]["command"][1].replace("/opt/elasticd/workers/", f"{ROOT}/workers/")
        etcd = planned(script, environ=env).config.etcd
        assert etcd is not None and etcd.tls and etcd.cert == made / "job-gpt.crt"


@pytest.mark.parametrize("name", AGENTS)
def test_the_real_command_line_takes_what_an_agent_is_told(name: str) -> None:
    env = {key: str(value) for key, value in AGENTS[name]["environment"].items()}
    command, *argv = AGENTS[name]["command"]
    assert command == "run", "to the image's entry point"
    there = "/opt/elasticd/workers/"
    config = planned(*(a.replace(there, f"{ROOT}/workers/") for a in argv), environ=env).config
    assert config.job == "gpt" and f"agent-{config.node}" == name
    assert config.etcd is not None and config.etcd.url == "http://etcd:2379"
    assert "etcd" in SERVICES
    assert config.etcd_wait_s
    assert config.limits.min <= len(AGENTS) * config.slots <= config.limits.max
    assert config.limits.min <= config.slots, "one of the two may be killed, and the other goes on"
    assert seconds(AGENTS[name]["stop_grace_period"]) >= config.policy.shutdown_s + 15
    port = AGENTS[name]["environment"]["ELASTICD_HTTP"].rpartition(":")[2]
    assert f"127.0.0.1:{port}/healthz" in AGENTS[name]["healthcheck"]["test"][-1]
    assert f"EXPOSE {port}" in (DEPLOY / "Dockerfile").read_text()


def test_the_build_names_a_dockerfile_and_arguments_that_there_are() -> None:
    for service in AGENTS.values():
        build = service["build"]
        dockerfile = DEPLOY / build["context"] / build["dockerfile"]
        known = set(re.findall(r"^ARG (\w+)", dockerfile.read_text(), re.MULTILINE))
        assert set(build["args"]) <= known


def test_etcd_knows_all_its_flags_and_listens_where_it_is_looked_for() -> None:
    said = subprocess.run([find_etcd(), "--help"], capture_output=True, text=True, timeout=30)
    known = set(re.findall(r"--[a-z-]+", said.stdout + said.stderr))
    command, *flags = SERVICES["etcd"]["command"]
    assert command == "etcd"
    assert {flag.partition("=")[0] for flag in flags} <= known
    assert "--advertise-client-urls=http://etcd:2379" in flags


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_knows_all_its_flags() -> None:
    said = subprocess.run(["prometheus", "--help"], capture_output=True, text=True, timeout=30)
    known = set(re.findall(r"--[a-z.-]+", said.stdout + said.stderr))
    assert {flag.partition("=")[0] for flag in SERVICES["prometheus"]["command"]} <= known


def test_prometheus_and_grafana_find_their_files() -> None:
    (config,) = [c for c in SERVICES["prometheus"]["command"] if c.startswith("--config.file=")]
    mounted = dict(v.split(":")[:2] for v in SERVICES["prometheus"]["volumes"])
    assert config == f"--config.file={mounted['./prometheus']}/prometheus.yml"
    grafana = dict(v.split(":")[:2] for v in SERVICES["grafana"]["volumes"])
    assert grafana["./grafana/provisioning"] == "/etc/grafana/provisioning"
    assert grafana["./grafana/dashboards"] == "/var/lib/grafana/dashboards"
