"""Plain data that must be the same in all workers, and data of each worker's own."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elasticd import worker
from elasticd.checkpoint.client.objects import loaded
from elasticd.worker.commit.shared import ValueSummary, _summary_of, difference
from elasticd.worker.values.plaindata import copied, outlined, with_tensors
from tests.worker.jobs import NOTHING, Accident, Gate, begin, commit, reads
from tests.worker.worlds import entered, in_world

STEPS = 9
MANY = 1 << 16  # the elements of a tensor that is compared in full


class Meter:
    """An object of the script's own, with a state."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = state["sums"]


def job(address: str, folder: str, name: str, accident: Accident = NOTHING, how: str = "") -> None:
    """Run a script. ``how``: what is wrong with it."""
    journal = begin(address, folder, name)
    model = nn.Linear(1, 1)
    more: dict[str, Any] = {
        "a number that is its own": {"part": int(name)},
        "a generator that is its own": {"noise": torch.Generator().manual_seed(int(name))},
        "a tensor that comes of its parameters": {"mean": model.weight.detach().clone(), "seen": []},
    }.get(how, {})
    state = worker.State(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        total=0.0,
        meter=Meter(),
        mine=worker.Local([]),
        draws=worker.Local(torch.Generator().manual_seed(int(name))),
        own=worker.Local(Meter()),
        **more,
    )

    @worker.run
    def train(state: worker.State) -> None:
        journal.write(entered=[state.step, len(state.mine), len(state.own.sums)])
        for step in state.steps(STEPS):
            state.optimizer.zero_grad()
            state.model(torch.ones(1, 1)).sum().backward()
            state.mine.append([name, step])
            state.own.sums.append(torch.rand(1, generator=state.draws).item())
            accident("start", step)
            state.optimizer.step()
            state.total += 1.0
            if step == 3 and how == "a number":
                state.total += 0.5 * worker.rank()
            if how == "an object":
                state.meter.sums.append(worker.rank())
            if how == "a rate":
                state.optimizer.param_groups[0]["lr"] += worker.rank()
            commit(state, journal)
        journal.write(mine=state.mine, own=state.own.sums, total=state.total)

    train(state)


def test_a_local_value_stays_with_its_worker_and_is_neither_sent_nor_lost(crew, tmp_path):
    gate = Gate(tmp_path / "gate")
    crew.begin(tmp_path, Accident("start", 5, gate.wait), Accident("start", 3), NOTHING, job=job)
    crew.until(lambda: crew.round == 2)
    gate.until_somebody_waits()
    crew.grow(crew.start(job, str(tmp_path), "3"))
    gate.open()
    crew.all_ended()
    assert [size for _, size in crew.settled] == [3, 2, 3]
    for name in "023":
        assert crew.hands[int(name)].status == 0, (tmp_path / f"{name}.err").read_text()
        entered = reads(tmp_path, name, "entered")
        first = entered[0][0]
        assert entered == [[step, step - first, step - first] for step, _, _ in entered]
        [mine], [own], [total] = (reads(tmp_path, name, what) for what in ("mine", "own", "total"))
        draws = torch.Generator().manual_seed(int(name))
        assert mine == [[name, step] for step in range(first, STEPS)]
        assert own == [torch.rand(1, generator=draws).item() for _ in mine]
        assert total == STEPS
    assert reads(tmp_path, "3", "entered")[0][0] > 3


UNLIKE = {
    "a number that is its own": r"State's part is not the same in worker 0 \(0\) and worker 1 \(1\), as",
    "a generator that is its own": "State's noise is not the same in worker 0 and worker 1, as they begin.",
    "an object": "State's meter is not the same in worker 0 and worker 1. A State's values are sent from",
    "a rate": "State's optimizer.param_groups is not the same in worker 0 and worker 1.",
    "a number": r"State's total is not the same in worker 0 \((\d).0\) and worker 1 \(\1.5\).",
}


@pytest.mark.parametrize("how", UNLIKE)
def test_a_value_that_differs_between_workers_ends_the_job_and_is_named(crew, tmp_path, how):
    hands = crew.begin(tmp_path, NOTHING, NOTHING, job=job, how=how)
    crew.all_ended()
    for hand, name in zip(hands, "01", strict=True):
        assert hand.status == 1
        [last] = (tmp_path / f"{name}.err").read_text().splitlines()[-1:]
        assert re.match("elasticd.worker.commit.shared.Unlike: " + UNLIKE[how], last)
        committed = reads(tmp_path, name, "committed")
        if "own" in how:
            assert not committed
        elif how != "a number":  # the value is wrong later
            assert committed == [1]


def test_a_newcomer_with_other_initial_values_logs_what_it_takes_from_the_others(crew, tmp_path):
    gate = Gate(tmp_path / "gate")
    how = "a number that is its own"
    crew.begin(tmp_path, Accident("start", 2, gate.wait), job=job, how=how)
    gate.until_somebody_waits()
    crew.grow(crew.start(job, str(tmp_path), "1", how=how))
    gate.open()
    crew.all_ended()
    assert [hand.status for hand in crew.hands] == [0, 0]
    said = (tmp_path / "1.err").read_text()
    assert "State's part is not the same in worker 0 (0) and worker 1 (1), as their scripts began" in said
    assert "part" not in (tmp_path / "0.err").read_text()


def test_what_comes_of_parameters_that_are_not_alike_yet_may_begin_otherwise(crew, tmp_path):
    how = "a tensor that comes of its parameters"
    hands = crew.begin(tmp_path, NOTHING, NOTHING, job=job, how=how)
    crew.all_ended()
    assert [hand.status for hand in hands] == [0, 0], (tmp_path / "0.err").read_text()


def evaluate_apart() -> str:
    state = worker.State(nn.Linear(1, 1), wrap=None, best=9.0)
    entered(state)
    try:
        for epoch in state.epochs(3, steps=2):
            list(epoch)
            if epoch.number == 1:
                state.best = 1.0 + worker.rank()
    except worker.Unlike as error:
        return f"{state._committed.progress.ended} {error}"
    return ""


def test_an_evaluation_that_comes_to_something_else_on_each_rank_is_not_committed(tmp_path):
    said = in_world(2, tmp_path, evaluate_apart)
    expected = "1 State's best is not the same in worker 0 (1.0) and worker 1 (2.0)."
    assert [each.partition(" A State's")[0] for each in said] == [expected] * 2


def evaluate_by_rounding() -> list[str]:
    said = Said()
    logging.getLogger("elasticd.worker.commit.shared").addHandler(said)
    state = worker.State(nn.Linear(1, 1), wrap=None, best=9.0, at=100.0 + worker.rank() * 1e-6)
    entered(state)
    for epoch in state.epochs(3, steps=2):
        list(epoch)
        state.best = (1.0 + worker.rank() * 1e-7) / (epoch.number + 3)
    return said.lines


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_an_evaluation_that_differs_by_rounding_is_logged_once_and_training_goes_on(tmp_path):
    for lines in in_world(2, tmp_path, evaluate_by_rounding):
        assert len(lines) == 1 and "is not the same in worker 0" in lines[0] and "by rounding" in lines[0]


@pytest.mark.parametrize(
    ("one", "other", "close"),
    [
        (0.0712810531, 0.0712810456, True),
        (1.0, 1.001, False),
        (0.0, 1e-9, False),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        (float("inf"), float("inf"), True),
        ({"loss": 1.0, "step": 1}, {"loss": 1.0000001, "step": 1}, True),
        ({"loss": 1.0, "step": 1}, {"loss": 1.0000001, "step": 2}, False),
        ([1.0, 2.0], [1.0, 2.0, 3.0], False),
        (torch.ones(MANY), torch.ones(MANY) + 1e-6, True),
        (torch.ones(MANY), torch.cat([torch.ones(MANY - 1), torch.tensor([2.0])]), False),
        ([torch.ones(MANY)] * 3, [torch.ones(MANY)] * 2 + [torch.ones(MANY) + 1], False),
        (torch.tensor([1.0, 3.0]), torch.tensor([1.0, 3.0000002]), True),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.tensor([1]), torch.tensor([2]), False),
        ("1.0", "1.0000001", False),
        (1, 2, False),
        (10**6, 10**6 + 1, False),
        (10**6, 10**6 + 1.0, False),
        (10.0**6, 10.0**6 + 1, True),
        (2**60, 2**60 + 1, False),
        (True, False, False),
        ({"best": 1, "loss": 1.0}, {"best": 1.0, "loss": 1.0000001}, True),
        ({"best": 1, "loss": 1.0}, {"best": np.float64(1), "loss": np.float32(1.0000001)}, True),
        ({"seen": np.int64(1), "loss": 1.0}, {"seen": True, "loss": 1.0000001}, True),
        ({"seen": 1, "loss": 1.0}, {"seen": 2.0, "loss": 1.0000001}, False),
        (1, 1.0000001, True),
        ("1", 1, False),
        (None, 0, False),
    ],
)
def test_numbers_may_differ_by_rounding_and_nothing_else_may(one, other, close):
    for a, b in ((one, other), (other, one)):
        assert _summary_of(a, numbers=True).is_close(_summary_of(b, numbers=True)) is close


def test_no_checkpoint_has_what_is_a_workers_own():
    noise = torch.Generator()
    state = worker.State(
        nn.Linear(1, 1), a=1, b=worker.Local(2), c=worker.Local(noise), d=worker.Local(Meter())
    )
    state._committed.begin()
    parts = state._committed.parts()
    assert parts.plain == {"a": 1} and parts.things.keys() == {"model", "_epochs", "_frozen"}
    assert (state.b, state.c) == (2, noise)


def test_modules_optimizers_and_data_are_no_workers_own():
    model = nn.Linear(1, 1)
    for value in (model, torch.optim.SGD(model.parameters()), worker.Data([1], global_batch=1)):
        with pytest.raises(TypeError, match="thing is a .*, which State keeps the same in all workers"):
            worker.State(model, thing=worker.Local(value))


def odd() -> dict[str, Any]:
    counts: defaultdict[str, int] = defaultdict(int, {"b": 1, "a": 2})
    return {
        "counts": counts,
        "ordered": OrderedDict(x=1.5, y=float("nan")),
        "nest": [(1, "one"), {3, 1, 2}, None, True, b"raw", 1j],
        "tensors": [torch.tensor(1), torch.ones(2, 3).t(), torch.zeros(0), torch.arange(100_000)],
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
    }


def test_data_that_has_travelled_has_the_same_digest_and_any_other_has_another():
    data = odd()
    outline, tensors = outlined(data)
    arrived = iter([t.clone() for t in tensors])
    there = with_tensors(loaded(outline), lambda _: next(arrived))
    assert _summary_of(there) == _summary_of(data) == _summary_of(copied(data))
    others = [{**odd(), "counts": {"b": 1}}, {**odd(), "half": torch.tensor([1.5])}, {**odd(), "nest": [1]}]
    found = {_summary_of(other).digest for other in [data, *others, 1, 1.5, "1", [1], (1,), {1}]}
    assert len(found) == 10
    assert _summary_of({"b": 1, "a": 2}) == _summary_of({"a": 2, "b": 1})
    of_numpy = {np.int64(3): 1, (np.int32(1), "a"): 2}
    assert _summary_of(of_numpy) == _summary_of(copied(of_numpy))


class Count:
    """Loads a whole number as a floating-point number, as many metrics do."""

    def __init__(self) -> None:
        self.number: float = 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = float(state["number"])


def test_a_number_that_an_object_loads_as_one_of_another_type_is_the_same(caplog):
    count = Count()
    state = worker.State(nn.Linear(1, 1), wrap=None, count=count)
    entered(state)
    before = state._committed.comparison.digests()
    state._loop.leave()
    entered(state)
    assert repr(count.number) == "0.0" and state._committed.comparison.digests() == before
    for _ in state.steps(1):
        state.commit()
        count.number = 0
    assert caplog.records == []
    assert len({_summary_of(one).digest for one in (1, 1.0, True, np.float64(1), np.int64(1), np.True_)}) == 1
    assert len({_summary_of([half]).digest for half in (0.5, np.float64(0.5), np.float32(0.5))}) == 1


@pytest.mark.parametrize(
    ("heard", "ranks", "said"),
    [
        ([{"a": ValueSummary(1, "1")}] * 3, [0, 1, 2], ""),
        (
            [{"a": ValueSummary(1, "1")}, {"a": ValueSummary(2, "2")}, {"a": ValueSummary(2, "2")}],
            [0, 1, 2],
            "in worker 1 (2) and worker 0 (1)",
        ),
        ([{"a": ValueSummary(1, "1")}, {"a": ValueSummary(2, "2")}, {"a": ValueSummary(2, "2")}], [1, 2], ""),
        ([{}, {"a": ValueSummary(2, "")}], [0, 1], "State's a is not the same in worker 0 and worker 1"),
    ],
)
def test_the_first_difference_is_said_in_words(heard, ranks, said):
    assert said in difference(heard, ranks) and bool(said) == bool(difference(heard, ranks))
