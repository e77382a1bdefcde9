from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Cluster, await_end
from tests.e2e.line import Line
from tests.e2e.prometheus import Prometheus
from tests.etcd.cluster import EtcdOnPorts, freeze


class Etcd:
    """A real server that a test may kill, stop or restart."""

    def __init__(self) -> None:
        self._server = EtcdOnPorts()
        self._server.start()
        self.url = f"http://{self._server.endpoint}"

    def kill(self) -> None:
        pidfd = os.pidfd_open(self._server.pid)
        os.kill(self._server.pid, signal.SIGKILL)
        await_end(pidfd, "etcd")
        os.close(pidfd)

    def start(self) -> None:
        """Start the server again, with the data that it had."""
        self._server.start()

    def hang(self) -> None:
        freeze(self._server.pid)

    def wake(self) -> None:
        os.kill(self._server.pid, signal.SIGCONT)

    def close(self) -> None:
        if self._server.alive:
            self.wake()
        self._server.stop()


@pytest.fixture(scope="session")
def shared_etcd() -> Iterator[str]:
    """An etcd for tests that do not disturb it. Each test has a job of its own."""
    etcd = Etcd()
    yield etcd.url
    etcd.close()


@pytest.fixture
def etcd() -> Iterator[Etcd]:
    """An etcd for a test that disturbs it."""
    etcd = Etcd()
    yield etcd
    etcd.close()


@pytest.fixture
def line(etcd: Etcd) -> Iterator[Line]:
    """A connection to that etcd, for a single agent that is to be cut off."""
    host, _, port = etcd.url.removeprefix("http://").partition(":")
    line = Line(host, int(port))
    yield line
    line.close()


@pytest.fixture
def clusters(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[str | None], Cluster]]:
    """Makes clusters on an etcd. Checks at the end that the clusters leave nothing behind."""
    made: list[Cluster] = []

    def make(url: str | None) -> Cluster:
        folder = tmp_path / f"cluster{len(made)}"
        folder.mkdir()
        made.append(Cluster(folder, url))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


@pytest.fixture
def cluster(clusters: Callable[[str | None], Cluster], shared_etcd: str) -> Cluster:
    """Agents on the shared etcd."""
    return clusters(shared_etcd)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[dict[str, Any]], Prometheus]]:
    """Starts a Prometheus with these rules."""
    made: list[Prometheus] = []

    def start(by: dict[str, Any]) -> Prometheus:
        made.append(Prometheus(tmp_path / "prometheus", by))
        return made[-1]

    yield start
    for one in made:
        one.close()
