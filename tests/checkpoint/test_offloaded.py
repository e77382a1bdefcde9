"""Saves from a GPU, which is none here: handed over once they are copied, and not if they were spoilt."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoint.conftest import assert_same, tensors_of, training
from tests.checkpoint.lazygpu import Lazy


@pytest.fixture
def lazy(opened):
    checkpoints = opened()
    checkpoints._gpu = gpu = Lazy()
    return checkpoints, gpu


def step(state) -> None:
    state["model"](torch.randn(4, 96)).square().sum().backward()
    state["optimizer"].step()


def test_a_save_is_of_its_step_though_training_goes_on_before_it_is_copied(lazy, opened):
    checkpoints, _ = lazy
    state = training(1)
    expected = tensors_of(state)
    assert checkpoints.save(state, 1)
    step(state)
    assert checkpoints.wait() and not checkpoints.failed, checkpoints.last_error
    found = training(7)
    assert opened().load(found) == 1
    assert_same(found, expected)


def test_a_save_that_the_script_spoils_fails_and_the_next_does_not(lazy, opened):
    checkpoints, gpu = lazy
    state = training(1)
    assert checkpoints.save(state, 1)
    with torch.no_grad():
        state["model"][0].weight.zero_()
    for copy in gpu.copies:
        copy.run()
    assert checkpoints.wait() and "changed before they were copied" in checkpoints.last_error
    assert checkpoints.save(state, 2)
    step(state)
    assert checkpoints.wait() and checkpoints.failed == 1
    assert opened().load(training(7)) == 2
