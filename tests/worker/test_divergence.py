"""What ranks have of one name: taken from one of them where it may differ, refused where it must not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elasticd import worker
from elasticd.checkpoint.client.schedule import EverySteps
from tests.checkpoint.faults import Helper
from tests.worker.crew import Crew, Hand
from tests.worker.jobs import Journal, begin, commit, reads

LAST = 4


@pytest.fixture
def saver() -> Iterator[str]:
    with Helper("forker.py") as helper:
        yield helper.saver(linger_s=None)[0]


def start(crew: Crew, job: Any, *names: str, **options: Any) -> list[Hand]:
    hands = [crew.start(job, name=name, **options) for name in names]
    crew.all_waiting(*hands)
    crew.form(*hands)
    crew.all_ended()
    return hands


def normalize(address: str, folder: str, name: str, saver: str, dies: bool) -> None:
    """Each rank has samples of its own, so that its running statistics are its own, too."""
    begin(address, folder, name)
    os.environ["ELASTICD_SAVER"] = saver
    journal = Journal(folder, name)
    torch.manual_seed(3)
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 256), nn.Linear(256, 8), nn.BatchNorm1d(8))
    state = worker.State(
        model, torch.optim.SGD(model.parameters(), lr=0.01), checkpoints=str(Path(folder, "run"))
    )

    def note(step: int) -> None:
        journal.write(buffers=[step, [b.tolist() for b in model.buffers()]])

    @worker.run
    def train(state: worker.State) -> None:
        note(state.step)
        for step in state.steps(LAST if dies else state.step):
            torch.manual_seed(step * 10 + worker.rank())
            state.optimizer.zero_grad()
            state.model(torch.randn(16, 8) + worker.rank()).square().mean().backward()
            state.optimizer.step()
            note(step + 1)
            commit(state, journal)
        if dies:
            state._committed.saves.checkpoints.wait()
            os.kill(os.getpid(), 9)

    train(state)


def test_buffers_come_back_from_one_rank_as_a_whole(crew, tmp_path, saver):
    start(crew, normalize, "0", "1", folder=str(tmp_path), saver=saver, dies=True)
    first, second = (dict(reads(tmp_path, name, "buffers")) for name in "01")
    assert first[LAST] != second[LAST]
    with Helper("forker.py") as other, Crew() as again:
        names = ("2", "3")
        start(again, normalize, *names, folder=str(tmp_path), saver=other.saver(linger_s=None)[0], dies=False)
    for name in names:
        [[step, buffers]] = reads(tmp_path, name, "buffers")
        assert step and buffers == first[step], (tmp_path / f"{name}.err").read_text()


def collect(address: str, folder: str, name: str, saver: str) -> None:
    begin(address, folder, name)
    os.environ["ELASTICD_SAVER"] = saver
    journal = Journal(folder, name)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = worker.State(model, optimizer, checkpoints=str(Path(folder, "run")), seen=torch.zeros(0))
    state._committed.saves.checkpoints._schedule.cadence = EverySteps(1000)

    @worker.run
    def train(state: worker.State) -> None:
        for _ in state.steps(LAST):
            state.seen = torch.zeros(3 + worker.rank())
            commit(state, journal)

    train(state)


def test_a_tensor_whose_length_differs_by_rank_is_refused_at_the_first_commit(crew, tmp_path, saver):
    hands = start(crew, collect, "0", "1", folder=str(tmp_path), saver=saver)
    for hand, name in zip(hands, "01", strict=True):
        assert hand.status == 1 and reads(tmp_path, name, "committed") == [1]
        [last] = (tmp_path / f"{name}.err").read_text().splitlines()[-1:]
        assert last.startswith(
            "ValueError: seen cannot be saved, as it is float32 [3] on rank 0 and float32 [4] on rank 1: "
        )
