"""Runs some seeds of ``python -m tests.worker.shardchaos``."""

from __future__ import annotations

import pytest

from tests.worker import shardchaos

LOSES = (17, 24, 26)  # more workers are lost than there are copies: the saver's memory has the state
RESIZES = (12, 28)  # from two workers to eight and back, with losses among the eight


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [*LOSES, *RESIZES, 5, 8, 13, 15])
def test_a_disturbed_training_of_a_sharded_model_has_the_losses_of_an_undisturbed_one(seed: int) -> None:
    assert shardchaos.run(seed) == [], f"python -m tests.worker.shardchaos --seed {seed}"
