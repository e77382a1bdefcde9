"""A small training to be saved, savers, and processes that save and are killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from elasticd.checkpoint.client import saver_connection
from elasticd.checkpoint.client.state_dict import flatten
from elasticd.checkpoint.storage import CheckpointStore
from elasticd.checkpoint.storage.disk import Disk
from elasticd.checkpoint.storage.remote import Remote
from elasticd.worker.checkpoints import Checkpoints
from tests.checkpoint.faults import Helper, served

torch.set_num_threads(1)  # tests run beside each other


def training(seed: int, width: int = 96) -> dict[str, Any]:
    """Return what a training has: a model and an optimizer after some steps, and plain data."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, 3 * width), torch.nn.BatchNorm1d(3 * width), torch.nn.Linear(3 * width, 5)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3 + seed % 2):
        model(torch.randn(4, width)).square().sum().backward()
        optimizer.step()
        schedule.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "progress": {"position": seed, "name": f"seed {seed}"},
        "table": torch.randn(1100, 1000),  # more than one block
    }


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in flatten(state).tensors.items()}


def assert_same(state: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    have = tensors_of(state)
    assert have.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(have[key], tensor), key


def store_of(kind: str, folder: Path) -> CheckpointStore:
    """Return a store of the kind: on disk, in memory, or a file system of fsspec with folders."""
    match kind:
        case "disk":
            return Disk(folder / "run")
        case "foldered":
            return Remote(fsspec.filesystem("file"), str(folder / "run"), "sftp://host/run", flat=False)
        case _:
            return Remote.at(f"memory://{folder}/run")


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Checkpoints]]:
    """Return Checkpoints in a fresh folder, with a saver as workers without an agent start it. The saver runs
    in a thread of this process, since a process takes half a second to start."""
    made: list[Checkpoints] = []

    def open_(path: Path = tmp_path / "run", **options: Any) -> Checkpoints:
        made.append(Checkpoints(path, **options))
        return made[-1]

    with served(secret="known-to-the-ranks") as name:
        monkeypatch.setattr(saver_connection, "_start", lambda: f"{name} known-to-the-ranks")
        yield open_
        for checkpoints in made:
            checkpoints.close()


@pytest.fixture
def saved(opened: Callable[..., Checkpoints]) -> Callable[..., Checkpoints]:
    """Return checkpoints of these steps, each of ``training(step)``, committed one after the other."""

    def save(*steps: int, **options: Any) -> Checkpoints:
        checkpoints = opened(**options)
        for step in steps:
            assert checkpoints.save(training(step), step)
            assert checkpoints.wait() and not checkpoints.failed, checkpoints.last_error
        return checkpoints

    return save


@pytest.fixture(scope="module")
def saver_forks() -> Iterator[Helper]:
    with Helper("forker.py") as helper:
        yield helper


@pytest.fixture
def forker(saver_forks: Helper) -> Iterator[Helper]:
    """Forks savers, which are ended after the test."""
    yield saver_forks
    saver_forks.end_all()


@pytest.fixture(scope="module")
def rank_forks() -> Iterator[Helper]:
    with Helper("nodes.py") as helper:
        yield helper


@pytest.fixture
def worlds(rank_forks: Helper) -> Iterator[Helper]:
    """Forks ranks, which are ended after the test."""
    yield rank_forks
    rank_forks.end_all()
