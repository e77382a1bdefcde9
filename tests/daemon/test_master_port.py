"""The port of ``--master-port`` leads to the live round's store, and to no other."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading

import pytest

from elasticd.core.facts import Cause, Phase, Round
from elasticd.daemon import master_port
from elasticd.daemon.master_port import MasterPort
from tests.ports import free_port


def test_a_worker_that_enters_a_round_before_its_master_has_heard_of_it_waits_for_the_round_s_store(
    monkeypatch,
) -> None:
    monkeypatch.setattr(master_port, "LOOK_S", 1000.0)
    with socket.create_server(("127.0.0.1", 0)) as old, socket.create_server(("127.0.0.1", 0)) as new:
        known = [_round(1, Phase.CLOSING, old)]
        port = free_port()
        with MasterPort(["127.0.0.1"], port, lambda: known[-1]) as master:
            with socket.create_connection(("127.0.0.1", port), 60.0) as worker:
                worker.sendall(b"early")
                known.append(_round(2, Phase.LIVE, new))
                master.round_begins()
                new.settimeout(60.0)
                with new.accept()[0] as store:
                    assert store.recv(5, socket.MSG_WAITALL) == b"early"
                    store.sendall(b"hello")
                    assert worker.recv(5, socket.MSG_WAITALL) == b"hello"
            with socket.create_connection(("127.0.0.1", port), 60.0), new.accept()[0]:
                pass  # and whoever comes later is led there at once
        old.setblocking(False)
        try:
            old.accept()
        except BlockingIOError:
            return
        raise AssertionError("the old round's store was met")


def test_the_port_is_open_on_each_node_where_its_host_is_another_machine_or_not_known_yet() -> None:
    port = free_port()
    with (
        MasterPort(["127.0.0.1", "192.0.2.1", "node0.invalid"], port, lambda: None),
        socket.create_connection(("127.0.0.1", port), 60.0),
        pytest.raises(OSError, match="in use"),
    ):
        MasterPort(["127.0.0.1"], port, lambda: None)
    with pytest.raises(OSError, match="assign"):
        MasterPort(["192.0.2.1"], port, lambda: None)


@pytest.mark.filterwarnings("error")
def test_the_port_closes_without_an_error_while_workers_wait_for_a_round() -> None:
    port = free_port()
    asked = threading.Semaphore(0)
    with contextlib.ExitStack() as workers:
        with MasterPort(["127.0.0.1"], port, asked.release):
            for _ in range(8):
                workers.enter_context(socket.create_connection(("127.0.0.1", port), 60.0))
            for _ in range(8):
                assert asked.acquire(timeout=60.0)
        gc.collect()  # a task that is left behind says so now


def _round(number: int, phase: Phase, store: socket.socket) -> Round:
    address, port = store.getsockname()
    return Round(number, phase, (), f"{address}:{port}", Cause.START, 0.0)
