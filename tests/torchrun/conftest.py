"""A real etcd, and a run id of its own for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchrun_harness import Agents, Nodes

from elasticd.etcd.embedded import Embedded
from tests.etcd.cluster import EtcdOnPorts


@pytest.fixture(scope="session")
def etcd() -> Iterator[Embedded]:
    with EtcdOnPorts() as server:
        yield server


@pytest.fixture
def run_id() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def nodes(etcd: Embedded, run_id: str) -> Iterator[Nodes]:
    group = Nodes(etcd.endpoint, run_id)
    try:
        yield group
    finally:
        group.close()


@pytest.fixture
def agents(etcd: Embedded, run_id: str, tmp_path: Path) -> Iterator[Agents]:
    group = Agents(etcd.endpoint, run_id, tmp_path)
    try:
        yield group
    finally:
        group.close()
