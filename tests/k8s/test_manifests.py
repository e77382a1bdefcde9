"""The manifests agree with each other, with Kubernetes' strictest rules, and with the real command lines."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from elasticd.cli.run_configuration import Planned
from elasticd.etcd.embedded import find_etcd
from tests.cli import commandline
from tests.k8s.manifests import (
    K8S,
    OVERLAYS,
    ROOT,
    Object,
    Pods,
    endpoints,
    http_gets,
    matches,
    of_kind,
    overlay,
    pods,
    quantity,
)

ALL = ["base", *OVERLAYS]
RETRIED = {3, 4, 130, 143}  # as in docs/exit-codes.md
FINAL = {1, 2, 5, 6, 7}
GPUS = 8


def trainers(name: str) -> Pods:
    (found,) = [p for p in pods(overlay(name)) if p.trains]
    return found


def stores(name: str) -> list[Pods]:
    return [p for p in pods(overlay(name)) if not p.trains]


# ---------------------------------------------------------------- pod security

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


@pytest.mark.parametrize("name", ALL)
def test_all_pods_pass_the_restricted_standard(name: str) -> None:
    for made in pods(overlay(name)):
        spec = made.spec
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), made
        own = spec["securityContext"]
        assert not {"sysctls", "seLinuxOptions", "appArmorProfile", "windowsOptions"} & set(own)
        assert own["runAsNonRoot"] is True and own["runAsUser"] > 0 and own["runAsGroup"] > 0
        assert own["seccompProfile"] == {"type": "RuntimeDefault"}
        for volume in spec.get("volumes", ()):
            assert set(volume) - {"name"} <= VOLUMES, volume
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            inner = container["securityContext"]
            assert inner == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert not any("hostPort" in port for port in container.get("ports", ()))


@pytest.mark.parametrize("name", ALL)
def test_no_pod_can_talk_to_the_api_server_or_hears_of_services_by_its_environment(name: str) -> None:
    for made in pods(overlay(name)):
        assert made.spec["automountServiceAccountToken"] is False
        # A Service named elasticd would otherwise set ELASTICD_PORT, and one named etcd ETCD_PORT.
        assert made.spec["enableServiceLinks"] is False


@pytest.mark.parametrize("name", ALL)
def test_the_namespace_lets_nothing_else_in(name: str) -> None:
    (namespace,) = of_kind(overlay(name), "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    everywhere = {"Namespace", "ResourceFlavor", "ClusterQueue"}
    for o in overlay(name):
        if o["kind"] not in everywhere:
            assert o["metadata"]["namespace"] == namespace["metadata"]["name"], o["metadata"]


# ---------------------------------------------------------------- images, secrets


@pytest.mark.parametrize("name", ALL)
def test_images_are_pinned(name: str) -> None:
    images = {c["image"] for p in pods(overlay(name)) for c in p.spec["containers"]}
    for image in images:
        assert re.fullmatch(r"\S+:v?\d+\.\d+\.\d+(-[a-z0-9]+)?(@sha256:[0-9a-f]{64})?", image), image


def test_etcd_is_of_a_version_that_is_maintained_and_loses_no_data() -> None:
    for name in ALL:
        for made in stores(name):
            version = tuple(int(n) for n in made.container["image"].rpartition(":v")[2].split("."))
            assert version >= (3, 6, 11) or (3, 5, 30) <= version < (3, 6), version


FORBIDDEN = {
    "a secret": r"kind:\s*Secret\b(?!Provider)|-----BEGIN [A-Z ]*PRIVATE KEY|password\s*[:=]\s*['\"]?\w",
    "an image that moves": r":latest\b|newTag:\s*['\"]?latest",
    "root": r"runAsUser:\s*0\b|runAsNonRoot:\s*false|privileged:\s*true|^USER\s+(root|0)\b",
}
REASON = re.compile(r"#.*\S")


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_for_a_cluster_holds(what: str) -> None:
    found = []
    for folder in (K8S, ROOT / "deploy"):
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
                if re.search(FORBIDDEN[what], line, re.IGNORECASE if what == "a secret" else 0):
                    if what == "root" and REASON.search(line):
                        continue
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found


# ---------------------------------------------------------------- resources, volumes


@pytest.mark.parametrize("name", ALL)
def test_resources_are_asked_for_and_memory_is_bounded(name: str) -> None:
    for made in pods(overlay(name)):
        resources = made.container["resources"]
        assert {"cpu", "memory"} <= set(resources["requests"])
        assert quantity(resources["limits"]["memory"]) >= quantity(resources["requests"]["memory"])
        if made.trains:  # a node of the job must not be evicted for memory that it was not promised
            assert resources["limits"]["memory"] == resources["requests"]["memory"]
        gpus = {r: resources[r].get("nvidia.com/gpu") for r in ("requests", "limits")}
        assert gpus["requests"] == gpus["limits"]


@pytest.mark.parametrize("name", ALL)
def test_mounts_and_volumes_agree(name: str) -> None:
    claims = {
        c["metadata"]["name"]
        for s in of_kind(overlay(name), "StatefulSet")
        for c in s["spec"].get("volumeClaimTemplates", ())
    }
    for made in pods(overlay(name)):
        volumes = {v["name"] for v in made.spec.get("volumes", ())}
        mounted = {m["name"] for m in made.container["volumeMounts"]}
        assert volumes <= mounted <= volumes | claims


@pytest.mark.parametrize("name", ALL)
def test_shared_memory_is_memory_and_fits_into_the_limit(name: str) -> None:
    made = trainers(name)
    (mount,) = [m["name"] for m in made.container["volumeMounts"] if m["mountPath"] == "/dev/shm"]
    (volume,) = [v["emptyDir"] for v in made.spec["volumes"] if v["name"] == mount]
    assert volume["medium"] == "Memory"
    limit = quantity(made.container["resources"]["limits"]["memory"])
    assert quantity(volume["sizeLimit"]) <= limit / 2


@pytest.mark.parametrize("name", ALL)
def test_what_is_written_to_has_a_place_that_can_be_written(name: str) -> None:
    made = trainers(name)
    places = [m["mountPath"] for m in made.container["volumeMounts"] if not m.get("readOnly")]
    env = env_of(made, 0)
    for variable in ("HOME", "XDG_STATE_HOME"):
        assert any(env[variable] == p or env[variable].startswith(f"{p}/") for p in places), variable
    assert "/tmp" in places


# ---------------------------------------------------------------- selectors, ports


@pytest.mark.parametrize("name", ALL)
def test_every_selector_selects_something(name: str) -> None:
    objects = overlay(name)
    labels = [p.labels for p in pods(objects)]
    selectors = [
        *[{"matchLabels": s["spec"]["selector"]} for s in of_kind(objects, "Service")],
        *[b["spec"]["selector"] for b in of_kind(objects, "PodDisruptionBudget")],
        *[m["spec"]["selector"] for m in of_kind(objects, "PodMonitor")],
        *[n["spec"]["podSelector"] for n in of_kind(objects, "NetworkPolicy")],
        *[c["labelSelector"] for p in pods(objects) for c in p.spec.get("topologySpreadConstraints", ())],
    ]
    for rule in policy_rules(objects, "ingress", "egress"):
        selectors += [p["podSelector"] for p in rule.get("from", rule.get("to", ())) if "podSelector" in p]
    if name == "existing-etcd":  # its etcd is elsewhere, so this policy does no harm
        selectors = [s for s in selectors if s["matchLabels"]["app.kubernetes.io/name"] != "etcd"]
    for selector in selectors:
        assert selector.get("matchLabels"), "selects everything"
        assert any(matches(selector, own) for own in labels), selector
    for made in of_kind(objects, "StatefulSet"):
        assert matches(made["spec"]["selector"], made["spec"]["template"]["metadata"]["labels"])


def policy_rules(objects: tuple[Object, ...], *ways: str) -> list[Object]:
    policies = of_kind(objects, "NetworkPolicy")
    return [r for p in policies for way in ways for r in p["spec"].get(way, ())]


@pytest.mark.parametrize("name", ALL)
def test_every_pod_is_under_a_network_policy_and_a_disruption_budget(name: str) -> None:
    objects = overlay(name)
    for made in pods(objects):
        policies = [
            p["spec"]
            for p in of_kind(objects, "NetworkPolicy")
            if matches(p["spec"]["podSelector"], made.labels)
        ]
        assert {"Ingress", "Egress"} <= {way for p in policies for way in p["policyTypes"]}, made.name
        budgets = [
            b for b in of_kind(objects, "PodDisruptionBudget") if matches(b["spec"]["selector"], made.labels)
        ]
        assert len(budgets) == (0 if made.count == 1 else 1), made.name


@pytest.mark.parametrize("name", ALL)
def test_a_service_leads_to_the_port_that_the_container_names(name: str) -> None:
    objects = overlay(name)
    for made in pods(objects):
        named = {p["name"]: p["containerPort"] for p in made.container["ports"]}
        assert len(set(named.values())) == len(named)
        for service in of_kind(objects, "Service"):
            if matches({"matchLabels": service["spec"]["selector"]}, made.labels):
                for port in service["spec"]["ports"]:
                    assert named[port["targetPort"]] == port["port"]
        for probe in http_gets(made.container).values():
            assert probe["port"] in named
        for monitor in of_kind(objects, "PodMonitor"):
            if matches(monitor["spec"]["selector"], made.labels):
                assert {e["port"] for e in monitor["spec"]["podMetricsEndpoints"]} <= set(named)
        for policy in of_kind(objects, "NetworkPolicy"):
            if matches(policy["spec"]["podSelector"], made.labels):
                for rule in policy["spec"].get("ingress", ()):
                    assert {p["port"] for p in rule.get("ports", ())} <= set(named)
    for rule in policy_rules(objects, "egress"):
        for peer in (p["podSelector"] for p in rule.get("to", ()) if "podSelector" in p):
            for made in (m for m in pods(objects) if matches(peer, m.labels)):
                named = {p["name"] for p in made.container["ports"]}
                assert {p["port"] for p in rule.get("ports", ())} <= named
    agent = trainers(name)
    assert env_of(agent, 0)["ELASTICD_HTTP"] == f"0.0.0.0:{port_named(agent, 'http')}"


def port_named(made: Pods, name: str) -> int:
    (port,) = [p["containerPort"] for p in made.container["ports"] if p["name"] == name]
    return int(port)


@pytest.mark.parametrize("name", [n for n in ALL if n != "existing-etcd"])
def test_the_job_looks_for_etcd_where_it_is_and_is_let_there(name: str) -> None:
    objects = overlay(name)
    (etcd,) = stores(name)
    (service,) = [s for s in of_kind(objects, "Service") if s["metadata"]["name"] == "etcd"]
    members = {f"etcd-{i}.etcd" for i in range(etcd.count)}
    found = endpoints(env_of(trainers(name), 0)["ELASTICD_ETCD"])
    hosts = {host for _, host, _ in found}
    assert hosts == (members if service["spec"].get("clusterIP") == "None" else {"etcd"})
    assert {port for _, _, port in found} == {port_named(etcd, "client")}
    (listening,) = [a for a in etcd.argv({}) if a.startswith("--listen-client-urls=")]
    ((scheme, _, port),) = endpoints(listening.partition("=")[2])
    assert {s for s, _, _ in found} == {scheme} and port == port_named(etcd, "client")
    assert ("--client-cert-auth" in etcd.argv({})) == (scheme == "https") == (name != "cpu-dev")
    cluster = [a.partition("=")[2] for a in etcd.argv({}) if a.startswith("--initial-cluster=")]
    if cluster:
        assert {m.partition("=")[0] for m in cluster[0].split(",")} == {
            f"etcd-{i}" for i in range(etcd.count)
        }
        for member in cluster[0].split(","):
            own, _, url = member.partition("=")
            assert url == f"https://{own}.etcd:{port_named(etcd, 'peer')}"


@pytest.mark.parametrize("name", [n for n in ALL if n != "existing-etcd"])
def test_what_a_policy_lets_out_another_lets_in(name: str) -> None:
    objects = overlay(name)
    job, etcd = trainers(name), stores(name)[0]
    wanted = [(job, job, None), (job, etcd, "client")]
    wanted += [(etcd, etcd, "peer")] if etcd.count > 1 else []
    for source, target, port in wanted:
        for way, own, other, side in (("egress", source, target, "to"), ("ingress", target, source, "from")):
            policies = [p["spec"] for p in of_kind(objects, "NetworkPolicy")]
            rules = [r for p in policies if matches(p["podSelector"], own.labels) for r in p.get(way, ())]
            assert any(
                matches(peer["podSelector"], other.labels)
                and ("ports" not in rule or port in {p["port"] for p in rule["ports"]})
                for rule in rules
                for peer in rule.get(side, ())
                if "podSelector" in peer
            ), f"{way}: {source.name} to {target.name}, port {port}"


# ---------------------------------------------------------------- the real command lines


def env_of(made: Pods, index: int) -> dict[str, str]:
    return made.env(made.facts(f"{made.name}-{index}", index) | {"status.podIP": "127.0.0.1"})


def planned(made: Pods, index: int, tmp_path: Path, args: list[str] | None = None) -> Planned:
    """Return what the agent of this pod would do, by the parser of the real command. Paths are moved."""
    for file in ("ca.crt", "tls.crt", "tls.key"):
        (tmp_path / file).write_text("x")
    env = env_of(made, index)
    argv = made.argv(env) if args is None else [*made.container["command"], *args]
    assert argv[:2] == ["elasticd", "run"]

    def here(text: str) -> str:
        return text.replace("/etc/elasticd/tls", str(tmp_path)).replace("/opt/elasticd", str(ROOT))

    return commandline.planned(
        *map(here, argv[2:]),
        environ={key: here(value) for key, value in env.items()},
        machine=commandline.PretendMachine(GPUS, core_count=64),
    )


@pytest.mark.parametrize("name", ALL)
def test_the_real_command_line_takes_what_the_pods_are_told(name: str, tmp_path: Path) -> None:
    made = trainers(name)
    first, second = (planned(made, i, tmp_path) for i in (0, 1))
    # An option without effect would cause another note. The address of a pod is loopback here.
    (note,) = [note for note in first.notes if "a loopback address" not in note]
    assert "0.0.0.0:9408" in note and "--http-token-file" in note
    config = first.config
    assert config.job == "train" == second.config.job
    assert (config.node, second.config.node) == ("train-0", "train-1")
    assert config.address == "127.0.0.1"
    assert config.etcd is not None and config.etcd.tls == (name != "cpu-dev")
    assert config.etcd_wait_s is not None and config.etcd_wait_s >= 300
    assert config.command.args == ("--steps=2000",)
    assert config.limits.min <= made.count * config.slots <= config.limits.max
    assert (GPUS if name == "gpu" else config.slots) == config.slots


@pytest.mark.parametrize("name", ALL)
def test_every_variable_of_ours_is_one_of_the_command(name: str) -> None:
    env = env_of(trainers(name), 0)
    assert {v for v in env if v.startswith(("ELASTICD_", "PET_"))} <= commandline.VARIABLES


@pytest.mark.parametrize("name", ALL)
def test_variables_are_defined_before_they_are_used(name: str) -> None:
    for made in pods(overlay(name)):
        env = env_of(made, 0)
        for text in [*env.values(), *made.argv(env)]:
            assert not re.search(r"\$\(\w+\)", text), text


@pytest.mark.parametrize("name", [n for n in ALL if n != "existing-etcd"])
def test_etcd_knows_all_its_flags(name: str) -> None:
    said = subprocess.run([find_etcd(), "--help"], capture_output=True, text=True, timeout=30)
    known = set(re.findall(r"--[a-z-]+", said.stdout + said.stderr))
    # not in etcd's help; tests/deploy/test_roles.py starts an etcd with it
    known.add("--enable-grpc-gateway")
    (etcd,) = stores(name)
    command, *flags = etcd.argv(env_of(etcd, 0))
    assert command == "etcd" and flags
    assert {flag.partition("=")[0] for flag in flags} <= known


# ---------------------------------------------------------------- a pod's life


@pytest.mark.parametrize("name", ALL)
def test_the_grace_period_is_longer_than_leaving_takes(name: str, tmp_path: Path) -> None:
    made = trainers(name)
    policy = planned(made, 0, tmp_path).config.policy
    assert made.spec["terminationGracePeriodSeconds"] >= policy.shutdown_s + 8


@pytest.mark.parametrize("name", ALL)
def test_the_disruption_budget_is_as_many_pods_as_min_takes(name: str, tmp_path: Path) -> None:
    config = planned(trainers(name), 0, tmp_path).config
    (budget,) = [b for b in of_kind(overlay(name), "PodDisruptionBudget") if b["metadata"]["name"] == "train"]
    assert budget["spec"]["minAvailable"] == -(-config.limits.min // config.slots)


def jobs(name: str) -> list[Object]:
    """Return the specs of all Jobs."""
    found = [j["spec"] for j in of_kind(overlay(name), "Job")]
    for runtime in of_kind(overlay(name), "TrainingRuntime"):
        found += [r["template"]["spec"] for r in runtime["spec"]["template"]["spec"]["replicatedJobs"]]
    return found


@pytest.mark.parametrize("name", ALL)
def test_a_job_is_elastic_and_its_policy_is_that_of_the_exit_codes(name: str) -> None:
    assert bool(jobs(name)) == (name != "pool")
    for job in jobs(name):
        assert job["completionMode"] == "Indexed"
        assert job["parallelism"] == job["completions"], "they can only be changed together if they are equal"
        assert job["template"]["spec"]["restartPolicy"] == "Never"
        assert job["podReplacementPolicy"] == "Failed"
        first, *rules = job["podFailurePolicy"]["rules"]
        assert first["action"] == "Ignore"
        assert [c["type"] for c in first["onPodConditions"]] == ["DisruptionTarget"]
        (container,) = job["template"]["spec"]["containers"]
        actions = {}
        for rule in rules:
            assert rule["onExitCodes"]["containerName"] == container["name"]
            assert rule["onExitCodes"]["operator"] == "In"
            assert not set(actions) & set(rule["onExitCodes"]["values"]), "said twice"
            actions |= dict.fromkeys(rule["onExitCodes"]["values"], rule["action"])
        assert {code for code, action in actions.items() if action == "FailJob"} == FINAL
        assert {code for code, action in actions.items() if action == "Ignore"} == RETRIED


@pytest.mark.parametrize("name", ALL)
def test_probes_ask_the_supervisor_alone(name: str) -> None:
    probes = http_gets(trainers(name).container)
    assert {probe: get["path"] for probe, get in probes.items()} == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }


def test_the_pool_and_kubeflow_run_the_very_pods_of_the_base() -> None:
    base = trainers("base")
    for name in ("pool", "kubeflow"):
        other = trainers(name)
        ours, theirs = dict(base.spec), dict(other.spec)
        for spec, made in ((ours, base), (theirs, other)):
            env = env_of(made, 2)
            container = {**made.container, "name": "", "env": env}
            spec.update(containers=[container], subdomain="", restartPolicy="")
        assert theirs == ours, name


def test_kubeflows_job_says_no_more_than_its_runtime(tmp_path: Path) -> None:
    (job,) = of_kind(overlay("kubeflow"), "TrainJob")
    (runtime,) = of_kind(overlay("kubeflow"), "TrainingRuntime")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["runtimeRef"]["kind"] == "TrainingRuntime"
    made = trainers("kubeflow")
    assert made.container["name"] == "node", "where Trainer looks for the container"
    asked = planned(made, 0, tmp_path, job["spec"]["trainer"]["args"]).config
    assert asked.command.args == ("--steps=2000",)


def test_kueue_may_start_with_as_few_pods_as_the_budget_keeps() -> None:
    (job,) = of_kind(overlay("kueue"), "Job")
    (budget,) = [
        b for b in of_kind(overlay("kueue"), "PodDisruptionBudget") if b["metadata"]["name"] == "train"
    ]
    (queue,) = of_kind(overlay("kueue"), "LocalQueue")
    (quota,) = of_kind(overlay("kueue"), "ClusterQueue")
    metadata = job["metadata"]
    assert job["spec"]["suspend"] is True
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == queue["metadata"]["name"]
    assert metadata["annotations"]["kueue.x-k8s.io/job-min-parallelism"] == str(
        budget["spec"]["minAvailable"]
    )
    assert queue["spec"]["clusterQueue"] == quota["metadata"]["name"]
    (group,) = quota["spec"]["resourceGroups"]
    (made,) = [p for p in pods(overlay("kueue")) if p.trains]
    assert set(group["coveredResources"]) == set(made.container["resources"]["requests"])
    for resource in group["flavors"][0]["resources"]:
        asked = quantity(made.container["resources"]["requests"][resource["name"]]) * made.count
        assert asked <= quantity(resource["nominalQuota"])


def test_etcd_and_the_job_keep_apart_on_spot_nodes() -> None:
    def terms(made: Pods) -> list[Object]:
        affinity = made.spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        return [e for t in affinity["nodeSelectorTerms"] for e in t["matchExpressions"]]

    spot = {(e["key"], *e["values"]) for e in terms(trainers("spot")) if e["operator"] == "In"}
    (etcd,) = stores("spot")
    assert {(e["key"], *e["values"]) for e in terms(etcd) if e["operator"] == "NotIn"} == spot
    assert (
        len(
            etcd.spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
                "nodeSelectorTerms"
            ]
        )
        == 1
    )
