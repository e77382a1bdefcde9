"""How often to save: the notation of the interval, and the best interval."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.checkpoint.client.schedule import (
    BELIEVED_S,
    LEAST_S,
    Auto,
    EverySeconds,
    EverySteps,
    best_interval_s,
    between_failures_s,
    interval_s,
    look,
    parse_cadence,
)


@pytest.mark.parametrize(
    ("text", "cadence"),
    [
        ("100", EverySteps(100)),
        ("90s", EverySeconds(90.0)),
        ("1.5m", EverySeconds(90.0)),
        ("2h", EverySeconds(7200.0)),
        ("auto", Auto()),
    ],
)
def test_words_for_it_are_understood(text, cadence):
    assert parse_cadence(text) == cadence


@pytest.mark.parametrize("text", ["", "0", "0s", "-5", "often", "1.5", "10d", "1e3", "nan", "inf"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="step"):
        parse_cadence(text)


def lost(interval: float, cost: float, between: float) -> float:
    """Return the share of all time that is spent on saving and on steps made again, when failures come at
    random: the exact formula (Daly 2006), without the time of a restart."""
    return 1 - interval / (between * math.expm1((interval + cost) / between))


@given(st.floats(0.001, 100.0), st.floats(60.0, 1e6))
def test_no_other_interval_costs_noticeably_less(cost, between):
    best = best_interval_s(cost, between)
    if best > LEAST_S and cost < between / 2:
        for factor in (0.2, 0.5, 0.8, 1.25, 2.0, 5.0):
            assert lost(best, cost, between) <= lost(best * factor, cost, between) + 1e-3


@given(st.floats(0.0, 1e9), st.floats(0.0, 1e9))
def test_the_best_interval_is_finite_and_not_too_short_for_any_measurement(cost, between):
    assert LEAST_S <= best_interval_s(cost, between) < math.inf


@given(st.integers(0, 100), st.floats(0.0, 1e7))
def test_each_failure_seen_makes_the_next_be_expected_sooner(failures, over):
    assert between_failures_s(failures + 1, over) < between_failures_s(failures, over)
    assert between_failures_s(0, 0.0) == BELIEVED_S


def test_saves_do_not_come_faster_than_they_become_durable():
    assert interval_s(Auto(), 0.001, 45.0, 60.0) == 45.0
    assert interval_s(EverySeconds(10.0), 0.001, 45.0, 60.0) == 10.0


@given(st.floats(0.001, 10.0), st.floats(5.0, 5000.0))
def test_with_even_steps_it_is_saved_on_time_and_seldom_asked(step_s, interval):
    step, asked, due = 0, 0, interval
    known = None
    answer = look(step, 0.0, due, known)
    while not answer.save:
        assert answer.next > step
        step, asked = answer.next, asked + 1
        answer = look(step, step * step_s, due, step_s)
    assert abs(step * step_s - interval) <= step_s
    assert asked <= 3 + 2 * math.log2(max(2.0, interval / step_s))
