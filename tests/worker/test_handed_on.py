"""Plain data reaches those who come when a worker was killed; what could not is refused before that."""

from __future__ import annotations

import enum
from collections import defaultdict

import numpy as np
import pytest
import torch
from torch import nn

from elasticd import worker
from tests.checkpoint.likeness import with_types
from tests.worker.jobs import NOTHING, Accident, Gate, Journal, begin, commit, die, reads


class Colour(enum.Enum):
    RED = 1


def work(address: str, folder: str, name: str, accident: Accident = NOTHING) -> None:
    begin(address, folder, name)
    journal = Journal(folder, name)
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    state = worker.State(model, torch.optim.AdamW(model.parameters()), counts={}, lists=defaultdict(list))

    @worker.run
    def train(state: worker.State) -> None:
        journal.write(
            entered=state.step, counts=str(with_types(state.counts)), lists=str(with_types(state.lists))
        )
        for step in state.steps(8):
            accident("start", step)
            state.optimizer.zero_grad()
            state.model(torch.ones(2, 4)).square().mean().backward()
            state.optimizer.step()
            state.counts[np.int64(step)] = {True: step, str(step): None}
            state.lists[step // 2].append(step)
            commit(state, journal)

    train(state)


def test_keys_reach_those_who_come_when_a_worker_was_killed(crew, tmp_path):
    gate = Gate(tmp_path / "gate")
    hands = [
        crew.start(work, str(tmp_path), "0", Accident("start", 5, gate.wait)),
        crew.start(work, str(tmp_path), "1", Accident("start", 5, die)),
    ]
    crew.all_waiting(*hands)
    crew.form(*hands)
    gate.until_somebody_waits()
    crew.until(lambda: hands[1].status is not None)
    newcomer = crew.start(work, str(tmp_path), "2")
    crew.all_waiting(newcomer)
    gate.open()
    crew.all_ended()
    assert hands[0].status == newcomer.status == 0, (tmp_path / "2.err").read_text()
    [*_, step] = reads(tmp_path, "2", "entered")
    assert step >= 5
    counts = {n: {True: n, str(n): None} for n in range(step)}
    lists = defaultdict(list)
    for n in range(step):
        lists[n // 2].append(n)
    assert reads(tmp_path, "2", "counts")[-1] == str(with_types(counts))
    assert reads(tmp_path, "2", "lists")[-1] == str(with_types(lists))


def spoil(address: str, folder: str, name: str, at: int) -> None:
    begin(address, folder, name)
    journal = Journal(folder, name)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    state = worker.State(model, optimizer, counts={})

    @worker.run
    def train(state: worker.State) -> None:
        for step in state.steps(8):
            state.optimizer.zero_grad()
            state.model(torch.ones(2, 4)).square().mean().backward()
            state.optimizer.step()
            if at < 0:
                optimizer.state[model.weight]["odd"] = Colour.RED
            elif step == at:
                state.counts[Colour.RED] = 1
            commit(state, journal)

    train(state)


@pytest.mark.parametrize(
    ("at", "sentence"),
    [
        (
            2,
            "TypeError: State holds the key <Colour.RED: 1>, a Colour, which cannot be sent to another ",
        ),
        (-1, "TypeError: State's optimizer.state holds a value that cannot be sent to another worker: "),
    ],
)
def test_what_nobody_could_take_is_refused_by_the_first_commit_of_it(crew, tmp_path, at, sentence):
    hands = [crew.start(spoil, str(tmp_path), name, at) for name in "01"]
    crew.all_waiting(*hands)
    crew.form(*hands)
    crew.all_ended()
    for hand, name in zip(hands, "01", strict=True):
        assert hand.status == 1 and reads(tmp_path, name, "committed") == list(range(1, max(at, 0) + 1))
        assert sentence in (tmp_path / f"{name}.err").read_text()
