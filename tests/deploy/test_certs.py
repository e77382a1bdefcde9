"""The certificates script, and all that it makes put to its use: an etcd with TLS, a job, the doctor."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509

from elasticd.etcd.access import EtcdAccess
from tests.etcd.cluster import Cluster

SCRIPT = Path(__file__).parents[2] / "deploy" / "certs.sh"
ELASTICD = str(Path(sys.executable).with_name("elasticd"))
PATIENCE_S = 90

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    done = subprocess.run(
        ["sh", SCRIPT, folder, "etcd-0.etcd", "10.1.2.3", "fd00::7"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def etcd(certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdAccess]:
    flags = (
        "--client-cert-auth",
        f"--trusted-ca-file={certs / 'ca.crt'}",
        f"--cert-file={certs / 'server.crt'}",
        f"--key-file={certs / 'server.key'}",
    )
    cluster = Cluster(tmp_path_factory.mktemp("etcd"), 1, flags=flags, tls=True)
    access = EtcdAccess(
        cluster.endpoints,
        tls=True,
        cacert=certs / "ca.crt",
        cert=certs / "client.crt",
        key=certs / "client.key",
    )
    try:
        cluster.start(access)
        yield access
    finally:
        cluster.stop()


def test_it_makes_what_it_says_for_its_owner_alone_and_keeps_no_authoritys_key(certs: Path) -> None:
    made = {path.name: path.stat().st_mode & 0o777 for path in certs.iterdir()}
    assert set(made) == {"ca.crt", "server.crt", "server.key", "client.crt", "client.key"}
    assert not [name for name, mode in made.items() if mode & 0o077]


def test_the_servers_certificate_is_for_the_hosts_that_were_named(certs: Path) -> None:
    cert = x509.load_pem_x509_certificate((certs / "server.crt").read_bytes())
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "etcd-0.etcd"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == [
        "127.0.0.1",
        "::1",
        "10.1.2.3",
        "fd00::7",
    ]


def test_without_a_folder_it_says_how_it_is_used() -> None:
    done = subprocess.run(["sh", SCRIPT], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and "usage:" in done.stderr


def flags(access: EtcdAccess) -> list[str]:
    return [
        f"--etcd={access.url}",
        f"--etcd-cacert={access.cacert}",
        f"--etcd-cert={access.cert}",
        f"--etcd-key={access.key}",
    ]


def test_a_job_runs_over_them(etcd: EtcdAccess, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("import os; print('rank', os.environ['RANK'])\n")
    done = subprocess.run(
        [ELASTICD, "run", *flags(etcd), "--job=tls", "--min=1", "--max=1", "--http=off", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "rank 0\n"), done.stderr


def test_the_doctor_finds_them_in_order(etcd: EtcdAccess) -> None:
    done = subprocess.run(
        [ELASTICD, "doctor", *flags(etcd), "--json"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    told = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert told["certificates"]["grade"] == "fine"
    assert "29 days left" in told["certificates"]["says"]
    assert told["clock"]["grade"] == "fine"
