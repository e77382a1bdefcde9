"""The oracles of chaos accept ledgers that are right, and name what is wrong in others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.chaos import oracles
from tests.chaos.oracles import Line, Reference, judge, parse, whole_steps
from tests.chaos.patience import had, slowness

NODES = ("a", "b")


def world(round: int, steps: range, at: float, *, size: int = 2, entered: int | None = None) -> list[Line]:
    """Return the ledgers of a round that makes these steps, one a second."""
    lines = []
    for rank in range(size):
        who = {"node": NODES[rank], "id": f"{NODES[rank]}1", "rank": rank, "world": size, "round": round}
        first = steps.start - 1 if entered is None else entered
        lines.append(Line("entered", at, step=first, **who))
        for i, step in enumerate(steps):
            samples = tuple(n for n in used(step) if n % size == rank)
            began = at + i
            done = {"samples": samples, "digest": f"weights {step}", "epoch": 0, "since": began + 0.1 * rank}
            lines.append(Line("step", began + 0.5, step=step, **done, **who))
            lines.append(Line("committed", began + 0.6, step=step, **who))
    return lines


def used(step: int) -> range:
    return range(4 * step, 4 * step + 4)


EXPECTED = Reference(
    {step: tuple(used(step)) for step in range(1, 20)},
    dict.fromkeys(range(1, 20), 0),
    {step: f"weights {step}" for step in range(1, 20)},
)
WELL = [*world(1, range(1, 5), 10.0), *world(2, range(5, 8), 20.0, size=1), *world(3, range(8, 10), 30.0)]


def changed(which: Callable[[Line], bool], **fields: object) -> list[Line]:
    found = [replace(line, **fields) if which(line) else line for line in WELL]  # type: ignore[arg-type]
    assert found != WELL
    return found


def at(round: int, step: int, rank: int = 0, what: str = "step") -> Callable[[Line], bool]:
    return lambda line: (line.round, line.step, line.rank, line.what) == (round, step, rank, what)


def test_a_training_without_a_fault_yields_no_finding() -> None:
    assert judge(WELL, EXPECTED, same_weights=True) == []
    assert [(s.round, s.step, s.world) for s in whole_steps(WELL)][:5] == [
        (1, 1, 2),
        (1, 2, 2),
        (1, 3, 2),
        (1, 4, 2),
        (2, 5, 1),
    ]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (
            [*WELL, *world(1, range(5, 7), 25.0)],
            "two worlds stepped at once: round 1 began step 5 4.600 s after round 2 had made a step",
        ),
        (changed(at(1, 2, 1, "committed"), id="b2"), "rank 1 is there 2 times in round 1: ['b b1', 'b b2']"),
        (changed(at(1, 2, 1, "committed"), world=3), "round 1 has several sizes: [2, 3]"),
        (
            [*WELL, *world(4, range(8, 12), 40.0, entered=7)],
            "a a1 had committed step 9, and enters round 4 at 7",
        ),
        (changed(at(1, 3, 0, "committed"), step=4), "a a1 committed step 2, and then 4"),
        (changed(at(1, 3), digest="others"), "after step 3 of round 1 workers have different weights"),
        ([line for line in WELL if line.step != 3], "steps [3] were never made by a whole world"),
        (
            changed(at(1, 3), samples=(12, 12)),
            "step 3 of round 1 left out samples [14] and used [12] which are not its own",
        ),
        (
            changed(at(2, 6), digest="others"),
            "after step 6 of round 2 the weights are ['others'], not weights 6 as undisturbed",
        ),
    ],
)
def test_each_fault_is_named(lines: list[Line], sentence: str) -> None:
    assert sentence in judge(lines, EXPECTED, same_weights=True)


def test_a_step_counts_as_made_where_a_rank_was_killed_before_its_ledger_had_the_step() -> None:
    killed = [line for line in WELL if (line.round, line.step, line.rank) != (1, 4, 1)]
    assert killed != WELL
    assert judge(killed, EXPECTED, same_weights=True) == []
    other = [replace(line, digest="others") if at(1, 4)(line) else line for line in killed]
    assert judge(other, EXPECTED, same_weights=True) == [
        "a a1 committed step 4 of round 1 with weights others, not weights 4 as undisturbed"
    ]


def test_one_worker_of_an_old_world_that_applies_its_last_step_late_makes_no_second_world() -> None:
    late = [line for line in world(1, range(5, 6), 25.0) if line.rank == 0 and line.what == "step"]
    assert judge([*WELL, *late]) == []


def test_a_node_that_was_stopped_as_a_whole_has_a_moment_to_end_its_workers() -> None:
    lines = [
        *world(1, range(1, 3), 10.0, size=1),
        *world(2, range(3, 9), 20.0),
        *world(1, range(3, 4), 24.0, size=1),
    ]
    found = list(oracles.two_worlds(whole_steps(lines)))
    assert found and "two worlds" in found[0]
    assert not list(oracles.two_worlds(whole_steps(lines), [(23.5, "a")]))
    assert list(oracles.two_worlds(whole_steps(lines), [(21.5, "a")])), "it had its moment"
    assert list(oracles.two_worlds(whole_steps(lines), [(23.5, "b")])), "it was another node"


def test_a_step_may_be_made_again_where_its_workers_are_gone_but_with_the_same_samples() -> None:
    again = [replace(line, id=f"{line.id}x") for line in world(4, range(8, 12), 40.0)]
    assert judge([*WELL, *again], EXPECTED, same_weights=True) == []


def test_a_worker_of_an_old_world_that_applies_its_last_step_late_does_not_train() -> None:
    late = [line for line in world(1, range(5, 6), 33.0) if line.rank == 0 and line.what == "step"]
    assert not list(oracles.resumed_too_early([*WELL, *late], [(31.0, 8)]))


def test_a_round_goes_on_from_what_was_durable_while_others_trained() -> None:
    again = [replace(line, id=f"{line.id}x") for line in world(4, range(8, 12), 40.0)]
    lines = [*WELL, *again]
    assert not list(oracles.resumed_too_early(lines, [(21.0, 5), (31.0, 7)]))
    assert list(oracles.resumed_too_early(lines, [(21.0, 5), (31.0, 8)])) == [
        "round 4 goes on from step 7, though step 8 was durable before"
    ]
    assert not list(oracles.resumed_too_early(lines, [(35.0, 8)])), (
        "nobody trained any more: it came too late"
    )


def test_the_undisturbed_run_itself_uses_each_sample_once() -> None:
    right = Reference({1: (0, 2), 2: (1, 3), 3: (3, 0)}, {1: 0, 2: 0, 3: 1})
    assert not list(oracles.not_each_once(right, 4))
    for wrong in ({1: (0, 2), 2: (2, 3), 3: (3, 0)}, {1: (0, 2), 2: (1,), 3: (3, 0)}, {1: (0, 2), 2: (1, 4)}):
        assert list(oracles.not_each_once(Reference(wrong, {1: 0, 2: 0, 3: 1}), 4))


@pytest.mark.parametrize(
    ("charged", "least", "most", "right"), [(1, 1, 1, True), (0, 1, 1, False), (2, 0, 1, False)]
)
def test_the_budget_is_charged_for_failures_of_user_code_alone(
    charged: int, least: int, most: int, right: bool
) -> None:
    assert (not list(oracles.wrong_charge(charged, least, most))) == right


def test_a_traceback_of_an_agent_is_found_but_not_one_that_it_tells_of() -> None:
    told = json.dumps({"event": "failure.charged", "traceback": "Traceback (most recent call last): ..."})
    assert not list(oracles.tracebacks(f"{told}\nfinished after 3 s\n"))
    (found,) = oracles.tracebacks(f"{told}\nTraceback (most recent call last):\n  File ...\nKeyError: 3\n")
    assert "KeyError: 3" in found
    assert list(
        oracles.tracebacks(json.dumps({"event": "cannot answer", "exception": "Traceback ..."}) + "\n")
    )


def test_a_ledger_whose_writer_was_killed_is_read_to_its_last_whole_line() -> None:
    line = {"is": "step", "at": 1.5, "node": "a", "id": "a1", "samples": [1, 2], "step": 3}
    text = json.dumps(line) + "\n" + json.dumps(line)[:20]
    assert parse(text) == [Line("step", 1.5, "a", "a1", samples=(1, 2), step=3)]


def test_time_that_other_processes_had_the_processor_does_not_count_for_the_job() -> None:
    second = 10**9
    assert had(2.0, {}, {}) == 2.0, "all sleep: the machine could do everything"
    assert had(2.0, {"1": 0, "2": 0}, {"1": second, "2": second // 2}) == 1.0
    assert had(2.0, {"1": 5 * second}, {"1": 5 * second}) == 2.0
    assert had(2.0, {}, {"3": 9 * second}) == 0.0, "a thread that was not known before"


@pytest.mark.parametrize(("load", "expected"), [(0.0, 1.0), (6.0, 1.0), (24.0, 4.0), (500.0, 10.0)])
def test_leases_are_as_patient_as_the_machine_is_busy(load: float, expected: float) -> None:
    assert slowness(load, 2) == expected
