"""What is written is held to a bandwidth."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from elasticd.checkpoint.store.rate_limit import RateLimit


def test_several_writers_have_it_together():
    slept: list[float] = []
    pace = RateLimit(100.0, clock=lambda: 7.0, sleep=slept.append)
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(pace.wrote, [50] * 200))
    assert sorted(slept) == pytest.approx([0.5 * n for n in range(1, 201)])


def test_who_is_in_a_hurry_waits_no_more():
    pace = RateLimit(1e-6)
    with ThreadPoolExecutor(1) as writer:
        waits = writer.submit(pace.wrote, 1)
        pace.hurry(True)
        waits.result(60.0)
    pace.wrote(1)


def test_what_was_written_in_a_hurry_is_not_made_up_for():
    slept: list[float] = []
    pace = RateLimit(100.0, clock=lambda: 7.0, sleep=slept.append)
    pace.hurry(True)
    pace.wrote(1_000_000)
    pace.hurry(False)
    pace.wrote(50)
    pace.wrote(50)
    assert slept == pytest.approx([0.5, 1.0])
