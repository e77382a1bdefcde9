"""Whole jobs that run the programs of ``workers/``."""

from __future__ import annotations

from tests.e2e.conftest import clusters, shared_etcd  # noqa: F401  # fixtures for the tests in this folder
