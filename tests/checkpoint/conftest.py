"""A small training to be saved, and the savers that must be gone after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticd.checkpoint.client import saver_connection
from elasticd.worker.checkpoints import Checkpoints

GONE_S = 60.0
torch.set_num_threads(1)  # tests run beside each other


def training(seed: int, width: int = 96) -> dict[str, Any]:
    """A model and an optimizer with some steps behind them, and what else a training has."""
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
        "table": torch.randn(2500, 1000),  # more than one block
    }


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    from elasticd.checkpoint.client.state_dict import flatten

    return {key: tensor.clone() for key, tensor in flatten(state).tensors.items()}


def assert_same(state: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    have = tensors_of(state)
    assert have.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(have[key], tensor), key


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Checkpoints]]:
    """Checkpoints in a fresh folder; closed at the end, when their savers end too."""
    made: list[Checkpoints] = []

    def open_(path: Path = tmp_path / "run", **options: Any) -> Checkpoints:
        made.append(Checkpoints(path, **options))
        return made[-1]

    yield open_
    for checkpoints in made:
        checkpoints.close()
    while saver_connection.started:
        assert saver_connection.started.pop().wait(GONE_S) in (0, -9)


@pytest.fixture
def saved(opened: Callable[..., Checkpoints]) -> Callable[..., Checkpoints]:
    """Checkpoints of these steps, each of ``training(step)``, committed one after the other."""

    def save(*steps: int, **options: Any) -> Checkpoints:
        checkpoints = opened(**options)
        for step in steps:
            assert checkpoints.save(training(step), step)
            assert checkpoints.wait() and not checkpoints.failed, checkpoints.last_error
        return checkpoints

    return save
