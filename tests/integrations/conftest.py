"""Whole jobs that run small programs of other frameworks."""

from __future__ import annotations

from tests.e2e.conftest import clusters, shared_etcd  # noqa: F401  # what tests here are given
