"""What ``elasticd bench scaling`` derives from the times of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest

from elasticd.cli.bench.scaling import (
    StepCosts,
    StepRecord,
    WorldMeasured,
    counted,
    efficiency,
    measure,
    speed_up,
)
from elasticd.cli.bench.scaling_advice import ScalingFault, scaling_advice
from elasticd.cli.bench.scaling_text import conclusion, costs, document, throughput

STEP = StepCosts(data_s=0.001, compute_s=0.010, communication_s=0.002, waiting_s=0.0, no_cpu_s=0.0)


def worker(rank: int, of: Sequence[StepCosts], batch: int = 4, since_s: float = 100.0) -> list[StepRecord]:
    """Return the records of a worker whose steps have these costs."""

    def sums(cost: Callable[[StepCosts], float]) -> list[float]:
        return list(accumulate(map(cost, of)))

    at = sums(lambda s: s.step_s)
    wait, data = sums(lambda s: s.communication_s + s.waiting_s), sums(lambda s: s.data_s)
    no_cpu = sums(lambda s: s.no_cpu_s)
    return [
        StepRecord(rank, n + 1, since_s + at[n], wait[n], data[n], no_cpu[n], batch * (n + 1), 4_000_000)
        for n in range(len(of))
    ]


def world(workers: int, step: StepCosts = STEP, **more: object) -> WorldMeasured:
    made = {rank: worker(rank, [step] * 400) for rank in range(workers)}
    return measure("elasticd run", made, range(200, 401))


def test_costs_are_told_apart_and_the_worker_that_waits_least_waits_for_communication_alone() -> None:
    quick = StepCosts(data_s=0.001, compute_s=0.010, communication_s=0.002, waiting_s=0.020, no_cpu_s=0.001)
    slow = StepCosts(data_s=0.003, compute_s=0.028, communication_s=0.002, waiting_s=0.0, no_cpu_s=0.001)
    made = {0: worker(0, [quick] * 100), 1: worker(1, [slow] * 100)}
    found = measure("elasticd run", made, range(11, 101))
    assert (found.world, found.steps, found.parameter_bytes) == (2, 90, 4_000_000)
    assert found.costs.communication_s == pytest.approx(0.002)
    assert found.costs.waiting_s == pytest.approx(0.010)
    assert found.costs.data_s == pytest.approx(0.002)
    assert found.costs.compute_s == pytest.approx(0.019)
    assert found.costs.no_cpu_s == pytest.approx(0.001)
    assert found.costs.step_s == pytest.approx(0.034)
    assert found.slow == {1: pytest.approx(31 / 11)}
    assert (found.steps_per_s, found.samples_per_s) == (pytest.approx(2 / 0.034), pytest.approx(8 / 0.034))


def test_workers_that_are_late_in_turns_are_not_slow() -> None:
    late, early = (
        StepCosts(0.0, 0.030, 0.001, 0.0, 0.0),
        StepCosts(0.0, 0.010, 0.001, 0.020, 0.0),
    )
    made = {rank: worker(rank, [late if n % 2 == rank else early for n in range(200)]) for rank in (0, 1)}
    found = measure("torchrun", made, range(50, 201))
    assert found.slow == {}
    assert found.costs.waiting_s == pytest.approx(0.010, rel=0.05)


@pytest.mark.parametrize(
    ("workers", "expected", "warm_up", "steps"),
    [
        (2, 2, 10, range(156, 301)),  # the first 2 s do not count: 154 steps of 13 ms after the first
        (2, 2, 200, range(201, 301)),
        (2, 2, 300, range(0)),
        (2, 3, 10, range(0)),  # one worker has not made a step
    ],
)
def test_the_first_steps_and_seconds_do_not_count(
    workers: int, expected: int, warm_up: int, steps: range
) -> None:
    made = {rank: worker(rank, [STEP] * (300 + rank)) for rank in range(workers)}
    found = counted(made, expected, warm_up)
    assert (found == steps) or not (len(found) or len(steps))


def test_throughput_is_in_steps_where_samples_are_unknown() -> None:
    found = measure("torchrun", {0: worker(0, [STEP] * 50, batch=0)}, range(10, 51))
    assert found.samples_per_s == 0 and found.throughput == pytest.approx(1 / 0.013)
    assert any("steps/s" in line for line in throughput([found]))


def test_speed_up_and_efficiency_compare_with_the_fewest_workers() -> None:
    two = world(2)
    four = world(4, StepCosts(0.001, 0.010, 0.015, 0.0, 0.0))
    assert speed_up(four, two) == pytest.approx(1.0)
    assert efficiency(four, two) == pytest.approx(0.5)


def of(step: StepCosts, workers: int = 4, batch: float = 4.0, **more: object) -> WorldMeasured:
    per_s = workers / step.step_s
    facts = {"slow": {}, "parameter_bytes": 100_000_000, **more}
    return WorldMeasured("elasticd run", workers, 100, per_s, per_s * batch, step, **facts)  # type: ignore[arg-type]


ALONE = of(StepCosts(0.0, 0.010, 0.0, 0.0, 0.0), workers=1)


@pytest.mark.parametrize(
    ("one", "faults", "says"),
    [
        (of(StepCosts(0.0, 0.010, 0.001, 0.0, 0.0)), [], ""),
        (of(StepCosts(0.008, 0.010, 0.001, 0.0, 0.0)), ["loader"], "42% of a step"),
        (of(StepCosts(0.0, 0.010, 0.004, 0.0, 0.0)), ["small_batch"], "about 4 times as large"),
        (of(StepCosts(0.0, 0.010, 0.060, 0.0, 0.0)), ["communication"], "(gradients: 100.0 MB)"),
        (of(StepCosts(0.0, 0.001, 0.006, 0.0, 0.0), parameter_bytes=5000), ["small_batch"], "many times"),
        (of(StepCosts(0.0, 0.015, 0.0, 0.015, 0.0), slow={2: 2.5}), ["slow_worker"], "rank 2 needs 2.50"),
        (of(StepCosts(0.0, 0.010, 0.0, 0.006, 0.0)), ["uneven_work"], "38% of a step"),
        (of(StepCosts(0.0, 0.010, 0.0, 0.0, 0.010)), ["no_cpu"], "2 cores for 4 workers"),
        (of(StepCosts(0.0, 0.020, 0.0, 0.0, 0.0)), ["slower_compute"], "2.00 times as long as with 1 worker"),
        (of(StepCosts(0.0, 0.009, 0.0, 0.0, 0.0), batch=1.0), ["small_batch"], "1 samples a step, 4 with"),
        (of(StepCosts(0.0, 0.0027, 0.0, 0.0, 0.0), batch=1.0), [], ""),
    ],
)
def test_each_fault_has_its_advice(one: WorldMeasured, faults: list[str], says: str) -> None:
    advice = scaling_advice(one, ALONE, cores=2)
    assert [piece.fault for piece in advice] == [ScalingFault(fault) for fault in faults]
    assert says in "".join(piece.sentence for piece in advice)


def test_a_script_that_scales_badly_without_a_known_cause_gets_a_sentence() -> None:
    one = of(StepCosts(0.0012, 0.0115, 0.0012, 0.0, 0.0012))
    assert scaling_advice(one, ALONE, cores=2) == ()
    lines = list(conclusion(one, ALONE, ()))
    assert lines[0] == "falls short: 4 workers reach 66% of 4 times the throughput of 1 worker"
    assert "no single part" in lines[1]
    assert list(conclusion(ALONE, ALONE, ())) == []


def test_what_is_printed_fits_a_terminal_and_bars_add_up() -> None:
    measured = [world(1), world(2, StepCosts(0.001, 0.010, 0.005, 0.003, 0.001))]
    lines = [*throughput(measured), *costs(measured)]
    assert max(map(len, lines)) <= 80
    assert f"  1 elasticd run  {'#' * 24}| 1.00" in lines
    assert f"  2 elasticd run  {'#' * 33}{' ' * 16}| 1.30" in lines
    alone, together = (line.split()[3] for line in lines if "run  %" in line)
    assert {sign: together.count(sign) for sign in "%#=.?"} == {"%": 3, "#": 24, "=": 20, ".": 0, "?": 3}
    assert abs(together.count("#") - alone.count("#")) <= 1, "as many seconds are as long in each bar"


def test_the_document_names_each_run() -> None:
    measured = [world(1), world(2)]
    found = document(("job.py",), "1", measured, ())
    assert [(run["workers"], run["efficiency"]) for run in found["runs"]] == [
        (1, 1.0),
        (2, pytest.approx(1.0)),
    ]
    assert found["runs"][1]["step"]["step_s"] == pytest.approx(0.013)
    assert found["unit"] == "samples/s"
