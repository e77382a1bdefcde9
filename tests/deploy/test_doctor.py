"""The doctor on real faults (etcds with and without TLS, limits, namespaces, scripts), and its judgement
of figures that a test cannot produce."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from elasticd.cli.doctor import checks
from elasticd.cli.doctor.checks import Candidate, Finding, Grade, ask_python
from elasticd.cli.doctor.doctor_command import as_object, as_text, exit_code
from elasticd.core.facts import Node
from elasticd.core.ports import Applied, Put
from elasticd.etcd import embedded
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.blocking_client import Client
from elasticd.etcd.examine import Certificate, Endpoint, Examined, examine
from tests import forkserver
from tests.etcd.cluster import Authority, Cluster, EtcdOnPorts
from tests.etcd.conftest import Proxy

ELASTICD = str(Path(sys.executable).with_name("elasticd"))
# the tests run with a Python that has torch in its venv only
NO_TORCH = str(Path(sys.base_prefix) / "bin" / "python3")
PATIENCE_S = 100


@dataclass(frozen=True)
class Said:
    code: int
    findings: tuple[dict[str, Any], ...]

    def about(self, check: str) -> list[tuple[str, str]]:
        return [(f["grade"], f["says"]) for f in self.findings if f["check"] == check]


def doctor(*words: str, env: dict[str, str] | None = None, inside: tuple[str, ...] = (), **more: Any) -> Said:
    """Run the doctor. ``PYTHON_EXEC`` has no torch unless the test says otherwise: most tests need not wait
    for its import."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ELASTICD_", "PET_", "GLOO_", "NCCL_"))}
    argv = [*inside, ELASTICD, "doctor", "--json", *words]
    environ = {**kept, "PYTHON_EXEC": NO_TORCH, **(env or {})}
    if inside or more:
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, **more)
    else:
        done = forkserver.run(argv, env=environ, cwd=Path.cwd(), timeout_s=PATIENCE_S)
    assert not done.stderr, done.stderr
    told = json.loads(done.stdout)
    assert told["exit_code"] == done.returncode
    return Said(done.returncode, tuple(told["findings"]))


def may(*inside: str) -> bool:
    try:
        return subprocess.run([*inside, "true"], capture_output=True, timeout=PATIENCE_S).returncode == 0
    except FileNotFoundError:
        return False


OWN_MOUNTS = ("unshare", "--mount")
OWN_NET = ("unshare", "--net", "--mount")


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdAccess]:
    with EtcdOnPorts() as server:
        yield server.access


REMOTE = EtcdAccess(("10.0.0.1:2379",))


def candidate(
    examined: Examined | None = None,
    *,
    access: EtcdAccess | None = None,
    node_ttl_s: float = 5.0,
    script: str | None = None,
    address: str = "127.0.0.1",
    environ: Mapping[str, str] | None = None,
    probed: Mapping[str, Mapping[str, Any]] | None = None,
) -> Candidate:
    answer: Future[Mapping[str, Mapping[str, Any]]] = Future()
    answer.set_result(probed or {})
    return Candidate(access, examined, None, address, node_ttl_s, environ or {}, script, answer)


def worst(findings: Iterable[Finding]) -> Finding:
    """Return the finding that people should see first. Check that every finding has a sentence, and that each
    one that is not fine says what to do."""
    found = list(findings)
    for finding in found:
        assert finding.says and "\n" not in finding.says and not finding.says.endswith(".")
        assert bool(finding.do) == (finding.grade is not Grade.FINE)
    return max(found, key=lambda f: list(Grade).index(f.grade))


def findings_of_etcd(access: EtcdAccess, wall: Callable[[], float] = time.time) -> list[Finding]:
    found = candidate(examine(access, wall))
    return [*checks.etcd(found), *checks.certificates(found), *checks.clock(found)]


def wrong(findings: list[Finding]) -> list[str]:
    return [f.says for f in findings if f.grade is Grade.WRONG]


# ---------------------------------------------------------------- a machine without faults


def test_a_machine_that_can_run_a_job_passes(etcd: EtcdAccess, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import torch, json\nfrom torch.utils.data import DataLoader\nraise SystemExit('was run')\n"
    )
    said = doctor(str(script), "--etcd", etcd.url, env={"PYTHON_EXEC": sys.executable})
    assert said.code == 0, said
    looked_at = {f["check"] for f in said.findings}
    assert looked_at >= {"etcd", "clock", "address", "network", "shared memory", "open files"}
    assert looked_at >= {"GPUs", "torch", "imports"}
    assert said.about("imports") == [("fine", f"3 imports of {script} work")]
    ((grade, torch),) = said.about("torch")
    assert grade == "fine" and "forms groups with gloo" in torch


def test_nothing_is_left_in_the_etcd(etcd: EtcdAccess) -> None:
    examine(etcd)
    with Client(etcd) as client:
        assert not client.list_raw(b"/").items


# ---------------------------------------------------------------- etcd


def test_an_unreachable_etcd_is_a_finding() -> None:
    said = doctor("--etcd", "http://127.0.0.1:1", env={"PYTHON_EXEC": "/no/python"})
    assert said.about("etcd") == [
        ("wrong", "nothing listens at 127.0.0.1:1; start etcd there or correct the address")
    ]
    assert said.about("torch") == [
        ("wrong", "/no/python cannot import torch: /no/python cannot be run: No such file or directory")
    ]


def test_how_fast_etcd_is_and_what_time_it_has_is_measured(etcd: EtcdAccess) -> None:
    (endpoint,) = examine(etcd).endpoints
    assert len(endpoint.reads_s) == len(endpoint.writes_s) == 20
    assert all(0 < s < 10 for s in endpoint.reads_s + endpoint.writes_s)
    assert endpoint.version == "3.5.1" or endpoint.version.count(".") == 2
    low, high = endpoint.ahead_s or (99.0, 99.0)
    assert low <= 0.05 and high >= -0.05, "the same machine's clock"


def test_an_etcd_that_is_slow_is_told_and_not_asked_for_long(
    etcd: EtcdAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticd.etcd.examine.SAMPLING_S", 1.0)
    host, _, port = etcd.endpoints[0].rpartition(":")
    proxy = Proxy((host, int(port)), delay_s=0.12)
    try:
        found = examine(replace(etcd, endpoints=(proxy.endpoint,)))
    finally:
        proxy.close()
    (endpoint,) = found.endpoints
    assert not endpoint.error and 3 <= len(endpoint.writes_s) < 20
    (said,) = wrong(list(checks.etcd(candidate(found, node_ttl_s=1.0))))
    assert said.startswith("etcd is too slow for leases of 1 s: writes take ")


@pytest.mark.parametrize(("shift_s", "words"), [(60.0, "ahead of"), (-60.0, "behind")])
def test_a_clock_that_is_off_is_told_with_its_direction(etcd: EtcdAccess, shift_s: float, words: str) -> None:
    (said,) = wrong(findings_of_etcd(etcd, lambda: time.time() + shift_s))
    assert words in said and said.startswith(("this machine's clock is 59 s", "this machine's clock is 60 s"))


def test_an_etcd_of_which_one_endpoint_is_away_serves(etcd: EtcdAccess) -> None:
    found = findings_of_etcd(replace(etcd, endpoints=(*etcd.endpoints, "127.0.0.1:1")))
    assert not wrong(found)
    assert any("1 of 2 endpoints answer: nothing listens at 127.0.0.1:1" in f.says for f in found)


# ---------------------------------------------------------------- certificates


@dataclass(frozen=True)
class Keys:
    authority: Authority
    access: EtcdAccess


def serving_tls(folder: Path, *, expires_h: float = 24.0) -> Iterator[Keys]:
    authority = Authority(folder, "authority")
    cert, key = authority.issue("server", "127.0.0.1", expires_h=expires_h)
    flags = (
        "--client-cert-auth",
        f"--trusted-ca-file={authority.cert}",
        f"--cert-file={cert}",
        f"--key-file={key}",
    )
    cluster = Cluster(folder, 1, flags=flags, tls=True)
    for member in cluster.members:
        member.start()
    mine, mine_key = authority.issue("client", expires_h=24 * 90)
    mine_key.chmod(0o600)
    access = EtcdAccess(cluster.endpoints, tls=True, cacert=authority.cert, cert=mine, key=mine_key)
    _await_port(cluster.endpoints[0])
    try:
        yield Keys(authority, access)
    finally:
        cluster.stop()


def _await_port(endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < give_up_at
            time.sleep(0.05)  # no event tells when the port is open


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    yield from serving_tls(tmp_path_factory.mktemp("tls"))


def until_serving(access: EtcdAccess) -> list[Finding]:
    """A member listens at its port before it has a leader."""
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        found = findings_of_etcd(access)
        if not any(f.later for f in found) or time.monotonic() > give_up_at:
            return found


def test_certificates_that_soon_expire_are_named_the_servers_too(tls: Keys) -> None:
    found = until_serving(tls.access)
    assert not wrong(found)
    said = [f.says for f in found if "certificate" in f.says]
    assert any(s.startswith(f"the certificate of {tls.access.endpoints[0]} expires in 23 h") for s in said)
    assert not [s for s in said if "client" in s]


def test_a_client_certificate_that_is_left_out_is_missed(tls: Keys) -> None:
    until_serving(tls.access)
    (said,) = wrong(findings_of_etcd(replace(tls.access, cert=None, key=None)))
    assert "certificate" in said


def test_a_client_certificate_that_has_expired_is_named_with_its_file(tls: Keys) -> None:
    until_serving(tls.access)
    cert, key = tls.authority.issue("old", expires_h=-30)
    said = wrong(findings_of_etcd(replace(tls.access, cert=cert, key=key)))
    assert f"the client certificate {cert} expired 1 day ago" in said


def test_a_key_that_others_may_read_is_advised_against(tls: Keys) -> None:
    cert, key = tls.authority.issue("open")
    key.chmod(0o644)
    found = until_serving(replace(tls.access, cert=cert, key=key))
    assert f"anybody on this machine can read the key {key}" in [f.says for f in found]


def test_an_expired_server_certificate_is_a_finding(tmp_path: Path) -> None:
    for keys in serving_tls(tmp_path, expires_h=-30):
        (said,) = wrong(until_serving(keys.access))
        assert "certificate has expired" in said


# ---------------------------------------------------------------- this machine


def test_an_address_of_another_machine_is_no_address_of_this_one() -> None:
    said = doctor("--address", "192.0.2.1")
    (found,) = said.about("address")
    assert found[0] == "wrong" and found[1].startswith(
        "a process cannot listen on 192.0.2.1 and connect to it"
    )
    assert said.code == 1


def test_a_jobs_other_nodes_are_tried(etcd: EtcdAccess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, Client(etcd) as client:
        port = listening.getsockname()[1]
        for name, at in (("near", port), ("far", 1)):
            node = Node(
                name=name, incarnation="x", address="127.0.0.1", slots=(0,), released=0, store_port=at, pid=1,
                host="h",
            )  # fmt: skip
            put = Put(f"nodes/{name}", node)
            assert isinstance(client.transact("peers", (), (put,)), Applied)
        said = doctor("--etcd", etcd.url, "--job", "peers", "--address", "127.0.0.2")
        client.delete_raw(b"/elasticd/peers/", prefix=True)
    (found,) = [says for grade, says in said.about("other nodes") if grade == "wrong"]
    assert found == "node far of the job cannot be reached at 127.0.0.1:1: Connection refused"


def test_a_low_limit_of_open_files_is_a_finding() -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))

    ((grade, says),) = doctor(preexec_fn=few).about("open files")
    assert grade == "wrong" and says.startswith("a process may have 300 files open")


@pytest.mark.skipif(not may(*OWN_MOUNTS), reason="nothing may be mounted here")
def test_a_small_shared_memory_is_a_finding() -> None:
    inside = (*OWN_MOUNTS, "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh")
    ((grade, says),) = doctor(inside=inside).about("shared memory")
    assert (grade, says) == (
        "advice",
        "67.1 MB of 67.1 MB are free in /dev/shm, which DataLoader workers soon fill",
    )


def test_a_missing_shared_memory_is_a_finding(tmp_path: Path) -> None:
    found = worst(checks.shared_memory(candidate(), str(tmp_path / "shm")))
    assert found.says == f"{tmp_path / 'shm'} cannot be used: No such file or directory"


@pytest.mark.parametrize(("limit", "found"), [("300", 1), ("10000", 0), ("max", 0)])
@pytest.mark.parametrize("version", ["", "pids"])
def test_a_low_limit_of_tasks_is_a_finding(limit: str, found: int, version: str, tmp_path: Path) -> None:
    folder = tmp_path / version
    folder.mkdir(exist_ok=True)
    (folder / "pids.max").write_text(f"{limit}\n")
    (folder / "pids.current").write_text("40\n")
    assert [f.grade for f in checks.tasks(candidate(), tmp_path)] == [Grade.ADVICE] * found


@pytest.mark.skipif(not may(*OWN_NET), reason="no network namespace may be made here")
def test_a_machine_without_a_network_is_a_finding() -> None:
    setup = 'ip link set lo up; exec "$@"'
    said = doctor("--etcd", "http://192.0.2.1:2379", inside=(*OWN_NET, "sh", "-c", setup, "sh"))
    assert ("wrong", "no interface but loopback is up") in said.about("network")


@pytest.mark.skipif(not may(*OWN_NET), reason="no network namespace may be made here")
def test_a_machine_whose_name_is_not_known_is_as_fit_as_its_workers_are_told_an_interface(
    tmp_path: Path,
) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    (tmp_path / "order").write_text("hosts: files\n")
    setup = (
        f"mount --bind {tmp_path}/hosts /etc/hosts; mount --bind {tmp_path}/order /etc/nsswitch.conf; "
        "ip link set lo up; ip link add near0 type veth peer name far0; "
        "ip link set near0 up; ip link set far0 up; "
        'ip addr add 10.9.8.7/24 dev near0; exec "$@"'
    )
    inside = (*OWN_NET, "sh", "-c", setup, "sh")
    env = {"PYTHON_EXEC": sys.executable}
    said = doctor("--etcd", "http://10.9.8.1:2379", "--address", "10.9.8.7", inside=inside, env=env)
    ((grade, network),) = said.about("network")
    assert grade == "fine" and network.endswith("gloo uses near0")
    assert [grade for grade, _ in said.about("torch")] == ["fine"]


def test_an_interface_that_is_not_there_is_told_by_gloo_itself() -> None:
    probed = ask_python(None, module=False, environ={**os.environ, "GLOO_SOCKET_IFNAME": "none9"})
    found = worst(checks.torch(candidate(probed=probed)))
    assert found.grade is Grade.WRONG and "none9" in found.says
    assert found.says.startswith("a group of gloo cannot be formed here")


LOOPBACK = "gloo would use loopback, as this machine's name NAME"


@pytest.mark.parametrize(
    ("etcd", "environ", "hosts", "says"),
    [
        (REMOTE, {}, ("10.0.0.7",), "interfaces "),
        (None, {}, ("127.0.1.1",), "interfaces "),
        (REMOTE, {}, ("127.0.1.1",), f"{LOOPBACK} resolves to 127.0.1.1"),
        (REMOTE, {}, (), f"{LOOPBACK} does not resolve"),
        (REMOTE, {"GLOO_SOCKET_IFNAME": "eth0"}, (), "interfaces "),
    ],
)
def test_a_name_that_leads_gloo_to_loopback_is_told_where_others_may_join(
    etcd: EtcdAccess | None,
    environ: dict[str, str],
    hosts: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "host_addresses", lambda: hosts)
    found = worst(checks.network(candidate(access=etcd, environ=environ)))
    assert found.says.startswith(says.replace("NAME", socket.gethostname())), found


def test_loopback_is_no_address_for_other_nodes() -> None:
    assert worst(checks.address(candidate())).says == "workers of this machine meet at 127.0.0.1"
    found = worst(checks.address(candidate(access=REMOTE)))
    assert found.says == "other nodes cannot reach this node at 127.0.0.1, a loopback address"


# ---------------------------------------------------------------- the Python of the workers


def test_a_python_without_torch_is_a_finding() -> None:
    ((grade, says),) = doctor().about("torch")
    assert grade == "wrong"
    assert says == f"{NO_TORCH} cannot import torch: ModuleNotFoundError: No module named 'torch'"


def imports(target: Path | str, *, module: bool = False) -> Mapping[str, Any]:
    asked = ask_python(str(target), module=module, environ={**os.environ, "PYTHON_EXEC": NO_TORCH})
    return asked["imports"]


def test_imports_are_followed_into_the_scripts_own_modules_and_nothing_of_it_is_run(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "from __future__ import annotations\n"
        "import json, model.net\n"
        "from model import parts\n"
        "try:\n    import no_such_spare\nexcept ImportError:\n    pass\n"
        "from json import no_such_name\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import no_such_type\n"
        "def later():\n    import no_such_late\n"
        "raise SystemExit('the script was run')\n"
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "__init__.py").write_text("raise SystemExit('a module of its was run')\n")
    (tmp_path / "model" / "net.py").write_text("from . import parts\nimport no_such_needed.deeper\n")
    (tmp_path / "model" / "parts.py").write_text("import math\n")
    found = imports(tmp_path / "job.py")
    needed, name = found["missing"]
    assert needed == (
        f"{tmp_path / 'model' / 'net.py'}:2 imports no_such_needed.deeper, which fails: "
        "ModuleNotFoundError: No module named 'no_such_needed'"
    )
    assert name.startswith(f"{tmp_path / 'job.py'}:8 imports json.no_such_name, which fails: ImportError")
    assert found["working"] == 4, "annotations, json, math and TYPE_CHECKING"


def test_a_module_is_found_as_python_m_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "__main__.py").write_text("from .inner import x\n")
    (tmp_path / "pack" / "inner.py").write_text("import no_such_thing\n")
    monkeypatch.chdir(tmp_path)
    (missing,) = imports("pack", module=True)["missing"]
    assert "imports no_such_thing, which fails" in missing
    assert "No module named 'nothing'" in imports("nothing", module=True)["error"]


@pytest.mark.parametrize(
    ("source", "error"), [("import json\nif\n", "SyntaxError"), (None, "FileNotFoundError")]
)
def test_an_unreadable_script_is_a_finding(tmp_path: Path, source: str | None, error: str) -> None:
    if source is not None:
        (tmp_path / "job.py").write_text(source)
    assert imports(tmp_path / "job.py")["error"].startswith(error)


def test_a_missing_import_is_wrong() -> None:
    said = {"imports": {"working": 3, "missing": ["job.py:3 imports einops, which fails: no module"]}}
    found = worst(checks.imports(candidate(script="job.py", probed=said)))
    assert (found.grade, found.says) == (Grade.WRONG, "job.py:3 imports einops, which fails: no module")


CPU = {"version": "2.13.0+cpu", "build": "", "groups": {"gloo": ""}}
CUDA = {"version": "2.13.0", "build": "CUDA 13.0", "groups": {"gloo": "", "nccl": ""}}


@pytest.mark.parametrize(
    ("devices", "said", "grade", "says"),
    [
        ((), CPU, Grade.FINE, "this machine has none: workers train on the CPU"),
        (
            (),
            CUDA | {"gpu_error": "no driver"},
            Grade.FINE,
            "this machine has none: workers train on the CPU",
        ),
        (("nvidia0", "nvidia1"), CUDA | {"gpus": ["H100", "H100"]}, Grade.FINE, "2 (H100), CUDA 13.0"),
        (
            ("nvidia0", "nvidiactl"),
            CUDA | {"gpu_error": "the driver is too old"},
            Grade.WRONG,
            "torch 2.13.0 (CUDA 13.0) cannot use the GPUs in DEV: the driver is too old",
        ),
        (
            ("nvidia0",),
            CPU,
            Grade.WRONG,
            "this machine has GPUs, but torch 2.13.0+cpu was built without CUDA",
        ),
    ],
)
def test_gpus_are_those_that_workers_get(
    devices: tuple[str, ...],
    said: dict[str, Any],
    grade: Grade,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: name)
    for name in devices:
        (tmp_path / name).touch()
    found = worst(checks.gpus(candidate(probed={"torch": said}), tmp_path))
    assert (found.grade, found.says) == (grade, says.replace("DEV", str(tmp_path)))


def test_gpus_without_the_package_that_reads_their_metrics_are_worth_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    (tmp_path / "nvidia0").touch()
    gpus = {"gpus": ["H100"]}
    cuda, rocm = (
        list(checks.gpus(candidate(probed={"torch": CUDA | gpus | {"build": build}}), tmp_path))
        for build in ("CUDA 13.0", "ROCm 7.0")
    )
    assert [found.grade for found in cuda] == [Grade.FINE, Grade.ADVICE]
    assert cuda[1].do == "pip install 'elasticd[gpu]'"
    assert [found.grade for found in rocm] == [Grade.FINE], "NVML knows NVIDIA's GPUs only"


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (CUDA, "torch 2.13.0 forms groups with gloo and nccl"),
        (CPU | {"version": "2.6.0"}, "PyTorch 2.6.0 is too old for elasticd, which needs 2.8 or newer"),
        (CPU | {"groups": {"gloo": "no address"}}, "a group of gloo cannot be formed here: no address"),
        (CUDA | {"groups": {"gloo": "", "nccl": "no"}}, "a group of nccl cannot be formed here: no"),
    ],
)
def test_the_doctor_says_whether_torch_forms_groups_or_why_not(said: dict[str, Any], says: str) -> None:
    assert worst(checks.torch(candidate(probed={"torch": said}))).says == says


# ---------------------------------------------------------------- figures of etcd

DAY = 86400.0


def endpoint(
    name: str = "e:2379",
    *,
    version: str = "3.6.12",
    writes_s: float = 0.002,
    ahead_s: tuple[float, float] | None = (-0.1, 0.1),
) -> Endpoint:
    writes = (0.002,) * 19 + (writes_s,)
    return Endpoint(name, version=version, reads_s=(0.001,) * 20, writes_s=writes, ahead_s=ahead_s)


def judged(*endpoints: Endpoint, node_ttl_s: float = 5.0) -> Finding:
    return worst(checks.etcd(candidate(Examined(endpoints), node_ttl_s=node_ttl_s)))


def test_an_etcd_that_answers_fast_is_fine() -> None:
    found = judged(endpoint())
    assert found.grade is Grade.FINE
    assert found.says == (
        "the endpoint answers; writes take 2.0 ms (at most 2.0 ms), reads 1.0 ms (at most 1.0 ms)"
    )


def test_an_etcd_that_is_away_may_come_right_and_a_wrong_certificate_not() -> None:
    gone = Endpoint("e:1", "nothing listens at e:1", unreachable=True)
    away = judged(gone)
    assert (away.grade, away.later, away.says) == (Grade.WRONG, True, "nothing listens at e:1")
    refused = judged(gone, Endpoint("f:1", "denied"))
    assert (refused.grade, refused.later, refused.says) == (Grade.WRONG, False, "denied")


@pytest.mark.parametrize(
    ("writes_s", "ttl_s", "grade"),
    [
        (0.05, 5.0, Grade.FINE),
        (0.3, 5.0, Grade.ADVICE),
        (1.2, 5.0, Grade.WRONG),
        (1.2, 30.0, Grade.ADVICE),
    ],
)
def test_the_slowest_write_is_held_against_the_lease(writes_s: float, ttl_s: float, grade: Grade) -> None:
    assert judged(endpoint(writes_s=writes_s), node_ttl_s=ttl_s).grade is grade


def test_releases_with_known_faults_are_named_and_others_are_fine() -> None:
    for version in ("3.5.1", "3.5.29", "3.6.0", "3.4.23", "3.6.0-rc.1", ""):
        assert judged(endpoint(version=version)).grade is Grade.ADVICE, version
    for version in ("3.5.30", "3.6.11", "3.7.0"):
        assert judged(endpoint(version=version)).grade is Grade.FINE, version


@pytest.mark.parametrize(
    ("ahead_s", "grade", "says"),
    [
        ((-0.2, 0.3), Grade.FINE, "agrees with etcd's to 1 s"),
        ((9.7, 10.2), Grade.ADVICE, "this machine's clock is 10 s behind that of etcd at f:2379"),
        ((-61.0, -60.0), Grade.WRONG, "this machine's clock is 60 s ahead of that of etcd at f:2379"),
    ],
)
def test_a_clock_that_differs_from_etcds_is_reported_as_ahead_or_behind(
    ahead_s: tuple[float, float], grade: Grade, says: str
) -> None:
    both = Examined((endpoint(), endpoint("f:2379", ahead_s=ahead_s)))
    found = worst(checks.clock(candidate(both)))
    assert (found.grade, found.says) == (grade, says)


def test_an_etcd_that_tells_no_time_is_not_judged_by_it() -> None:
    assert not list(checks.clock(candidate(Examined((endpoint(ahead_s=None),)))))


@pytest.mark.parametrize(
    ("valid", "grade", "says"),
    [
        (
            (-10, 90.5),
            Grade.FINE,
            "all are valid; the first to expire, the certificate c.pem, has 90 days left",
        ),
        ((-10, 3.5), Grade.ADVICE, "the certificate c.pem expires in 3 days"),
        ((-10, -1.5), Grade.WRONG, "the certificate c.pem expired 1 day ago"),
        ((2.5, 90), Grade.WRONG, "the certificate c.pem is not valid for another 2 days"),
    ],
)
def test_certificates_are_judged_by_their_time(valid: tuple[float, float], grade: Grade, says: str) -> None:
    first, last = (time.time() + days * DAY for days in valid)
    found = worst(
        checks.certificates(candidate(Examined((), (Certificate("the certificate c.pem", first, last),))))
    )
    assert (found.grade, found.says) == (grade, says)


# ---------------------------------------------------------------- the verdict

FINE = ("a", Finding(Grade.FINE, "well"))
ADVICE = ("b", Finding(Grade.ADVICE, "so so", "mend"))
WRONG = ("c", Finding(Grade.WRONG, "ill", "heal"))
LATER = ("etcd", Finding(Grade.WRONG, "away", "wait", later=True))


@pytest.mark.parametrize(
    ("findings", "strict", "code"),
    [
        ((FINE, ADVICE), False, 0),
        ((FINE, ADVICE), True, 1),
        ((FINE, WRONG), False, 1),
        ((FINE, LATER), False, 4),
        ((WRONG, LATER), False, 1),
        ((ADVICE, LATER), True, 1),
    ],
)
def test_the_exit_code_says_whether_to_try_again(
    findings: tuple[tuple[str, Finding], ...], strict: bool, code: int
) -> None:
    assert exit_code(findings, strict) == code
    assert as_object(findings, strict)["exit_code"] == code


def test_people_are_told_what_to_do_and_programs_get_the_same() -> None:
    assert list(as_text((FINE, WRONG), strict=False)) == [
        "a  fine    well",
        "c  wrong   ill",
        "           -> heal",
        "",
        "This machine cannot run a job: 1 thing wrong.",
    ]
    assert as_object((WRONG,), strict=False)["findings"] == [
        {"check": "c", "grade": "wrong", "says": "ill", "do": "heal"}
    ]


def test_the_etcd_of_standalone_runs_is_told_with_what_is_wrong_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embedded, "find_etcd", lambda: Path("/bin/etcd"))
    monkeypatch.setattr(embedded, "version_of", lambda _: (3, 5, 30))
    assert worst(checks.etcd(candidate())).says == "standalone runs use /bin/etcd"
    monkeypatch.setattr(embedded, "version_of", lambda _: (3, 5, 1))
    old = worst(checks.etcd(candidate()))
    assert old.grade is Grade.ADVICE
    assert old.says == (
        "standalone runs use /bin/etcd: etcd 3.5.1 may damage its data when it is killed under load"
    )

    def none() -> Path:
        raise FileNotFoundError("no etcd server was found")

    monkeypatch.setattr(embedded, "find_etcd", none)
    assert worst(checks.etcd(candidate())).says == "no standalone run is possible: no etcd server was found"
