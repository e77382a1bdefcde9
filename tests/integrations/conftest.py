"""Whole jobs that run small programs of other frameworks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.conftest import clusters, shared_etcd  # noqa: F401  # fixtures for the tests in this folder
from tests.e2e.harness import Cluster


@pytest.fixture
def cluster(clusters: Callable[[str | None], Cluster], shared_etcd: str) -> Cluster:  # noqa: F811
    return clusters(shared_etcd)
