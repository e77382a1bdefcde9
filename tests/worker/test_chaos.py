"""Runs some seeds of ``python -m tests.worker.chaos``. Also: the command finds runs that are wrong."""

from __future__ import annotations

import pytest

from tests.worker import chaos
from tests.worker.chaos import Plan
from tests.worker.chaosjob import Fault, Script

FAST = (11, 21, 26, 36, 68, 61099)


@pytest.mark.parametrize("seed", FAST)
def test_a_disturbed_training_ends_as_an_undisturbed_one_does(seed):
    assert chaos.run(seed) == [], f"{chaos.replay(seed)}: {chaos.draw(seed)}"


NAMED = {
    "a stream that deals itself out to loading processes": Plan(
        Script(data="sharding", loaders=2, checkpoints=True),
        2,
        (Fault("kill", 1, "forward", 3), Fault("kill", 0, "summed", 6)),
        again=True,
    ),
}


@pytest.mark.parametrize("what", NAMED)
def test_a_training_in_which_workers_are_killed_ends_as_an_undisturbed_one_does(what):
    assert chaos.run(0, NAMED[what]) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("block", range(4))
def test_many_disturbed_trainings_end_as_undisturbed_ones_do(block):
    for seed in range(1000 + 25 * block, 1025 + 25 * block):
        assert chaos.run(seed) == [], f"{chaos.replay(seed)}: {chaos.draw(seed)}"


BROKEN: dict[str, tuple[str, Script]] = {
    "a step left out": ("lost", Script(spoilt="skips")),
    "a sample used twice": ("too often", Script(spoilt="repeats")),
    "another weight": ("other bits", Script(consistent=True, spoilt="drifts")),
    "another weight within rounding of nothing": (".weight is", Script(spoilt="drifts")),
    "a value of its own lost": ("its own steps", Script(spoilt="forgets", local=True)),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_training_that_goes_wrong_after_a_death_is_found_out(what):
    sentence, script = BROKEN[what]
    wrong = chaos.run(0, Plan(script, 2, (Fault("kill", 1, "forward", 3),), again=False))
    assert any(sentence in line for line in wrong), wrong
