"""A role for each job, as the guides say, on etcds that are started as the manifests say."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from elasticd.core.facts import Budget
from elasticd.core.ports import Put
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.blocking_client import Client
from elasticd.etcd.embedded import find_etcd
from elasticd.etcd.errors import StoreRefused
from tests.etcd.cluster import Cluster
from tests.k8s.manifests import Pods, overlay, pods

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")


@dataclass(frozen=True)
class Told:
    """What the guide of a deployment says. The flags of etcd, and the commands to type. ``certs``: whose
    files lie where etcd looks for its own, and for etcdctl's."""

    job: str
    flags: tuple[str, ...]
    certs: dict[str, str]
    etcdctl: str
    lines: tuple[str, ...]


def section(guide: Path) -> str:
    (found,) = re.findall(r"^## A role for each job\n(.*?)^## ", guide.read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


def lines(text: str) -> tuple[str, ...]:
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return tuple(line for block in blocks for line in block.splitlines())


def kubernetes() -> Told:
    (etcd,) = [p for p in pods(overlay("base")) if not p.trains]
    env = etcd.env({"metadata.name": "etcd-0"})
    certs = {"ca.crt": "ca.crt", "tls.crt": "server.crt", "tls.key": "server.key"}
    assert env["ETCDCTL_CERT"] == "/etc/etcd/tls/tls.crt" and env["ETCDCTL_KEY"] == "/etc/etcd/tls/tls.key"
    return Told(
        "train", flags(Pods.argv(etcd, env)), certs, "server", lines(section(ROOT / "k8s" / "README.md"))
    )


def compose() -> Told:
    services = yaml.safe_load((ROOT / "deploy" / "compose.tls.yaml").read_text())["services"]
    etcd = services["etcd"]
    certs = dict(reversed(volume.removesuffix(":ro").split(":")) for volume in etcd["volumes"])
    assert etcd["environment"]["ETCDCTL_CERT"] == "/etc/etcd/tls/root.crt"
    told = lines(section(ROOT / "deploy" / "README.md").partition("compose.tls.yaml")[2])
    names = {Path(target).name: Path(source).name for target, source in certs.items()}
    return Told("gpt", flags(etcd["command"]), names, "root", told)


def flags(argv: list[str]) -> tuple[str, ...]:
    """Return the flags that say which certificates are accepted. The addresses are those of the test."""
    said = ("--client-cert-auth", "--enable-grpc-gateway", "--trusted-ca", "--cert-file", "--key-file")
    return tuple(flag for flag in argv if flag.startswith(said))


@dataclass(frozen=True)
class Guarded:
    told: Told
    made: Path
    endpoints: tuple[str, ...]

    def known_by(self, name: str) -> EtcdAccess:
        cert, key = self.made / f"{name}.crt", self.made / f"{name}.key"
        return EtcdAccess(self.endpoints, tls=True, cacert=self.made / "ca.crt", cert=cert, key=key)


@pytest.fixture(params=[kubernetes, compose], ids=lambda made: made.__name__)
def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Guarded]:
    """Yield an etcd as deployed, after all commands of the guide."""
    told: Told = request.param()
    made, placed = tmp_path / "made", tmp_path / "placed"
    script = ["sh", ROOT / "deploy" / "certs.sh", "--job", told.job, "--job", "other", made, "localhost"]
    subprocess.run(script, check=True, capture_output=True, timeout=60)
    placed.mkdir()
    for target, source in told.certs.items():
        shutil.copy(made / source, placed / target)
    here = tuple(flag.replace("/etc/etcd/tls", str(placed)) for flag in told.flags)
    cluster = Cluster(tmp_path, 1, flags=here, tls=True)
    etcd = Guarded(told, made, cluster.endpoints)
    try:
        cluster.start(etcd.known_by(told.etcdctl))
        type_in(etcd, tmp_path)
        yield etcd
    finally:
        cluster.stop()


def type_in(etcd: Guarded, folder: Path) -> None:
    """Run the commands of the guide, with this machine's etcdctl in place of ``kubectl exec`` and ``docker
    compose exec``."""
    inside = folder / "inside"
    inside.mkdir()
    for name in ("kubectl", "docker"):
        program = inside / name
        program.write_text('#!/bin/sh\nwhile [ "$1" != etcdctl ]; do shift; done\nexec "$@"\n')
        program.chmod(0o755)
    access = etcd.known_by(etcd.told.etcdctl)
    env = {
        "PATH": f"{inside}:{find_etcd().parent}:{BIN}:{os.environ['PATH']}",
        "ETCDCTL_API": "3",
        "ETCDCTL_ENDPOINTS": access.url,
        "ETCDCTL_CACERT": str(access.cacert),
        "ETCDCTL_CERT": str(access.cert),
        "ETCDCTL_KEY": str(access.key),
    }
    assert etcd.told.lines
    typed = "\n".join(["set -e", *etcd.told.lines])
    done = subprocess.run(["sh", "-c", typed], env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0 and "Error" not in done.stderr, (typed, done)
    for line in ("etcdctl member list", "etcdctl endpoint health"):  # what people and probes continue to do
        assert subprocess.run(shlex.split(line), env=env, capture_output=True, timeout=60).returncode == 0, (
            line
        )


def may_use(access: EtcdAccess, job: str) -> bool:
    with Client(access) as client:
        try:
            client.transact(job, (), (Put("budget", Budget()),))
        except StoreRefused as error:
            return "denied" not in str(error)
    return True


def test_one_jobs_certificate_cannot_touch_another_job(guarded: Guarded) -> None:
    job = guarded.told.job
    assert may_use(guarded.known_by(f"job-{job}"), job)
    assert not may_use(guarded.known_by(f"job-{job}"), "other")
    for name in ("job-other", "client"):
        assert not may_use(guarded.known_by(name), job), "it has no role yet"
    # etcd's gateway is closed: it would send requests with the server's own certificate.
    access = guarded.known_by(f"job-{job}")
    context = ssl.create_default_context(cafile=access.cacert)
    context.load_cert_chain(access.cert or "", access.key)
    host, _, port = access.endpoints[0].rpartition(":")
    body = b'{"key": "L2VsYXN0aWNkLw==", "range_end": "L2VsYXN0aWNkMA=="}'
    with (
        socket.create_connection((host, int(port)), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as tls,
    ):
        tls.sendall(b"POST /v3/kv/range HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n")
        tls.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        status = tls.recv(4096).split(b" ", 2)[1]
    assert status == b"404"
