"""A job that goes back to its last checkpoint when a loss is NaN does not save NaN."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from elasticd.worker import NotFinite
from elasticd.worker.checkpoints import Checkpoints
from tests.checkpoint.conftest import assert_same, tensors_of, training

Open = Callable[..., Checkpoints]


def test_where_the_job_goes_back_what_holds_nan_is_not_saved(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICD_ON_NONFINITE", "rollback")
    checkpoints, good = opened(), training(1)
    good["mask"] = torch.full((4, 4), float("-inf")).triu(1)
    assert checkpoints.load(training(2)) is None
    assert checkpoints.save(good, 1) and checkpoints.wait()
    expected = tensors_of(good)
    with torch.no_grad():
        good["model"][0].weight[3, 4] = float("nan")
    with pytest.raises(NotFinite, match="the state to save contains NaN; going back to the last checkpoint"):
        checkpoints.save(good, 2)
    found = {**training(3), "mask": torch.zeros(4, 4)}
    assert opened().load(found) == 1
    assert_same(found, expected)


def test_without_the_policy_a_state_with_nan_is_saved(opened: Open) -> None:
    checkpoints = opened()
    assert checkpoints.save({"weight": torch.full((3,), float("nan"))}, 1) and checkpoints.wait()
    assert checkpoints.newest is not None and checkpoints.newest.step == 1
