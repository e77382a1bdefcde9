"""The sentence that says why etcd cannot be used, and what to do."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from elasticd.core.facts import Budget
from elasticd.core.ports import Applied, LeaseHeld, Listing, Put
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.blocking_client import Client
from elasticd.etcd.embedded import Embedded
from elasticd.etcd.errors import StoreRefused, StoreUnavailable, WrongEndpoint
from elasticd.etcd.store import EtcdStore

from .cluster import Authority, Cluster, GuardedEtcd
from .conftest import Heard


def check(access: EtcdAccess) -> None:
    with Client(replace(access, timeout_s=5.0)) as client:
        client.check()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdAccess]:
    """An etcd that requires client certificates, and an access with one."""
    with GuardedEtcd(tmp_path_factory.mktemp("guarded")) as etcd:
        yield etcd.known_as("client")


@contextlib.contextmanager
def listener(greeting: bytes | None) -> Iterator[str]:
    """A server that sends the greeting and hangs up; None: that accepts connections and stays mute."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = server.accept()
                    with client:
                        client.sendall(greeting or b"")
                        client.shutdown(socket.SHUT_WR)
                        client.recv(4096)

        if greeting is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def website() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_store_works_over_tls_with_client_certificates(
    guarded: EtcdAccess, heard: Heard, open_store: Callable[..., EtcdStore]
) -> None:
    store = open_store(guarded)
    store.hold_lease(heard)
    store.watch("", heard, prefix=True)
    store.transact((), (Put("budget", Budget(), leased=True),), heard)
    heard.until(lambda: {LeaseHeld, Listing, Applied} <= {type(what) for what in heard})


def test_http_where_it_speaks_tls_says_to_use_https(guarded: EtcdAccess) -> None:
    with pytest.raises(WrongEndpoint, match=f"speaks TLS; use https://{guarded.endpoints[0]}"):
        check(EtcdAccess(guarded.endpoints))


def test_https_where_it_does_not_speak_tls_says_to_use_http(etcd: Embedded, authority: Authority) -> None:
    with pytest.raises(WrongEndpoint, match=f"does not speak TLS; use http://{etcd.endpoint}"):
        check(EtcdAccess((etcd.endpoint,), tls=True, cacert=authority.cert))


def test_a_server_of_another_authority_is_not_trusted(guarded: EtcdAccess, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    with pytest.raises(StoreRefused, match=r"certificate of etcd .* is not valid for .*other.pem"):
        check(replace(guarded, cacert=other.cert))


def test_a_server_certificate_for_another_host_is_not_trusted(tmp_path: Path, authority: Authority) -> None:
    cert, key = authority.issue("elsewhere", "10.1.2.3")
    cluster = Cluster(tmp_path, 1, flags=(f"--cert-file={cert}", f"--key-file={key}"), tls=True)
    try:
        cluster.members[0].start()
        with pytest.raises(StoreRefused, match=r"not valid for .*IP address mismatch"):
            _until_listening(EtcdAccess(cluster.endpoints, tls=True, cacert=authority.cert, timeout_s=5.0))
    finally:
        cluster.stop()


def _until_listening(access: EtcdAccess) -> None:
    for _ in range(200):
        try:
            check(access)
        except StoreUnavailable:
            threading.Event().wait(0.1)


def test_no_client_certificate_where_one_is_wanted_is_refused(guarded: EtcdAccess) -> None:
    with pytest.raises(StoreRefused, match="asks for a client certificate"):
        check(replace(guarded, cert=None, key=None))


def test_a_client_certificate_of_another_authority_is_refused(guarded: EtcdAccess, tmp_path: Path) -> None:
    cert, key = Authority(tmp_path, "other").issue("stranger")
    with pytest.raises(StoreRefused, match=r"does not accept the certificate .*stranger.pem"):
        check(replace(guarded, cert=cert, key=key))


def test_files_that_are_no_certificates_are_named(guarded: EtcdAccess, tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("not a certificate")
    with pytest.raises(StoreRefused, match=r"CA certificate .*junk.pem cannot be used"):
        check(replace(guarded, cacert=junk))
    with pytest.raises(StoreRefused, match=r"client certificate .*junk.pem .* cannot be used"):
        check(replace(guarded, cert=junk))


def test_an_endpoint_where_no_server_listens_is_a_clear_error() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{sock.getsockname()[1]}"
        with pytest.raises(StoreUnavailable, match=f"nothing listens at {endpoint}; start etcd there"):
            check(EtcdAccess((endpoint,)))


def test_an_unknown_host_is_a_clear_error() -> None:
    with pytest.raises(
        StoreUnavailable, match=r"host of etcd endpoint no-such-host.invalid:2379 is not known"
    ):
        check(EtcdAccess(("no-such-host.invalid:2379",)))


def test_a_web_server_is_not_an_etcd(website: str) -> None:
    with pytest.raises(WrongEndpoint, match=f"what listens at {website} is not an etcd v3"):
        check(EtcdAccess((website,)))


def test_an_ssh_server_is_not_an_etcd() -> None:
    with listener(b"SSH-2.0-OpenSSH_9.2\r\n") as endpoint:
        with pytest.raises(WrongEndpoint, match=f"what listens at {endpoint} is not an etcd v3"):
            check(EtcdAccess((endpoint,)))
        with pytest.raises(WrongEndpoint, match="does not speak TLS"):
            check(EtcdAccess((endpoint,), tls=True))


def test_a_server_that_never_answers_is_unavailable() -> None:
    with (
        listener(None) as endpoint,
        pytest.raises(StoreUnavailable, match="accepts connections but does not answer"),
        Client(EtcdAccess((endpoint,), timeout_s=0.5)) as client,
    ):
        client.check()


def test_another_grpc_server_is_not_an_etcd() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from elasticd.etcd._client3 import grpc

    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(WrongEndpoint, match=f"what listens at 127.0.0.1:{port} is not an etcd v3"):
            check(EtcdAccess((f"127.0.0.1:{port}",)))
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_one_good_endpoint_among_dead_ones_is_enough(
    scheme: str, etcd: Embedded, guarded: EtcdAccess
) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{sock.getsockname()[1]}"
        good = guarded if scheme == "https" else etcd.access
        check(replace(good, endpoints=(dead, *good.endpoints)))
