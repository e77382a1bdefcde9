"""A server of S3 for tests, over HTTP, that can be told to fail."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import boto3
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from elasticd.checkpoint.storage import remote

PART = 8 << 20  # bytes; tests need not send the usual 16 MiB to have a file in two parts
KEY, SECRET = "AKIAELASTICDTESTS", "never+to/be=seen"

Environ = dict[str, Any]
Answer = Callable[[str, list[tuple[str, str]]], Any]


@dataclass(slots=True)
class Fault:
    """``of``: whether the fault applies to a request (method, path and query). ``fine`` such requests pass,
    and the next ``bad`` fail. ``how``: "500", "drop" (the connection, with some of the body read), "mute"
    (the same, but the request is carried out), "hold" (until ``gate`` is set) or "flip" (a random bit of
    the answer)."""

    how: str
    of: Callable[[str, str], bool]
    fine: int = 0
    bad: int = 1_000_000
    hits: int = 0
    gate: threading.Event = field(default_factory=threading.Event)


def parts(method: str, url: str) -> bool:
    """A part of a large file."""
    return method == "PUT" and "partNumber" in url


def writes(method: str, url: str) -> bool:
    return method in ("PUT", "POST")


def everything(method: str, url: str) -> bool:
    return True


class S3Server:
    """Serves until ``close``. It knows one user, by ``KEY``."""

    def __init__(self) -> None:
        self._real = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._one = threading.Lock()
        self._faults: list[Fault] = []
        self.stuck = threading.Event()
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Quiet)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def fails(self, how: str, of: Callable[[str, str], bool], **when: Any) -> Fault:
        fault = Fault(how, of, **when)
        with self._lock:
            self._faults.append(fault)
        return fault

    def holds(self, of: Callable[[str, str], bool], fine: int = 0) -> threading.Event:
        """Have requests wait until the returned event is set. ``stuck`` is set once one waits."""
        self.stuck.clear()
        return self.fails("hold", of, fine=fine).gate

    def mends(self) -> None:
        with self._lock:
            for fault in self._faults:
                fault.gate.set()
            self._faults.clear()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a client needs."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "3",  # the default is five
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: Environ, start: Answer) -> Iterable[bytes]:
        url = f"{environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}"
        method = environ["REQUEST_METHOD"]
        with self._lock:
            fault = next((f for f in self._faults if f.of(method, url)), None)
            if fault is not None:
                fault.hits += 1
                if not fault.fine < fault.hits <= fault.fine + fault.bad:
                    fault = None
        if fault is not None and fault.how == "hold":
            self.stuck.set()
            fault.gate.wait(100.0)
        elif fault is not None and fault.how == "flip":
            return [_flipped(b"".join(self._real(environ, start)))]
        elif fault is not None and fault.how == "mute":
            b"".join(self._real(environ, lambda *_: None))
            return self._hang_up(environ)
        elif fault is not None:
            return self._fail(fault, environ, start)
        if KEY not in environ.get("HTTP_AUTHORIZATION", ""):
            return _refusal(
                start, "403 Forbidden", "InvalidAccessKeyId", "The key does not exist in our records."
            )
        with self._one if "HTTP_IF_MATCH" in environ or "HTTP_IF_NONE_MATCH" in environ else nullcontext():
            return self._real(environ, start)  # moto compares and then writes; S3 does both at once

    def _fail(self, fault: Fault, environ: Environ, start: Answer) -> Iterable[bytes]:
        if fault.how == "drop":
            environ["wsgi.input"].read(min(65536, int(environ.get("CONTENT_LENGTH") or 0)))
            return self._hang_up(environ)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        return _refusal(
            start, "500 Internal Server Error", "InternalError", "We encountered an internal error."
        )

    @staticmethod
    def _hang_up(environ: Environ) -> NoReturn:
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionAbortedError


def _flipped(body: bytes) -> bytes:
    bit = random.randrange(8 * len(body))
    return body[: bit // 8] + bytes([body[bit // 8] ^ 1 << bit % 8]) + body[bit // 8 + 1 :]


def _refusal(start: Answer, status: str, code: str, message: str) -> Iterable[bytes]:
    start(status, [("Content-Type", "application/xml"), ("Connection", "close")])
    return [f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()]


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: Any, **__: Any) -> None:
        """Print nothing."""


@contextmanager
def serving() -> Iterator[S3Server]:
    """A server that the environment names, with an empty bucket called bucket."""
    server = S3Server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "PART", PART)
        for name, value in server.environment.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="bucket")
        try:
            yield server
        finally:
            server.close()
