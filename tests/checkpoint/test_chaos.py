"""A few tries of ``python -m tests.checkpoint``."""

from __future__ import annotations

import random

import pytest

from tests.checkpoint.chaos import VICTIMS, Chaos, draw

TRIES = 12


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_process_that_dies_during_a_save_tears_or_loses_a_checkpoint(tmp_path):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    with Chaos(tmp_path, seed) as chaos:
        chaos.run(TRIES)
    assert sum(chaos.reached.values()) + chaos.missed == TRIES and chaos.reached


def test_tries_are_drawn_alike_from_the_same_seed_and_reach_everybody():
    first, again = (random.Random(7) for _ in range(2))
    tries = [draw(first) for _ in range(300)]
    assert tries == [draw(again) for _ in range(300)]
    assert {one.victim for one in tries} == set(VICTIMS)
    assert {one.who.partition("@")[0] for one in tries} == {"saver", "worker"}
