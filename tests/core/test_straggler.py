"""Which workers are stragglers, judged from made-up times of steps, and from times of a real run without
stragglers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.core.page_layout import PageContents
from elasticd.core.straggler import PERIODS, Period, Watch, own_s, own_times

# Own times of each step of three ranks that do the same, in units of 10 microseconds, on a machine
# with six processes for each of its cores.
RECORDED: list[list[int]] = json.loads((Path(__file__).parent / "even_steps.json").read_text())
PERIOD_S = 5.0
HALF_AN_HOUR = int(1800 / PERIOD_S)


def watch(world: int, own: Callable[[int, int], float], periods: int = PERIODS) -> Watch:
    """Return a Watch after these periods. ``own``: the own time of a rank in a period."""
    seen = Watch()
    for period in range(periods):
        seen = seen.see([own(rank, period) for rank in range(world)])
    return seen


def named(watch: Watch) -> list[int]:
    return sorted(watch.named)


@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_a_worker_that_is_a_fifth_slower_is_named_and_no_other(world: int) -> None:
    seen = watch(world, lambda rank, _: 1.2 if rank == 1 else 1.0)
    assert named(seen) == [1]
    assert seen.ratio(1) == pytest.approx(1.2)


@given(st.lists(st.just(0.0) | st.floats(1e-6, 1e3), min_size=2, max_size=9))
def test_a_workers_peers_are_all_the_others(times: list[float]) -> None:
    period = Period.of(times, calm=1.05)
    assert period.usual_s == median(times)
    for n in range(len(times)):
        peers = median(times[:n] + times[n + 1 :])
        assert period.ratio(n) == pytest.approx(times[n] / peers if peers > 0 else 1.0)
    assert period.behind == {n for n in range(len(times)) if period.ratio(n) >= 1.05}


def test_no_straggler_is_named_before_the_window_is_full_or_without_peers() -> None:
    assert named(watch(4, lambda rank, _: 2.0 if rank == 1 else 1.0, PERIODS - 1)) == []
    assert named(watch(1, lambda rank, _: 2.0, 3 * PERIODS)) == []


def test_a_worker_that_is_slow_now_and_then_is_not_named() -> None:
    seen = watch(4, lambda rank, period: 3.0 if rank == 0 and period % 3 == 0 else 1.0, 10 * PERIODS)
    assert named(seen) == []


def test_a_little_slower_is_within_reason() -> None:
    assert named(watch(4, lambda rank, _: 1.08 if rank == 2 else 1.0)) == []


def test_a_change_of_work_for_all_workers_names_no_straggler_and_hides_none() -> None:
    def growing(rank: int, period: int) -> float:
        return (1.0 + period) * (1.25 if rank == 3 else 1.0)

    assert named(watch(4, growing)) == [3]


def test_machines_of_two_kinds_are_no_stragglers() -> None:
    assert named(watch(8, lambda rank, _: 1.5 if rank >= 4 else 1.0)) == []
    assert named(watch(8, lambda rank, _: 1.5 if rank >= 6 else 1.0)) == [6, 7]


def test_a_straggler_that_catches_up_is_no_longer_named() -> None:
    seen = watch(4, lambda rank, _: 1.3 if rank == 1 else 1.0)
    assert named(seen) == [1]
    for _ in range(PERIODS):
        seen = seen.see([1.0] * 4)
    assert named(seen) == []


def test_a_straggler_stays_named_until_it_is_clearly_faster() -> None:
    seen = watch(4, lambda rank, _: 1.2 if rank == 1 else 1.0)
    for _ in range(PERIODS):
        seen = seen.see([1.07 if rank == 1 else 1.0 for rank in range(4)])
    assert named(seen) == [1]


def test_noise_larger_than_the_difference_names_no_straggler() -> None:
    dice = random.Random(3)
    seen = watch(4, lambda rank, _: (1.12 if rank == 1 else 1.0) * dice.lognormvariate(0.0, 0.5))
    assert named(seen) == []


# ---------------------------------------------------------------- a real run


def periods_of(
    dice: random.Random, record: Sequence[Sequence[int]], slow: dict[int, float]
) -> list[list[float]]:
    """Return half an hour of periods for each rank, cut from its record in pieces, so that disturbances last
    as long as in the record. ``slow``: ranks that take so many times as long."""
    made = []
    for rank, steps in enumerate(record):
        times: list[float] = []
        while len(times) < HALF_AN_HOUR:
            spent, count = 0.0, 0
            while spent < PERIOD_S:
                first = dice.randrange(len(steps))
                piece = [s * 1e-5 * slow.get(rank, 1.0) for s in (*steps, *steps)[first : first + 50]]
                spent, count = spent + sum(piece), count + len(piece)
            times.append(spent / count)
        made.append(times)
    return made


@pytest.mark.parametrize("seed", range(5))
def test_half_an_hour_of_a_real_even_run_names_no_straggler(seed: int) -> None:
    times = periods_of(random.Random(seed), RECORDED, {})
    seen = Watch()
    for period in range(HALF_AN_HOUR):
        seen = seen.see([times[rank][period] for rank in range(3)])
        assert not seen.named


@pytest.mark.parametrize("rank", range(3))
def test_a_fifth_is_seen_through_the_noise_of_a_real_run(rank: int) -> None:
    times = periods_of(random.Random(rank), RECORDED, {rank: 1.2})
    seen, found = Watch(), 0
    for period in range(HALF_AN_HOUR):
        seen = seen.see([times[r][period] for r in range(3)])
        assert named(seen) in ([], [rank])
        found += bool(seen.named)
    assert found > 0.9 * (HALF_AN_HOUR - PERIODS)


# ---------------------------------------------------------------- own times


def page(steps: int, at: float, wait_s: float, waits: int, delay_s: float = 0.0) -> PageContents:
    return PageContents(
        steps=steps, measured=steps, measured_s=at, wait_s=wait_s, waits=waits, delay_s=delay_s
    )


def test_the_time_spent_waiting_is_not_its_own() -> None:
    assert own_s(page(10, 100.0, 3.0, 10), page(20, 110.0, 7.0, 20)) == pytest.approx(0.6)


def test_without_a_step_or_a_measured_wait_its_own_time_is_not_known() -> None:
    begun = page(10, 100.0, 3.0, 10)
    assert own_s(begun, page(10, 100.0, 3.0, 11)) is None
    assert own_s(begun, page(20, 110.0, 3.0, 10)) is None


def test_of_many_short_steps_the_measured_ones_count_and_a_quota_s_delay_in_them() -> None:
    """One step in ten is measured."""
    before = {0: PageContents(steps=100, measured=10, measured_s=10.0, waits=10)}
    after = {0: PageContents(steps=200, measured=20, measured_s=20.0, wait_s=4.0, waits=20, delay_s=3.0)}
    assert own_times(before, after, 0.0) == pytest.approx({0: 0.3})
    assert own_times(before, after, 5.0) == pytest.approx({0: 0.35}), (
        "the quota has held up ten steps for 0.5 s"
    )
    assert own_times(before, after, 90.0) == pytest.approx({0: 0.6}), "at most the delay itself"


# Ten steps of 1 s each. For how long each slot has waited for others and was delayed, how long a quota
# delayed
# any process of the node, and each slot's own time for a step.
CASES = {
    "one computes, one waits": ({0: (0.0, 0.0), 1: (4.0, 0.0)}, 0.0, {0: 1.0, 1: 0.6}),
    "one is starved by neighbours, one waits for it": ({0: (0.0, 4.0), 1: (4.0, 0.0)}, 0.0, {0: 0.6, 1: 0.6}),
    "both are starved": ({0: (1.0, 5.0), 1: (4.0, 2.0)}, 0.0, {0: 0.4, 1: 0.4}),
    "the slow one is starved least": ({0: (0.0, 2.0), 1: (3.0, 3.0)}, 0.0, {0: 0.8, 1: 0.4}),
    "a quota holds up the only worker": ({0: (0.0, 4.0)}, 3.0, {0: 0.9}),
    "a quota that has held up others for longer": ({0: (0.0, 4.0)}, 9.0, {0: 1.0}),
    "a quota holds up all alike": ({0: (0.0, 5.0), 1: (3.0, 2.0)}, 9.0, {0: 0.7, 1: 0.7}),
    "one of two has not waited": ({0: (None, 4.0), 1: (4.0, 0.0)}, 0.0, {1: 0.6}),
}


@pytest.mark.parametrize("case", CASES)
def test_time_without_a_processor_is_not_its_own_but_for_a_quota_s(case: str) -> None:
    slots, throttled_s, own = CASES[case]
    before = {slot: page(10, 100.0, 3.0, 10, 2.0) for slot in slots}
    after = {
        slot: page(20, 110.0, 3.0 + (waited_s or 0.0), 10 if waited_s is None else 20, 2.0 + delay_s)
        for slot, (waited_s, delay_s) in slots.items()
    }
    assert own_times(before, after, throttled_s) == pytest.approx(own)
