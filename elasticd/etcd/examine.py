"""A close look at each endpoint of an etcd: does it respond, how fast, with which certificate, at what time.

The examination leaves nothing behind. Its writes are leases that are revoked at once; a lease costs what a
write costs (an agreement of the members, and a flush to their disks).
"""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticd.etcd.access import EtcdAccess, host_and_port, is_unix
from elasticd.etcd.diagnose import tls_context
from elasticd.etcd.errors import StoreError, StoreUnavailable
from elasticd.etcd.names import ROOT

if TYPE_CHECKING:
    from elasticd.etcd.blocking_client import Client

SAMPLES, SAMPLES_FEWEST = 20, 3
SAMPLING_S = 5.0  # for a slow etcd, fewer samples are enough


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate's owner and validity. ``of``: whose certificate it is, in words. Times in seconds since
    the epoch."""

    of: str
    not_before: float
    not_after: float


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The findings at one endpoint. ``error``: the fault of the endpoint, or empty; ``unreachable``: whether
    the error may pass.

    ``reads_s``, ``writes_s``: the duration of each request. ``ahead_s``: the least and the most by which the
    endpoint's clock is ahead of ours; None if unknown.
    """

    endpoint: str
    error: str = ""
    unreachable: bool = False
    version: str = ""
    reads_s: tuple[float, ...] = ()
    writes_s: tuple[float, ...] = ()
    ahead_s: tuple[float, float] | None = None
    certificate: Certificate | None = None


@dataclass(frozen=True, slots=True)
class Examined:
    """The findings at all endpoints. ``certificates``: our certificates, from files; ``open_key``: the path
    of our key if other users can read it."""

    endpoints: tuple[Endpoint, ...]
    certificates: tuple[Certificate, ...] = ()
    open_key: str = ""


def examine(access: EtcdAccess, wall: Callable[[], float] = time.time, key: bytes = ROOT) -> Examined:
    """Examine each endpoint separately; ``key`` is a key that this user may read. Never raises for faults of
    etcd."""
    files = [("the CA certificate", access.cacert), ("the client certificate", access.cert)]
    own = [c for what, path in files if path is not None and (c := _from_file(what, path)) is not None]
    key_is_open = access.key is not None and access.key.stat().st_mode & 0o007
    return Examined(
        endpoints=tuple(_endpoint(replace(access, endpoints=(e,)), e, wall, key) for e in access.endpoints),
        certificates=tuple(own),
        open_key=str(access.key) if key_is_open else "",
    )


def _endpoint(access: EtcdAccess, endpoint: str, wall: Callable[[], float], key: bytes) -> Endpoint:
    from elasticd.etcd.blocking_client import Client  # late: grpc is slow to import

    try:
        with Client(access) as client:
            version = client.check(key).version
            reads, writes = _time(client, key)
    except StoreError as error:
        return Endpoint(endpoint, str(error), isinstance(error, StoreUnavailable))
    ahead, certificate = _greet(access, endpoint, wall)
    return Endpoint(
        endpoint, version=version, reads_s=reads, writes_s=writes, ahead_s=ahead, certificate=certificate
    )


def _time(client: Client, key: bytes) -> tuple[tuple[float, ...], tuple[float, ...]]:
    reads: list[float] = []
    writes: list[float] = []
    give_up_at = time.monotonic() + SAMPLING_S
    while len(reads) < SAMPLES:
        began = time.monotonic()
        if began > give_up_at and len(reads) >= SAMPLES_FEWEST:
            break
        client.get_raw(key)
        read = time.monotonic()
        lease, _ttl = client.grant(5)
        writes.append(time.monotonic() - read)
        reads.append(read - began)
        client.revoke(lease)
    return tuple(reads), tuple(writes)


def _greet(
    access: EtcdAccess, endpoint: str, wall: Callable[[], float]
) -> tuple[tuple[float, float] | None, Certificate | None]:
    """Return the clock's offset and the certificate, from an HTTP response, whose Date is cut to the second.
    An etcd behind a Unix socket has this machine's clock."""
    if is_unix(endpoint):
        return None, None
    place = host_and_port(endpoint)
    connection = http.client.HTTPConnection(*place, timeout=access.timeout_s)
    if access.tls:
        context = tls_context(access)
        context.set_alpn_protocols(["http/1.1"])
        connection = http.client.HTTPSConnection(*place, timeout=access.timeout_s, context=context)
    certificate = None
    try:
        asked = wall()
        connection.request("GET", "/version")
        if isinstance(connection.sock, ssl.SSLSocket):
            certificate = _certificate(f"the certificate of {endpoint}", connection.sock.getpeercert())
        told = connection.getresponse().headers["Date"] or ""
        at = parsedate_to_datetime(told).replace(tzinfo=UTC).timestamp()
        return (at - wall(), at + 1.0 - asked), certificate
    # This etcd serves only gRPC, or sends no Date header.
    except (OSError, http.client.HTTPException, ValueError):
        return None, certificate
    finally:
        connection.close()


def _from_file(what: str, path: Path) -> Certificate | None:
    """Read a certificate; None if it cannot be read, since a connection then gives a better error."""
    try:
        # Private; the standard library has no public function that decodes a certificate from a file.
        decoded = ssl._ssl._test_decode_cert(str(path))  # type: ignore[attr-defined]
    except (ssl.SSLError, OSError, AttributeError):
        return None
    return _certificate(f"{what} {path}", decoded)


def _certificate(of: str, decoded: Any) -> Certificate | None:
    if not decoded:
        return None
    first, last = (float(ssl.cert_time_to_seconds(decoded[name])) for name in ("notBefore", "notAfter"))
    return Certificate(of, first, last)
