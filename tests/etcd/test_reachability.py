"""A busy machine is not taken for a partition."""

from __future__ import annotations

import errno
import socket
import threading
from contextlib import closing
from typing import Any

import pytest

from elasticd.etcd import access, reachability
from elasticd.etcd.reachability import ReachabilityProbe, reachable


def test_a_listening_host_is_reached_even_with_no_time_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        assert reachable((endpoint,), timeout_s=0.0) == {endpoint}


class _NoIPv6(socket.socket):
    def __init__(self, family: int = socket.AF_INET, *args: Any, **options: Any) -> None:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        super().__init__(family, *args, **options)


def test_an_address_of_a_family_that_this_machine_lacks_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        both = [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
        monkeypatch.setattr(socket, "socket", _NoIPv6)
        assert reachable((f"both.example:{port}",)) == {f"both.example:{port}"}
        assert access.routed_address([("both.example", port)]) == "127.0.0.1"


def test_a_probe_that_fails_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found, tries = threading.Event(), []

    def fails_once(endpoints: tuple[str, ...]) -> bool:
        tries.append(endpoints)
        if len(tries) == 1:
            raise RuntimeError("can't start new thread")
        return True

    monkeypatch.setattr(reachability, "AGAIN_S", 0.01)
    monkeypatch.setattr(reachability, "cut_off", fails_once)
    probe = ReachabilityProbe(("a:1",), lambda: 1.0, lambda cut_off, at: found.set())
    with closing(probe):
        probe.watch(True)
        assert found.wait(60)
