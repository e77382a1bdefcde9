"""Servers that have no free file for a connection, or many connections at once."""

from __future__ import annotations

import asyncio.constants
import errno
import json
import queue
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, cast

import pytest

from elasticd.checkpoint.replication.wire import Wire
from elasticd.core.gathered import Gathered
from elasticd.daemon.gathering import Gathering
from elasticd.daemon.leader_link.telemetry_listener import TelemetryListener
from elasticd.daemon.master_port import MasterPort
from elasticd.telemetry import accepting
from elasticd.telemetry.http import Answer, HttpServer, Site

PATIENCE_S = 60.0
SECRET = "secret of the job"


class Leader:
    """Stands in for the leader's ``Gathering``."""

    known = Gathered(1)


class Log:
    """Notes warnings."""

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def warning(self, event: str, **fields: Any) -> None:
        self.said.put({"event": event, **fields})


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    made = Log()
    monkeypatch.setattr("elasticd.telemetry.log.get", lambda name: made)
    monkeypatch.setattr(accepting, "RETRY_S", 0.001)
    monkeypatch.setattr("elasticd.telemetry.http_site.RETRY_S", 0.001)
    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", 0.001)
    return made


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connect_to_pages(cleanup: ExitStack) -> Any:
    pages = cleanup.enter_context(HttpServer("127.0.0.1", 0, Site({"/": lambda _: Answer(b"home\n")})))

    def ask() -> None:
        with socket.create_connection(("127.0.0.1", pages.port), PATIENCE_S) as sock:
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert b"home" in b"".join(iter(lambda: sock.recv(65536), b""))

    return ask


def connect_to_leader(cleanup: ExitStack) -> Any:
    listener = accepting.listen("127.0.0.1")
    port = listener.getsockname()[1]
    cleanup.enter_context(TelemetryListener(listener, SECRET, cast(Gathering, Leader())))
    return lambda: Wire.connect("127.0.0.1", port, SECRET).close()


@pytest.fixture(params=[connect_to_pages, connect_to_leader])
def connect(request: pytest.FixtureRequest, cleanup: ExitStack, log: Log) -> Any:
    return request.param(cleanup)


def test_a_first_connection_without_a_free_file_waits_and_is_logged_once(
    connect: Any, log: Log, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = iter([False, False, False])
    monkeypatch.setattr(accepting, "_are_free", lambda: next(free, True))
    connect()
    warning = log.said.get(timeout=PATIENCE_S)
    assert warning["event"] == "files.none_free" and "ulimit -n" in warning["sentence"]
    assert log.said.empty() and next(free, None) is None and not caplog.records


def test_a_server_without_a_free_file_tries_again_later_and_logs_it_once(
    connect: Any, log: Log, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect()  # the server runs from here on
    tried = 0
    accept = socket.socket._accept  # type: ignore[attr-defined]

    def full(listener: socket.socket) -> Any:
        nonlocal tried
        tried += 1
        if tried > 150:  # asyncio tries 100 times in a row
            return accept(listener)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "_accept", full)
    connect()
    assert log.said.get(timeout=PATIENCE_S)["event"] == "files.none_free"
    assert log.said.empty() and not caplog.records


def test_a_server_that_ends_does_not_wait_for_a_free_file(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "_are_free", lambda: False)
    monkeypatch.setattr(accepting, "RETRY_S", PATIENCE_S)
    with HttpServer("127.0.0.1", 0, Site({})) as server:
        socket.create_connection(("127.0.0.1", server.port), PATIENCE_S).close()
        log.said.get(timeout=PATIENCE_S)
        began = time.monotonic()
    assert time.monotonic() - began < PATIENCE_S / 2


@pytest.mark.parametrize("which", ["leader", "master port"])
def test_a_thousand_connections_at_once_wait_in_the_kernel_until_they_are_accepted(
    which: str, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    listened = queue.SimpleQueue[int]()
    listen = socket.socket.listen

    def note(sock: socket.socket, backlog: int = -1) -> None:
        listen(sock, backlog)
        listened.put(backlog)

    monkeypatch.setattr(socket.socket, "listen", note)
    if which == "leader":
        connect_to_leader(cleanup)()
    else:
        cleanup.enter_context(MasterPort(("127.0.0.1",), 0, lambda: None))
    first, asyncios, last = (listened.get(timeout=PATIENCE_S) for _ in range(3))
    assert (first, last) == (accepting.BACKLOG, accepting.BACKLOG) and asyncios < last


_PROGRAM = """
import os, resource, sys, socket, time
from elasticd.telemetry import log
from elasticd.telemetry.http import Answer, HttpServer, Site

log.setup("json")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

def fill():
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return held

with HttpServer("127.0.0.1", 0, Site({"/": lambda _: Answer(b"home")})) as server:
    for _ in range(2):
        held = fill()
        print(server.port, flush=True)
        sys.stdin.readline()
        print(time.process_time(), flush=True)
        for fd in held:
            os.close(fd)
        sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_process_that_has_opened_all_its_files_answers_once_files_are_free() -> None:
    """This holds for the first connection and for later ones."""
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        for _ in range(2):
            port = int(process.stdout.readline())
            with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
                sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
                sock.settimeout(2.0)  # a busy loop would use two seconds of a processor
                with pytest.raises(TimeoutError):
                    sock.recv(1)
                sock.settimeout(PATIENCE_S)
                process.stdin.write(b"\n")
                process.stdin.flush()
                used_s = float(process.stdout.readline())
                assert b"home" in b"".join(iter(lambda: sock.recv(65536), b""))
            process.stdin.write(b"\n")
            process.stdin.flush()
        said = process.stderr.read().decode()
    assert process.returncode == 0 and used_s < 2.0
    assert [json.loads(line)["event"] for line in said.splitlines()] == ["files.none_free"]
