"""etcds on ports of loopback: one, several members, with TLS."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import os
import signal
import ssl
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from elasticd.etcd import embedded
from elasticd.etcd._client3 import grpc, rpc
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.blocking_client import Client
from elasticd.etcd.connection import _credentials
from elasticd.etcd.embedded import Embedded
from elasticd.etcd.errors import NoSpace, StoreError
from elasticd.etcd.roles import Roles
from tests.ports import free_port


class Authority:
    """Signs certificates into a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.cert = self._write(name, self._sign(self._name, self._key, ca=True), self._key)[0]

    def issue(self, name: str, *addresses: str, expires_h: float = 24.0) -> tuple[Path, Path]:
        """Issue a certificate and its key, for a client and for a server at these IP addresses.
        ``expires_h``: hours from now; negative for an expired certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        return self._write(name, self._sign(subject, key, addresses=addresses, expires_h=expires_h), key)

    def trusting(self) -> ssl.SSLContext:
        """Return a client's context that trusts this authority, whose certificates have fewer extensions than
        Python 3.13 requires."""
        context = ssl.create_default_context(cafile=self.cert)
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        *,
        ca: bool = False,
        addresses: tuple[str, ...] = (),
        expires_h: float = 24.0,
    ) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=9))
            .not_valid_after(now + dt.timedelta(hours=expires_h))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if addresses:
            names = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def _write(self, name: str, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> tuple[Path, Path]:
        cert_path, key_path = self._folder / f"{name}.pem", self._folder / f"{name}-key.pem"
        cert_path.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return cert_path, key_path


def freeze(pid: int) -> None:
    """Stop a child of this process, and wait until all of its threads stand still: a thread on another
    core may still answer a request."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


class EtcdOnPorts(Embedded):
    """An embedded etcd on ports of loopback, for clients that need TCP: other nodes, a proxy, a typed URL."""

    def __init__(self) -> None:
        super().__init__()
        self._ports = free_port(), free_port()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._ports[0]}"

    def _urls(self) -> tuple[str, str]:
        client, peer = self._ports
        return f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"


@dataclass
class Member:
    """One member of a cluster, and the member's process."""

    name: str
    client: int
    peer: int
    argv: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    host: str = "127.0.0.1"

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.client}"

    def start(self) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("ETCD")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(embedded.ends_with_us(self.argv), stdout=log, stderr=log, env=env)

    def signal(self, number: int) -> None:
        """Send a signal. After SIGSTOP, the member stands still when this returns."""
        assert self.process is not None
        if number == signal.SIGSTOP:
            freeze(self.process.pid)
        else:
            self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


class Cluster:
    """Several members of one etcd, started by ``with`` or ``start``. Both return once etcd serves. ``hosts``:
    for each member its address, and the words that begin a command to be run there; by default loopback and
    no words."""

    def __init__(
        self,
        folder: Path,
        size: int,
        *,
        flags: tuple[str, ...] = (),
        tls: bool = False,
        peer_tls: bool = False,
        hosts: Sequence[tuple[str, Sequence[str]]] = (),
    ) -> None:
        scheme, peer_scheme = ("https" if is_tls else "http" for is_tls in (tls, peer_tls))
        hosts = hosts or [("127.0.0.1", ())] * size
        ports = [(free_port(), free_port()) for _ in range(size)]
        peers = [f"{peer_scheme}://{host}:{peer}" for (host, _), (_, peer) in zip(hosts, ports, strict=True)]
        initial = ",".join(f"m{i}={peer}" for i, peer in enumerate(peers))
        self.members = []
        for i, ((host, inside), (client, peer)) in enumerate(zip(hosts, ports, strict=True)):
            argv = [*inside, str(embedded.find_etcd()), f"--name=m{i}", f"--data-dir={folder / f'm{i}'}"]
            argv += [f"--listen-client-urls={scheme}://{host}:{client}"]
            argv += [f"--advertise-client-urls={scheme}://{host}:{client}"]
            argv += [f"--listen-peer-urls={peers[i]}"]
            argv += [f"--initial-advertise-peer-urls={peers[i]}"]
            argv += [f"--initial-cluster={initial}", "--log-level=warn", *flags]
            self.members.append(Member(f"m{i}", client, peer, argv, folder / f"m{i}.log", host=host))

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(member.endpoint for member in self.members)

    def start(self, access: EtcdAccess | None = None) -> None:
        for member in self.members:
            member.start()
        await_serving(access or EtcdAccess(self.endpoints))

    def at(self, endpoint: str) -> Member:
        return next(member for member in self.members if member.endpoint == endpoint)

    def leader(self) -> Member:
        for member in self.members:
            with Client(EtcdAccess((member.endpoint,))) as client:
                if client.status().leader:
                    return member
        raise AssertionError("no member leads")

    def stop(self) -> None:
        for member in self.members:
            member.kill()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class GuardedEtcd(Cluster):
    """One etcd with TLS. It accepts clients with a certificate of ``authority``."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder, "authority")
        cert, key = self.authority.issue("server", "127.0.0.1")
        flags = ("--client-cert-auth", f"--trusted-ca-file={self.authority.cert}")
        super().__init__(folder, 1, flags=(*flags, f"--cert-file={cert}", f"--key-file={key}"), tls=True)

    def known_as(self, name: str) -> EtcdAccess:
        """Return the access of a client with a certificate of this common name."""
        cert, key = self.authority.issue(name)
        return EtcdAccess(
            self.endpoints, tls=True, cacert=self.authority.cert, cert=cert, key=key, timeout_s=5.0
        )

    def start(self, access: EtcdAccess | None = None) -> None:
        super().start(access or self.known_as("root"))

    def require_login(self) -> None:
        """Enable authentication: from now on, a user has the rights of its roles. root logs in with its
        certificate."""
        root = self.known_as("root")
        with Roles(root) as roles:
            assert not roles.requires_login()
            roles.add_role("root")
            roles.add_user("root", None)
            roles.grant("root", "root")
        with grpc.secure_channel(self.endpoints[0], _credentials(root)) as channel:
            rpc.AuthStub(channel).AuthEnable(rpc.AuthEnableRequest(), timeout=10)


def fill(access: EtcdAccess) -> None:
    """Write until the etcd is full. Its quota should be small."""
    with Client(access) as client:
        for number in range(10_000):
            try:
                client.swap_raw(b"/junk/%d" % number, bytes(100_000), 0)
            except NoSpace:
                return
    raise AssertionError("the etcd is not full")


def make_room(access: EtcdAccess) -> None:
    """Free the space of a full etcd as a person does: delete, compact, defragment, disarm."""
    with Client(access) as client:
        client.delete_raw(b"/junk/", prefix=True)  # a full etcd still accepts that
    compact(access)
    with grpc.insecure_channel(access.endpoints[0]) as channel:
        maintenance = rpc.MaintenanceStub(channel)
        maintenance.Defragment(rpc.DefragmentRequest(), timeout=30)
        for raised in maintenance.Alarm(rpc.AlarmRequest(), timeout=30).alarms:
            disarm = {"memberID": raised.memberID, "alarm": raised.alarm}
            maintenance.Alarm(rpc.AlarmRequest(action=rpc.AlarmRequest.DEACTIVATE, **disarm), timeout=30)


def compact(access: EtcdAccess) -> None:
    """Discard the history of all keys."""
    with Client(access) as client, grpc.insecure_channel(access.endpoints[0]) as channel:
        revision = client.list_raw(b"/").revision
        rpc.KVStub(channel).Compact(rpc.CompactionRequest(revision=revision, physical=True), timeout=30)


def await_serving(access: EtcdAccess, tries: int = 600) -> None:
    """Wait until a quorum answers."""
    with Client(access) as client:
        for left in reversed(range(tries)):
            try:
                client.get_raw(b"/")
                return
            except StoreError:
                if not left:
                    raise
                select_pause()


def select_pause() -> None:
    """Pause: no event tells that a port is open."""
    import select

    select.select([], [], [], 0.1)
