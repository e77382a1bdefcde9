import base64
import contextlib
import http.client
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from elasticd.telemetry import http as served
from elasticd.telemetry.http import Answer, HttpServer, Site, Tls
from tests.etcd.cluster import Authority


def fail(_: Mapping[str, str]) -> Answer:
    raise RuntimeError("on purpose")


@pytest.fixture
def server() -> Iterator[HttpServer]:
    pages = {
        "/": lambda _: Answer(b"home\n"),
        "/accept": lambda headers: Answer(headers.get("accept", "nothing").encode()),
        "/broken": fail,
    }
    with HttpServer("127.0.0.1", 0, Site(pages)) as server:
        yield server


def get(server: HttpServer, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def raw(server: HttpServer, data: bytes) -> bytes:
    """Send bytes. Return everything that comes back."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(data)
        return b"".join(iter(lambda: sock.recv(65536), b""))


def test_pages_are_answered_by_their_path(server: HttpServer) -> None:
    assert get(server, "/") == (200, b"home\n")
    assert get(server, "/?refresh=1") == (200, b"home\n")
    assert get(server, "/accept", Accept="text/plain") == (200, b"text/plain")
    status, body = get(server, "/nothing")
    assert status == 404 and b"/accept" in body, "what there is instead"


def test_only_reading_is_possible(server: HttpServer) -> None:
    assert get(server, "/", "HEAD") == (200, b"")
    assert {get(server, "/", method)[0] for method in ("POST", "PUT", "DELETE")} == {405}


def test_a_page_that_fails_takes_no_other_with_it(server: HttpServer) -> None:
    status, body = get(server, "/broken")
    assert status == 500 and b"on purpose" not in body
    assert get(server, "/") == (200, b"home\n")


@pytest.mark.parametrize("nonsense", [b"\r\n\r\n", b"\x16\x03\x01\r\n\r\n", b"GET / SPDY/3\r\n\r\n"])
def test_an_invalid_request_is_refused(server: HttpServer, nonsense: bytes) -> None:
    assert raw(server, nonsense).startswith(b"HTTP/1.1 400 ")
    assert get(server, "/")[0] == 200


def test_a_request_without_end_is_cut_off(server: HttpServer) -> None:
    try:
        said = raw(server, b"GET / HTTP/1.1\r\nX: " + b"y" * (2 * served.REQUEST_MAX_BYTES))
    except ConnectionError:
        said = b""
    assert said == b""
    assert get(server, "/")[0] == 200


def test_a_slow_client_is_dropped_and_others_are_answered_meanwhile(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "PATIENCE_S", 0.3)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
        slow.sendall(b"GET / HT")
        assert get(server, "/")[0] == 200
        try:
            assert slow.recv(1) == b""
        except ConnectionError:
            pass


def test_each_request_is_answered_despite_any_number_of_idle_connections(server: HttpServer) -> None:
    idle: list[socket.socket] = []
    try:
        for _ in range(25):
            for _ in range(served.CONNECTIONS_MAX):
                idle.append(socket.create_connection(("127.0.0.1", server.port), timeout=30))
                idle[-1].sendall(b"G")
            assert get(server, "/") == (200, b"home\n")
    finally:
        for sock in idle:
            sock.close()


def test_the_oldest_connection_makes_room_for_one_too_many(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "PATIENCE_S", 600.0)
    place = ("127.0.0.1", server.port)
    with contextlib.ExitStack() as held:
        idle = [
            held.enter_context(socket.create_connection(place, timeout=30))
            for _ in range(served.CONNECTIONS_MAX + 2)
        ]
        assert idle[0].recv(1) == idle[1].recv(1) == b""
        idle[2].sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert idle[2].recv(15) == b"HTTP/1.1 200 OK"


def test_a_client_that_does_not_read_its_answer_blocks_no_other() -> None:
    pages = {"/": lambda _: Answer(b"home\n"), "/big": lambda _: Answer(bytes(16 << 20))}
    with HttpServer("127.0.0.1", 0, Site(pages)) as server:
        deaf = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(40)]
        try:
            for sock in deaf:
                sock.sendall(b"GET /big HTTP/1.0\r\n\r\n")
            assert get(server, "/") == (200, b"home\n")
        finally:
            for sock in deaf:
                sock.close()


def test_a_client_that_sends_a_byte_now_and_then_is_dropped(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "PATIENCE_S", 0.5)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nX: ")
        slow.settimeout(0.05)
        while not dropped(slow):
            with contextlib.suppress(ConnectionError):
                slow.sendall(b"y")


def dropped(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_what_comes_with_a_request_is_not_read(server: HttpServer) -> None:
    body = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n\r\n" + b"x" * 1000
    assert raw(server, body).startswith(b"HTTP/1.1 400 ")
    assert get(server, "/")[0] == 200


def test_strangers_do_not_write_our_log(
    server: HttpServer, tls: Tls, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    for nonsense in (b"\r\n\r\n", b"GET /nothing HTTP/1.0\r\n\r\n", b"POST / HTTP/1.0\r\n\r\n"):
        raw(server, nonsense)
    with HttpServer("127.0.0.1", 0, Site({}), tls) as secure, contextlib.suppress(ConnectionError):
        raw(secure, b"GET / HTTP/1.0\r\n\r\n")
    assert not caplog.records
    get(server, "/broken")
    assert [record.message for record in caplog.records] == ["cannot answer /broken"]


def test_the_server_is_imported_at_the_first_request() -> None:
    program = """
import sys, urllib.request
from elasticd.telemetry.http import Answer, HttpServer, Site

with HttpServer("127.0.0.1", 0, Site({"/": lambda _: Answer(b"home")})) as server:
    assert not {"tornado", "asyncio"} & set(sys.modules)
    assert urllib.request.urlopen(server.url).read() == b"home"
    assert "tornado" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certs"), "us")


@pytest.fixture(scope="module")
def tls(authority: Authority) -> Tls:
    return Tls(*authority.issue("agent", "127.0.0.1"))


def test_over_tls_a_client_can_verify_the_server(authority: Authority, tls: Tls) -> None:
    trusting = authority.trusting()
    with HttpServer("127.0.0.1", 0, Site({"/": lambda _: Answer(b"home\n")}), tls) as server:
        assert server.url == f"https://127.0.0.1:{server.port}/"
        with urllib.request.urlopen(server.url, context=trusting, timeout=30) as answer:
            assert answer.read() == b"home\n"
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(server.url, timeout=30)
        with pytest.raises(ConnectionError):
            get(server, "/")  # without encryption


def test_over_tls_idle_connections_block_no_other(authority: Authority, tls: Tls) -> None:
    trusting = authority.trusting()
    with HttpServer("127.0.0.1", 0, Site({"/": lambda _: Answer(b"home\n")}), tls) as server:
        idle = [
            socket.create_connection(("127.0.0.1", server.port), timeout=30)
            for _ in range(2 * served.CONNECTIONS_MAX)
        ]
        try:
            with urllib.request.urlopen(server.url, context=trusting, timeout=30) as answer:
                assert answer.read() == b"home\n"
        finally:
            for sock in idle:
                sock.close()


def test_a_server_with_an_invalid_certificate_does_not_start(tls: Tls, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing")
    for wrong in (Tls(nothing, tls.key), Tls(tls.cert, nothing), Tls(tls.cert, tmp_path / "missing")):
        with pytest.raises(OSError, match=r"PEM|No such file"):
            HttpServer("127.0.0.1", 0, Site({}), wrong)


def basic(user: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (None, 401),
        ("Bearer s3cret", 200),
        ("bearer  s3cret", 200),
        (basic("", "s3cret"), 200),
        (basic("anybody", "s3cret"), 200),
        ("Bearer", 401),
        ("Bearer s3cre", 401),
        ("Bearer s3crets", 401),
        ("Bearer s\xe4cret", 401),
        ("s3cret", 401),
        (basic("s3cret", ""), 401),
        ("Basic s3cret", 401),
        ("Basic !", 401),
        ("Basic \xe4", 401),
        ("Digest s3cret", 401),
    ],
)
def test_a_private_page_needs_the_token(sent: str | None, status: int) -> None:
    pages = {path: lambda _: Answer(b"ok\n") for path in ("/status", "/healthz")}
    headers = {} if sent is None else {"Authorization": sent}
    with HttpServer("127.0.0.1", 0, Site(pages, private=("/status",), token="s3cret")) as server:
        assert get(server, "/status", **headers)[0] == get(server, "/status", "HEAD", **headers)[0] == status
        assert get(server, "/healthz")[0] == get(server, "/healthz", **headers)[0] == 200
        refusal = raw(server, b"GET /status HTTP/1.0\r\n\r\n")
        assert b"\r\nwww-authenticate: basic " in refusal.lower(), "so that a browser asks for it"
    assert "s3cret" not in repr(Site(pages, token="s3cret"))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9408", 200),
        ("localhost", 200),
        ("LOCALHOST.:9408", 200),
        ("[::1]:9408", 200),
        ("10.0.0.7:9408", 200),
        ("node-a:9408", 200),
        ("evil.example:9408", 421),
        ("localhost.evil.example", 421),
        ("node-a.evil.example:9408", 421),
        ("127.0.0.1.evil.example", 421),
    ],
)
def test_a_guarded_page_needs_a_host_header_of_this_machine(host: str, status: int) -> None:
    pages = {path: lambda _: Answer(b"ok\n") for path in ("/status", "/healthz")}
    with HttpServer("127.0.0.1", 0, Site(pages, guarded=("/status",), names=("node-a",))) as server:
        assert get(server, "/status", Host=host)[0] == status
        assert get(server, "/healthz", Host=host)[0] == 200
        assert raw(server, b"GET /status HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_a_port_that_is_taken_is_no_reason_to_fail(server: HttpServer) -> None:
    with HttpServer("127.0.0.1", server.port, Site({"/": lambda _: Answer(b"other\n")})) as other:
        assert other.port != server.port
        assert get(other, "/") == (200, b"other\n")
        assert other.url == f"http://127.0.0.1:{other.port}/"


def test_an_address_of_another_machine_cannot_be_served() -> None:
    with pytest.raises(OSError, match="assign"):
        HttpServer("203.0.113.9", 0, Site({}))


def test_a_closed_server_leaves_no_port_and_no_thread(server: HttpServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as idle:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as later:
            later.sendall(b"GET /nowhere HTTP/1.0\r\n\r\n")
            assert later.recv(1), "so the idle one was taken in before"
        server.close()
        assert idle.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=30)
    assert "elasticd-http" not in {thread.name for thread in threading.enumerate()}
    server.close()


def test_a_server_that_is_closed_at_once_ends_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    for _ in range(50):
        HttpServer("127.0.0.1", 0, Site({})).close()
    assert not failed
