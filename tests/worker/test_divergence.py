"""Values of one name that differ between ranks. Some may differ, and are taken from one rank; others are
refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elasticd import worker
from elasticd.checkpoint.client.schedule import EverySteps
from tests.worker.crew import Crew
from tests.worker.jobs import NOTHING, begin, commit, reads
from tests.worker.worlds import entered, in_world

LAST = 4


def normalize(address: str, folder: str, name: str, _: Any, saver: str, dies: bool) -> None:
    """Each rank normalizes samples of its own, so its running statistics are its own, too."""
    journal = begin(address, folder, name, saver)
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


def test_buffers_come_back_from_one_rank_as_a_whole(
    crew: Crew, tmp_path: Path, new_saver: Callable[[], str]
) -> None:
    for first, dies in ((0, True), (2, False)):
        crew.begin(tmp_path, NOTHING, NOTHING, job=normalize, first=first, saver=new_saver(), dies=dies)
        crew.all_ended()
    first, second = (dict(reads(tmp_path, name, "buffers")) for name in "01")
    assert first[LAST] != second[LAST]
    for name in "23":
        [[step, buffers]] = reads(tmp_path, name, "buffers")
        assert step and buffers == first[step], (tmp_path / f"{name}.err").read_text()


def collect(folder: str) -> str:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = worker.State(model, optimizer, checkpoints=folder, seen=torch.zeros(0))
    state._committed.saves.checkpoints._schedule.cadence = EverySteps(1000)
    entered(state)
    state.seen = torch.zeros(3 + worker.rank())
    try:
        state.commit()
    except ValueError as error:
        return f"{state.step} {error}"
    return "nothing"


def test_a_tensor_whose_length_differs_by_rank_is_refused_at_the_first_commit(tmp_path: Path) -> None:
    for said in in_world(2, tmp_path, collect, str(tmp_path / "run")):
        assert said.startswith(
            "1 seen cannot be saved, as it is float32 [3] on rank 0 and float32 [4] on rank 1: "
        )
