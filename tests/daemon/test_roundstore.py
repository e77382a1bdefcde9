"""The stores of rounds are served by a process of the agent, and the agent itself imports no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from elasticd.daemon.roundstore import TorchRoundStores
from elasticd.procs.warden_client import Warden

PATIENCE_S = 100.0


@pytest.fixture
def warden() -> Iterator[Warden]:
    with Warden.start() as warden:
        yield warden


@pytest.fixture
def stores(warden: Warden) -> Iterator[TorchRoundStores]:
    stores = TorchRoundStores("127.0.0.1", warden, ahead=False)
    yield stores
    stores.shut()


def client(port: int, timeout_s: float = PATIENCE_S) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout_s))


def server(warden: Warden) -> psutil.Process:
    """The process that serves the stores of this warden's agent."""
    (found,) = psutil.Process(warden._process.pid).children()
    return found


def test_a_worker_that_connects_early_waits_and_each_round_has_a_store_of_its_own(
    stores: TorchRoundStores,
) -> None:
    first = stores.port
    stores.open()
    early = client(first)
    early.set("key", b"of the first round")
    second = stores.renew()
    assert second != first and early.get("key") == b"of the first round", "it serves until the next opens"
    stores.open()
    assert not client(second).check(["key"])
    with pytest.raises(Exception, match=r"(?i)connection|socket|broken"):
        early.get("key")


def test_a_server_that_was_killed_is_replaced_for_the_next_round(
    stores: TorchRoundStores, warden: Warden
) -> None:
    stores.open()
    client(stores.port)
    killed = server(warden)
    killed.send_signal(signal.SIGKILL)
    killed.wait(PATIENCE_S)
    port = stores.renew()
    stores.open()
    client(port).set("key", b"value")


def test_the_server_ends_when_the_stores_are_shut(stores: TorchRoundStores, warden: Warden) -> None:
    stores.open()
    client(stores.port)
    process = server(warden)
    stores.shut()
    process.wait(PATIENCE_S)


SCRIPT = """
import os, pathlib, psutil, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    warden = psutil.Process(os.getppid())
    maps = pathlib.Path(f"/proc/{warden.ppid()}/maps").read_text()
    print("agent has torch:", "libtorch" in maps)
    (server,) = [c for c in warden.children() if c.name() == "elasticd-store"]
    print("server has torch:", "libtorch" in pathlib.Path(f"/proc/{server.pid}/maps").read_text())
dist.barrier()
"""


def test_the_server_is_forked_with_torch_imported_and_the_agent_does_without(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    argv = [sys.executable, "-m", "elasticd", "run", "--plain", "--min=2", "--max=2", str(script)]
    environ = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["agent has torch: False", "server has torch: True"]
