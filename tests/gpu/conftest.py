"""Tests that need an NVIDIA GPU. One is enough: ``pytest tests/gpu`` on a machine that has one, with a torch
built for CUDA. Everywhere else each test is skipped with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.conftest import opened  # noqa: F401  # fixtures for the tests in this folder
from tests.e2e.conftest import cluster, clusters, shared_etcd  # noqa: F401
from tests.worker.conftest import crew  # noqa: F401


def _lacks() -> str:
    """Return what this machine lacks for the test. CUDA is not initialised, since tests fork."""
    if not torch.version.cuda:
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.device_count():
        return "there is no NVIDIA GPU here, or none that CUDA_VISIBLE_DEVICES shows"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    lacks = _lacks() if here else ""
    for item in here:
        if lacks:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU: {lacks}"))
