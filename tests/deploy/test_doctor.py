"""The doctor at real beds: etcds with and without TLS, limits, namespaces, scripts."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from elasticd.cli.doctor import judge
from elasticd.cli.doctor.judge import Finding, Grade
from elasticd.cli.doctor.machine_facts import (
    look_at_driver,
    look_at_http,
    look_at_ports,
    look_at_shared_memory,
)
from elasticd.cli.doctor.worker_facts import ask_imports
from elasticd.core.facts import Node
from elasticd.core.ports import Applied, Put
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.client import Client
from elasticd.etcd.examine import examine
from elasticd.telemetry.http import Answer, HttpServer, Site, Tls
from tests.etcd.cluster import Authority, Cluster, EtcdOnPorts
from tests.etcd.conftest import Proxy

ELASTICD = str(Path(sys.executable).with_name("elasticd"))
NO_TORCH = str(Path(sys.base_prefix) / "bin" / "python3")  # what the tests run in has it only in its venv
PATIENCE_S = 100


@dataclass(frozen=True)
class Said:
    code: int
    findings: tuple[dict[str, Any], ...]

    def about(self, check: str) -> list[tuple[str, str]]:
        return [(f["grade"], f["says"]) for f in self.findings if f["check"] == check]


def doctor(*words: str, env: dict[str, str] | None = None, inside: tuple[str, ...] = (), **more: Any) -> Said:
    """``PYTHON_EXEC`` without torch unless said otherwise: most tests need not wait for its import."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ELASTICD_", "PET_", "GLOO_", "NCCL_"))}
    done = subprocess.run(
        [*inside, ELASTICD, "doctor", "--json", *words],
        env={**kept, "PYTHON_EXEC": NO_TORCH, **(env or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        **more,
    )
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


def findings_of_etcd(access: EtcdAccess, wall: Callable[[], float] = time.time) -> list[Finding]:
    found = examine(access, wall)
    return [
        *judge.etcd(found, 5.0),
        *judge.certificates(found, time.time()),
        *judge.clock(found),
    ]


def wrong(findings: list[Finding]) -> list[str]:
    return [f.says for f in findings if f.grade is Grade.WRONG]


# ---------------------------------------------------------------- a machine that is well


def test_a_machine_that_can_run_a_job_is_said_to_be_fit(etcd: EtcdAccess, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import torch, json\nfrom torch.utils.data import DataLoader\nraise SystemExit('was run')\n"
    )
    said = doctor(str(script), "--etcd", etcd.url, env={"PYTHON_EXEC": sys.executable})
    assert said.code == 0, said
    looked_at = {f["check"] for f in said.findings}
    assert looked_at >= {"etcd", "clock", "address", "ports", "network", "shared memory", "open files"}
    assert looked_at >= {"GPUs", "torch", "imports"}
    assert said.about("imports") == [("fine", f"3 imports of {script} work")]
    ((grade, torch),) = said.about("torch")
    assert grade == "fine" and "forms groups with gloo" in torch


def test_nothing_is_left_in_the_etcd(etcd: EtcdAccess) -> None:
    examine(etcd)
    with Client(etcd) as client:
        assert not client.list_raw(b"/").items
        response = client._connection.call("grant", _grant())
        client.revoke(response.ID)


def _grant() -> Any:
    from elasticd.etcd._client3 import rpc

    return rpc.LeaseGrantRequest(TTL=5)


# ---------------------------------------------------------------- etcd


def test_an_etcd_that_is_away_is_worth_another_try() -> None:
    said = doctor("--etcd", "http://127.0.0.1:1", env={"PYTHON_EXEC": sys.executable})
    assert said.about("etcd") == [
        ("wrong", "nothing listens at 127.0.0.1:1; start etcd there or correct the address")
    ]
    assert said.code == 4, said


def test_how_fast_etcd_is_and_what_time_it_has_is_measured(etcd: EtcdAccess) -> None:
    (endpoint,) = examine(etcd).endpoints
    assert len(endpoint.reads_s) == len(endpoint.writes_s) == 20
    assert all(0 < s < 10 for s in endpoint.reads_s + endpoint.writes_s)
    assert endpoint.version == "3.5.1" or endpoint.version.count(".") == 2
    low, high = endpoint.ahead_s or (99.0, 99.0)
    assert low <= 0.05 and high >= -0.05, "the same machine's clock"
    assert high - low < 1.0, "more exactly than the second that HTTP tells"


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
    (said,) = wrong(list(judge.etcd(found, 1.0)))
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


def serving_tls(folder: Path, address: str, *, expires_h: float = 24.0) -> Iterator[Keys]:
    authority = Authority(folder, "authority")
    cert, key = authority.issue("server", address, expires_h=expires_h)
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
            time.sleep(0.05)  # nobody tells when a port is listened on


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    yield from serving_tls(tmp_path_factory.mktemp("tls"), "127.0.0.1")


def until_serving(access: EtcdAccess) -> list[Finding]:
    """A port is listened on before the member has a leader."""
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        found = findings_of_etcd(access)
        if not any(f.later for f in found) or time.monotonic() > give_up_at:
            return found


def test_certificates_that_soon_expire_are_named_the_servers_too(tls: Keys) -> None:
    found = until_serving(tls.access)
    assert not wrong(found)
    said = [f.says for f in found if f.check == "certificates"]
    assert f"the certificate of {tls.access.endpoints[0]} expires in 23 h" in said
    assert not [f for f in said if "client" in f]


def test_a_client_certificate_that_is_left_out_is_missed(tls: Keys) -> None:
    until_serving(tls.access)
    (said,) = wrong(findings_of_etcd(replace(tls.access, cert=None, key=None)))
    assert "certificate" in said


def test_a_server_of_another_authority_is_not_trusted(tls: Keys, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    (said,) = wrong(findings_of_etcd(replace(tls.access, cacert=other.cert)))
    assert "is not valid for" in said and ("self-signed" in said or "issuer" in said)


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


def test_a_server_certificate_for_another_host_is_told(tmp_path: Path) -> None:
    for keys in serving_tls(tmp_path, "192.0.2.1"):
        (said,) = wrong(until_serving(keys.access))
        assert "IP address mismatch" in said


def test_a_server_certificate_that_has_expired_is_told(tmp_path: Path) -> None:
    for keys in serving_tls(tmp_path, "127.0.0.1", expires_h=-30):
        (said,) = wrong(until_serving(keys.access))
        assert "certificate has expired" in said


# ---------------------------------------------------------------- this machine


def test_an_address_of_another_machine_is_no_address_of_this_one() -> None:
    said = doctor("--address", "192.0.2.1")
    (found,) = said.about("address")
    assert found[0] == "wrong" and found[1].startswith("one cannot listen on 192.0.2.1 and connect to it")
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
    (found,) = [says for grade, says in said.about("address") if grade == "wrong"]
    assert found == "node far of the job cannot be reached at 127.0.0.1:1 from here: Connection refused"


def test_few_open_files_are_told() -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))

    ((grade, says),) = doctor(preexec_fn=few).about("open files")
    assert grade == "wrong" and says.startswith("a process may have 300 files open")


@pytest.mark.skipif(not may(*OWN_MOUNTS), reason="nothing may be mounted here")
def test_a_small_shared_memory_is_told() -> None:
    inside = (*OWN_MOUNTS, "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh")
    ((grade, says),) = doctor(inside=inside).about("shared memory")
    assert (grade, says) == (
        "advice",
        "64 MiB of 64 MiB are free in /dev/shm, which DataLoader workers soon fill",
    )


def test_a_shared_memory_that_is_not_there_is_told(tmp_path: Path) -> None:
    (found,) = judge.shared_memory(look_at_shared_memory(tmp_path / "shm"))
    assert found.says == "/dev/shm cannot be used: No such file or directory"


@pytest.mark.skipif(not may(*OWN_NET), reason="no network namespace may be made here")
def test_a_machine_of_few_ports_and_no_network_is_told() -> None:
    setup = 'ip link set lo up; echo 40000 40009 > /proc/sys/net/ipv4/ip_local_port_range; exec "$@"'
    said = doctor("--etcd", "http://192.0.2.1:2379", inside=(*OWN_NET, "sh", "-c", setup, "sh"))
    assert said.about("ports") == [("wrong", "only 10 ports of 40000 to 40009 are free")]
    assert ("wrong", "no interface but loopback is up") in said.about("network")


@pytest.mark.skipif(not may(*OWN_NET), reason="no network namespace may be made here")
def test_a_machine_whose_name_is_not_known_is_as_fit_as_its_workers_are_told_an_interface(
    tmp_path: Path,
) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    (tmp_path / "order").write_text("hosts: files\n")
    setup = (
        f"mount --bind {tmp_path}/hosts /etc/hosts; mount --bind {tmp_path}/order /etc/nsswitch.conf; "
        "ip link set lo up; ip link add near0 type veth peer name far0; ip link set near0 up; "
        'ip addr add 10.9.8.7/24 dev near0; exec "$@"'
    )
    inside = (*OWN_NET, "sh", "-c", setup, "sh")
    env = {"PYTHON_EXEC": sys.executable}
    said = doctor("--etcd", "http://10.9.8.1:2379", "--address", "10.9.8.7", inside=inside, env=env)
    ((grade, network),) = said.about("network")
    assert grade == "fine" and network.endswith("gloo uses near0")
    assert [grade for grade, _ in said.about("torch")] == ["fine"]
    none = {**env, "GLOO_SOCKET_IFNAME": ""}
    said = doctor("--etcd", "http://10.9.8.1:2379", "--address", "10.9.8.7", inside=inside, env=none)
    assert [grade for grade, _ in said.about("network")] == ["wrong"]


def test_a_port_for_metrics_that_somebody_else_holds_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        held.settimeout(0)  # and answers nobody
        taken = look_at_http("127.0.0.1", port)
    assert taken.error == "Address already in use" and not taken.agent
    assert not look_at_http("127.0.0.1", port).error, "once it is free"


@pytest.mark.parametrize("secure", [False, True])
def test_an_agent_that_serves_metrics_already_is_known_for_one(secure: bool, tmp_path: Path) -> None:
    tls = Tls(*Authority(tmp_path, "us").issue("agent", "127.0.0.1")) if secure else None
    with HttpServer("127.0.0.1", 0, Site({"/healthz": lambda _: Answer(b"ok")}), tls) as server:
        assert look_at_http("127.0.0.1", server.port).agent


def test_ports_in_use_are_counted() -> None:
    before = look_at_ports()
    assert 1024 <= before.low < before.high and 0 <= before.used < before.high - before.low


def test_an_interface_that_is_not_there_is_told_for_gloo_and_nccl_and_by_gloo_itself() -> None:
    env = {"GLOO_SOCKET_IFNAME": "none9", "NCCL_SOCKET_IFNAME": "=none8", "PYTHON_EXEC": sys.executable}
    said = doctor(env=env)
    names = [says.split(",")[0] for _, says in said.about("network")]
    assert names == ["GLOO_SOCKET_IFNAME names none9", "NCCL_SOCKET_IFNAME names none8"]
    ((grade, says),) = said.about("torch")
    assert grade == "wrong" and says.startswith("a gloo group cannot be formed here") and "none9" in says


def test_gpus_in_dev_without_a_driver_are_told(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert look_at_driver(tmp_path).nodes == 2


# ---------------------------------------------------------------- what workers run


def test_a_python_without_torch_is_told() -> None:
    ((grade, says),) = doctor().about("torch")
    assert grade == "wrong"
    assert says == f"{NO_TORCH} cannot import it: ModuleNotFoundError: No module named 'torch'"


def test_a_python_that_is_none_is_told() -> None:
    ((_, says),) = doctor(env={"PYTHON_EXEC": "/no/python"}).about("torch")
    assert says == "/no/python cannot import it: /no/python cannot be run: No such file or directory"


def test_imports_are_followed_into_the_scripts_own_modules_and_nothing_of_it_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setenv("PYTHON_EXEC", sys.executable)
    facts = ask_imports(str(tmp_path / "job.py"), module=False)
    assert not facts.error
    needed = {m.module: m.where for m in facts.missing if not m.optional}
    assert needed == {
        "json.no_such_name": f"{tmp_path / 'job.py'}:8",
        "no_such_needed.deeper": f"{tmp_path / 'model' / 'net.py'}:2",
    }
    assert {m.module for m in facts.missing if m.optional} == {"no_such_spare", "no_such_late"}


def test_a_module_is_found_as_python_m_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "__main__.py").write_text("from .inner import x\n")
    (tmp_path / "pack" / "inner.py").write_text("import no_such_thing\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHON_EXEC", sys.executable)
    (missing,) = ask_imports("pack", module=True).missing
    assert missing.module == "no_such_thing"
    assert "No module named 'nothing'" in ask_imports("nothing", module=True).error


@pytest.mark.parametrize(
    ("source", "error"), [("import json\nif\n", "SyntaxError"), (None, "FileNotFoundError")]
)
def test_a_script_that_cannot_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, error: str
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", sys.executable)
    if source is not None:
        (tmp_path / "job.py").write_text(source)
    assert ask_imports(str(tmp_path / "job.py"), module=False).error.startswith(error)
