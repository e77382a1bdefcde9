"""Which worker hangs: the learned limits, and the verdict on what all ranks do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.core.facts import Hang
from elasticd.core.hang.judging import (
    FOREVER_S,
    GUILTY_MAX,
    Doing,
    Look,
    Patience,
    ProcessState,
    Pulse,
    Verdict,
    Why,
    allowance,
    doing,
    in_groups,
    judge,
    judge_first,
    judge_leaving,
)
from elasticd.core.thread_activity import ActivityKind, ThreadActivity
from elasticd.etcd import records

STEPS_OF_75_MS = [0.075] * 100
AUTO = Patience()


def world(*kinds: Doing | str, still_s: float = 1e6, what: str = "all_reduce") -> list[Look]:
    """Return a look at each rank. All ranks have been at their places for that long."""
    return [
        Look("a", n, n, 100, still_s, Doing(kind), "job.py:7", what if kind == "waiting" else "", still_s)
        for n, kind in enumerate(kinds)
    ]


def judged(looks: list[Look], patience: Patience = AUTO) -> Verdict | None:
    allowed = allowance(STEPS_OF_75_MS, 100, patience)
    assert allowed is not None
    return judge(in_groups(looks), allowed)


def blamed(verdict: Verdict | None) -> tuple[Why, list[int]] | None:
    return (verdict.why, [look.rank for look in verdict.guilty]) if verdict else None


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize("patience", [AUTO, Patience(fixed_s=3)])
def test_before_the_first_step_there_is_no_limit(patience: Patience) -> None:
    assert allowance([], 0, patience) is None
    assert allowance([], 1, patience) is not None


def test_a_stopped_worker_of_a_fast_job_gets_a_second() -> None:
    allowed = allowance(STEPS_OF_75_MS, 100, AUTO)
    assert allowed is not None
    assert allowed.stopped_s == 1.0
    assert (allowed.asleep_s, allowed.waiting_s) == (60.0, 120.0)
    assert (allowed.busy_s, allowed.unasked_s) == (3600.0, FOREVER_S)


def test_a_long_step_in_the_past_buys_patience_for_all_but_the_stopped() -> None:
    allowed = allowance([*STEPS_OF_75_MS, 40.0], 101, AUTO)
    assert allowed is not None
    assert (allowed.stopped_s, allowed.asleep_s, allowed.waiting_s) == (1.0, 200.0, 400.0)


def test_one_limit_that_people_set_counts_for_all() -> None:
    allowed = allowance([*STEPS_OF_75_MS, 40.0], 101, Patience(fixed_s=5))
    assert allowed is not None
    assert {allowed.stopped_s, allowed.asleep_s, allowed.waiting_s, allowed.busy_s, allowed.unasked_s} == {
        5.0
    }


gaps = st.lists(st.floats(0, 1e5), max_size=50)
patiences = st.builds(lambda a, b: Patience(min(a, b), max(a, b)), st.floats(0, 1e4), st.floats(0, 1e4))


@given(gaps, patiences)
def test_limits_keep_within_floor_and_ceiling_and_in_order(known: list[float], patience: Patience) -> None:
    allowed = allowance(known, 1, patience)
    assert allowed is not None
    ordered = [allowed.stopped_s, allowed.asleep_s, allowed.waiting_s, allowed.busy_s]
    assert ordered == sorted(ordered)
    highest = max(patience.ceiling_s, 2 * max(known, default=0))
    assert all(patience.floor_s <= limit <= highest for limit in ordered)


@given(st.lists(st.floats(0, 1e5), min_size=5, max_size=50))
def test_only_a_stopped_worker_gets_less_than_twice_the_longest_step(known: list[float]) -> None:
    allowed = allowance(known, 100, AUTO)
    assert allowed is not None
    assert min(allowed.asleep_s, allowed.waiting_s, allowed.busy_s) >= 2 * max(known)


# ---------------------------------------------------------------- what a worker does

COLLECTIVE = ThreadActivity(ActivityKind.COLLECTIVE, "job.py:7", "all_reduce")
BACKWARD = ThreadActivity(ActivityKind.COLLECTIVE, "job.py:7", "backward")
OWN = ThreadActivity(ActivityKind.OWN, "job.py:7")
PROGRAM = ThreadActivity(ActivityKind.PROGRAM, "job.py:7")


@pytest.mark.parametrize(
    ("state", "cpu", "where", "expected"),
    [
        ("T", 0.0, None, Doing.STOPPED),
        ("T", 1.0, COLLECTIVE, Doing.STOPPED),
        ("t", 0.0, OWN, Doing.BUSY),
        ("D", 0.0, OWN, Doing.BUSY),
        ("Z", 0.0, None, Doing.GONE),
        ("S", 0.0, COLLECTIVE, Doing.WAITING),
        ("R", 1.0, COLLECTIVE, Doing.WAITING),
        ("S", 0.0, BACKWARD, Doing.WAITING),
        ("R", 1.0, BACKWARD, Doing.BUSY),
        ("S", 0.0, OWN, Doing.ASLEEP),
        ("S", 0.5, OWN, Doing.BUSY),
        ("R", 0.0, OWN, Doing.BUSY),
        ("S", 0.0, PROGRAM, Doing.BUSY),
        ("S", 0.0, None, Doing.UNKNOWN),
        ("R", 1.0, None, Doing.BUSY),
    ],
)
def test_what_a_worker_does(state: str, cpu: float, where: ThreadActivity | None, expected: Doing) -> None:
    assert doing(ProcessState(state), Pulse(cpu), where) is expected


@pytest.mark.parametrize(
    ("pulse", "busy"),
    [
        # a loader looks for its child processes, or NCCL's watchdog for its work
        (Pulse(0.0, 0.2, 20.0), False),
        (Pulse(0.01, 5.0, 5.0), True),  # a file is sent over a slow network
        (Pulse(0.01, 0.0, 300.0), True),  # the same, by other threads
    ],
)
def test_a_worker_that_hardly_computes_but_wakes_up_often_is_busy(pulse: Pulse, busy: bool) -> None:
    assert doing(ProcessState.SLEEPING, pulse, OWN) is (Doing.BUSY if busy else Doing.ASLEEP)
    assert doing(ProcessState.SLEEPING, pulse, COLLECTIVE) is Doing.WAITING


# ---------------------------------------------------------------- the verdict


@pytest.mark.parametrize(
    ("kinds", "still_s", "expected"),
    [
        # certain
        (["waiting", "stopped", "waiting"], 1.0, (Why.STOPPED, [1])),
        (["waiting", "stopped", "waiting"], 0.9, None),
        (["stopped", "stopped"], 1.0, (Why.STOPPED, [0, 1])),
        (["stopped", "busy", "asleep"], 1.0, (Why.STOPPED, [0])),
        # asleep while all others wait for it
        (["waiting", "waiting", "asleep"], 60.0, (Why.ASLEEP, [2])),
        (["waiting", "waiting", "asleep"], 59.0, None),
        (["waiting", "asleep", "asleep"], 60.0, (Why.ASLEEP, [1, 2])),
        # asleep, and no worker waits for it
        (["asleep", "asleep"], 3599.0, None),
        (["asleep", "asleep"], 3600.0, (Why.ASLEEP, [0, 1])),
        # nobody knows what the busy worker does
        (["busy", "waiting", "asleep"], 3599.0, None),
        (["busy", "waiting"], 3599.0, None),
        (["busy", "waiting"], 3600.0, (Why.BUSY, [0])),
        (["busy", "busy"], 1e8, None),
        (["busy"], 1e8, None),
        # all wait
        (["waiting", "waiting"], 119.0, None),
        (["waiting", "waiting"], 120.0, (Why.DEADLOCK, [0, 1])),
        (["waiting", "unknown"], 120.0, (Why.SILENT, [1])),
        (["waiting", "gone"], 1e8, None),
        # the workers are not in lock-step
        (["moving", "asleep"], 3599.0, None),
        (["moving", "stopped"], 1.0, (Why.STOPPED, [1])),
        ([], 1e8, None),
    ],
)
def test_in_lock_step_the_workers_that_the_others_wait_for_are_blamed(
    kinds: list[str], still_s: float, expected: object
) -> None:
    assert blamed(judged(world(*kinds, still_s=still_s))) == expected


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["asleep"], (Why.ASLEEP, [0])),
        (["asleep", "asleep"], (Why.ASLEEP, [0, 1])),
        (["asleep", "busy"], None),  # the sleeping worker may wait for the other one
        (["unknown"], None),
        (["busy"], None),
        ([], None),
    ],
)
def test_a_worker_late_to_leave_a_world_is_blamed_only_if_asleep(kinds: list[str], expected: object) -> None:
    assert blamed(judge_leaving(in_groups(world(*kinds)))) == expected


@pytest.mark.parametrize(
    ("kinds", "experienced", "still_s", "expected"),
    [
        (["waiting", "asleep"], {0, 1}, 300.0, (Why.ASLEEP, [1])),
        (["asleep", "asleep"], {0, 1}, 300.0, (Why.ASLEEP, [0, 1])),
        (["waiting", "asleep"], {1}, 300.0, (Why.ASLEEP, [1])),
        (["waiting", "asleep"], {0, 1}, 299.0, None),
        # the worker has made no step yet: it may import modules, from far away
        (["waiting", "asleep"], {0}, 1e8, None),
        (["busy", "asleep"], {0, 1}, 1e8, None),  # the sleeping worker may wait for the other one
        (["unknown", "asleep"], {0, 1}, 1e8, None),
        (["waiting", "waiting"], {0, 1}, 1e8, None),
        ([], set(), 1e8, None),
    ],
)
def test_before_the_first_step_only_a_survivor_that_sleeps_on_is_to_blame(
    kinds: list[str], experienced: set[int], still_s: float, expected: object
) -> None:
    allowed = allowance(STEPS_OF_75_MS, 1, AUTO)
    assert allowed is not None
    looks = [replace(k, step=0, new=k.rank not in experienced) for k in world(*kinds, still_s=still_s)]
    assert blamed(judge_first(in_groups(looks), allowed)) == expected


def test_a_worker_that_waits_at_another_place_than_most_is_blamed() -> None:
    looks = world("waiting", "waiting", "waiting", "waiting")
    looks[2] = replace(looks[2], what="barrier", place="job.py:9")
    verdict = judged(looks)
    assert blamed(verdict) == (Why.APART, [2])
    assert verdict is not None and (verdict.others, verdict.others_what) == (3, "all_reduce")
    two = [looks[0], looks[2]]
    assert blamed(judged(two)) == (Why.DEADLOCK, [0, 2]), "of two, nobody knows who is wrong"


def test_the_others_wait_where_most_do_and_of_equally_many_where_the_first_rank_does() -> None:
    looks, allowed = world("stopped", "waiting", "waiting", "waiting"), allowance(STEPS_OF_75_MS, 100, AUTO)
    looks[1] = replace(looks[1], what="barrier", place="job.py:9")
    assert allowed is not None
    for kept, what in (looks, "all_reduce"), (looks[:3], "barrier"):
        for groups in in_groups(kept), in_groups(kept)[::-1]:
            verdict = judge(groups, allowed)
            assert verdict is not None and verdict.others_what == what


@pytest.mark.parametrize("what", ["all_reduce", "barrier"])
def test_no_worker_is_blamed_while_the_last_waiter_may_have_just_come(what: str) -> None:
    looks = world("waiting", "waiting", "waiting")
    looks[1] = replace(looks[1], what=what, there_s=0.9)
    assert judged(looks) is None
    looks[1] = replace(looks[1], there_s=1.0)
    assert judged(looks) is not None
    assert judged([replace(look, there_s=0.9) for look in looks], Patience(fixed_s=600)) is None
    assert judged([replace(look, there_s=1.0) for look in looks], Patience(fixed_s=600)) is not None


def test_past_the_ceiling_all_are_blamed_that_wait_though_their_places_change() -> None:
    looks = [replace(look, there_s=0.0) for look in world("waiting", "waiting", "waiting", still_s=3600.0)]
    assert judged(looks) is None, "each may have come a moment ago"
    looks[2] = replace(looks[2], what="barrier")
    looks = [replace(look, waits_s=1.0) for look in looks]
    assert blamed(judged(looks)) == (Why.DEADLOCK, [0, 1, 2]), "and none for the place where it was seen"
    assert judged([replace(look, still_s=3599.0) for look in looks]) is None
    looks[1] = replace(looks[1], waits_s=0.9)
    assert judged(looks) is None


@pytest.mark.parametrize(
    ("step", "what", "still_s", "expected"),
    [
        (100, "all_gather", 3599.0, None),  # the worker may yet come to the others' collective
        (100, "all_gather", 3600.0, (Why.APART, [1])),
        (99, "all_reduce", 3600.0, (Why.APART, [1])),
        (100, "all_reduce", 3600.0, (Why.DEADLOCK, [0, 1, 2])),  # perhaps the same call, from two lines
    ],
)
def test_a_worker_that_polls_another_collective_than_the_others_is_blamed_alone(
    step: int, what: str, still_s: float, expected: object
) -> None:
    looks = world("waiting", "waiting", "waiting", still_s=still_s)
    looks = [replace(look, there_s=60.0, waits_s=60.0) for look in looks]
    looks[1] = replace(looks[1], step=step, what=what, place="job.py:9", there_s=0.0)
    assert blamed(judged(looks)) == expected
    some_stay = [looks[0], looks[1], replace(looks[2], there_s=0.0)]
    assert blamed(judged(some_stay)) == ((Why.DEADLOCK, [0, 1, 2]) if expected else None)


def test_the_cost_of_a_verdict_grows_with_the_number_of_workers_and_not_with_its_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = 0
    equals = Look.__eq__

    def count(one: Look, other: object) -> bool:
        nonlocal compared
        compared += 1
        return equals(one, other)

    monkeypatch.setattr(Look, "__eq__", count)
    for kinds in (["waiting"] * 500, ["waiting"] * 250 + ["asleep"] * 250):
        assert judged(world(*kinds)) is not None
    assert compared < 2000


def test_a_worker_that_waits_one_step_ahead_is_blamed() -> None:
    looks = world("waiting", "waiting", "waiting")
    looks[0] = replace(looks[0], step=101)
    assert blamed(judged(looks)) == (Why.APART, [0])


def test_a_limit_in_seconds_holds_for_busy_workers_too() -> None:
    assert blamed(judged(world("busy", "waiting", still_s=5.0), Patience(fixed_s=5))) == (Why.BUSY, [0])
    assert blamed(judged(world("busy", still_s=5.0), Patience(fixed_s=5))) == (Why.BUSY, [0])
    assert judged(world("busy", "waiting", still_s=4.9), Patience(fixed_s=5)) is None


looks = st.builds(
    lambda rank, kind, still_s, step, what: Look("a", rank, rank, step, still_s, kind, "job.py:7", what),
    st.integers(0, 7), st.sampled_from(Doing), st.floats(0, 1e5), st.integers(1, 3),
    st.sampled_from(["all_reduce", "barrier"]),
)  # fmt: skip
worlds = st.lists(looks, max_size=6, unique_by=lambda look: look.rank)


@settings(max_examples=50)
@given(worlds, gaps, patiences)
def test_only_a_worker_that_was_late_and_not_moving_is_blamed(
    seen: list[Look], known: list[float], patience: Patience
) -> None:
    allowed = allowance(known, 1, patience)
    assert allowed is not None
    verdict = judge(in_groups(seen), allowed)
    assert verdict is None or verdict.guilty
    for look in verdict.guilty if verdict else ():
        assert look in seen and look.still_s >= allowed.stopped_s
        assert look.doing not in (Doing.MOVING, Doing.GONE)
        if look.doing is not Doing.STOPPED:
            assert look.still_s >= allowed.asleep_s


@given(worlds)
def test_busy_workers_are_blamed_only_at_the_ceiling_and_if_others_wait(seen: list[Look]) -> None:
    verdict = judged(seen)
    if verdict is not None and verdict.why is Why.BUSY:
        assert all(look.still_s >= AUTO.ceiling_s for look in verdict.guilty)
        assert any(look.doing is Doing.WAITING for look in seen)


@given(worlds, st.permutations(range(6)))
def test_the_order_of_the_reports_changes_nothing(seen: list[Look], order: list[int]) -> None:
    assert judged([seen[i] for i in order if i < len(seen)]) == judged(seen)


@given(worlds)
def test_a_verdict_stays_while_nothing_moves(seen: list[Look]) -> None:
    """A worker that hangs cannot become innocent by waiting: a later look also leads to a verdict."""
    if judged(seen) is not None:
        later = [replace(look, still_s=look.still_s + 1000.0) for look in seen]
        assert judged(later) is not None


def test_the_verdict_on_a_deadlock_of_a_large_job_is_small_since_every_agent_reads_it() -> None:
    world_size = 80_000
    looks = [replace(look, place=f"/home/someone/project/{'x' * 60}.py:1234") for look in world("waiting")]
    found = judged([replace(looks[0], rank=n, node=f"node-{n // 8:05}") for n in range(world_size)])
    assert found is not None
    assert ([look.rank for look in found.guilty], found.more) == (
        [*range(GUILTY_MAX)],
        world_size - GUILTY_MAX,
    )
    assert found.why is Why.DEADLOCK and found.others == 0
    assert len(records.encode("hang", Hang(7, found))) < 20_000
