"""The certificates script, and its certificates in use: an etcd with TLS, a job, the doctor."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from elasticd.etcd.access import EtcdAccess
from tests import forkserver
from tests.etcd.cluster import Cluster, Member

SCRIPT = Path(__file__).parents[2] / "deploy" / "certs.sh"
ELASTICD = str(Path(sys.executable).with_name("elasticd"))
PATIENCE_S = 90

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    done = subprocess.run(
        ["sh", SCRIPT, "--job", "train", folder, "etcd-0.etcd", "10.1.2.3", "fd00::7"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return folder


def certs_sh(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", SCRIPT, *words], capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def members(certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Member]]:
    """Three members: one member alone would not prove that members accept each other."""
    flags = (
        "--client-cert-auth",
        f"--trusted-ca-file={certs / 'ca.crt'}",
        f"--cert-file={certs / 'server.crt'}",
        f"--key-file={certs / 'server.key'}",
        "--peer-client-cert-auth",
        f"--peer-trusted-ca-file={certs / 'peer-ca.crt'}",
        f"--peer-cert-file={certs / 'peer.crt'}",
        f"--peer-key-file={certs / 'peer.key'}",
    )
    cluster = Cluster(tmp_path_factory.mktemp("etcd"), 3, flags=flags, tls=True, peer_tls=True)
    try:
        cluster.start(access_with(certs, "client", cluster.endpoints))
        yield cluster.members
    finally:
        cluster.stop()


def access_with(certs: Path, name: str, endpoints: tuple[str, ...]) -> EtcdAccess:
    cert, key = certs / f"{name}.crt", certs / f"{name}.key"
    return EtcdAccess(endpoints, tls=True, cacert=certs / "ca.crt", cert=cert, key=key)


@pytest.fixture(scope="module")
def etcd(certs: Path, members: list[Member]) -> EtcdAccess:
    return access_with(certs, "client", tuple(member.endpoint for member in members))


def test_the_script_makes_all_certificates_for_their_owner_alone_and_keeps_no_authoritys_key(
    certs: Path,
) -> None:
    made = {path.name: path.stat().st_mode & 0o777 for path in certs.iterdir()}
    pairs = ("server", "client", "root", "job-train", "peer")
    wanted = {f"{name}.{kind}" for name in pairs for kind in ("crt", "key")}
    assert set(made) == {"ca.crt", "peer-ca.crt", *wanted}
    assert not [name for name, mode in made.items() if mode & 0o077]


def test_each_client_is_called_as_its_file_and_a_job_by_its_name(certs: Path) -> None:
    for file, name in (("client", "elasticd"), ("root", "root"), ("job-train", "train")):
        cert = x509.load_pem_x509_certificate((certs / f"{file}.crt").read_bytes())
        assert [a.value for a in cert.subject] == [name], file
        (use,) = cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert use == ExtendedKeyUsageOID.CLIENT_AUTH


def answers(port: int, certs: Path, name: str) -> bool:
    """Whether the server there accepts this certificate and answers. Raises if it is no etcd."""
    context = ssl.create_default_context()
    context.check_hostname = False
    # the question is whether the server accepts this client, not the reverse
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(certs / f"{name}.crt", certs / f"{name}.key")
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)
    try:
        connection.request("GET", "/version")
        assert b"etcdserver" in connection.getresponse().read()
    except (ssl.SSLError, ConnectionError):
        return False
    finally:
        connection.close()
    return True


@pytest.mark.parametrize("name", ["client", "root", "job-train", "server"])
def test_what_clients_have_does_not_pass_for_a_member_nor_the_other_way_round(
    certs: Path, members: list[Member], name: str
) -> None:
    assert answers(members[0].client, certs, name)
    assert not answers(members[0].peer, certs, name)
    assert answers(members[0].peer, certs, "peer")
    assert not answers(members[0].client, certs, "peer")


def test_a_job_can_be_given_a_certificate_later_if_the_key_was_kept(tmp_path: Path) -> None:
    kept, thrown_away = tmp_path / "kept", tmp_path / "thrown_away"
    assert certs_sh("--job", "one", "--keep-key", kept, "localhost").returncode == 0
    before = {path: path.read_bytes() for path in kept.iterdir()}
    assert certs_sh("--job", "two", "--job", "three", kept).returncode == 0
    assert before == {path: path.read_bytes() for path in before}, "etcd need not be started again"
    for name in ("one", "two", "three"):
        context = ssl.create_default_context(cafile=kept / "ca.crt")
        context.load_cert_chain(kept / f"job-{name}.crt", kept / f"job-{name}.key")
        cert = x509.load_pem_x509_certificate((kept / f"job-{name}.crt").read_bytes())
        cert.verify_directly_issued_by(x509.load_pem_x509_certificate((kept / "ca.crt").read_bytes()))
    assert certs_sh(thrown_away, "localhost").returncode == 0
    done = certs_sh("--job", "two", thrown_away)
    assert done.returncode == 2 and "ca.key was not kept" in done.stderr


@pytest.mark.parametrize("name", ["root", "etcd", "", "-a", "a b", "a/CN=root", "a" * 65])
def test_a_name_that_is_no_jobs_own_is_refused(tmp_path: Path, name: str) -> None:
    done = certs_sh("--job", name, tmp_path / "made", "localhost")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "made").exists()


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
    argv = [ELASTICD, "run", *flags(etcd), "--job=tls", "--min=1", "--max=1", "--http=off", str(script)]
    done = forkserver.run(argv, env=os.environ, cwd=tmp_path, timeout_s=PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, "rank 0\n"), done.stderr


def test_the_doctor_finds_them_in_order(etcd: EtcdAccess) -> None:
    done = subprocess.run(
        [ELASTICD, "doctor", *flags(etcd), "--json"],
        env={**os.environ, "PYTHON_EXEC": "/no/python"},  # an import of torch would take seconds
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    told = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert told["certificates"]["grade"] == "fine"
    assert "29 days left" in told["certificates"]["says"]
    assert told["clock"]["grade"] == "fine"
