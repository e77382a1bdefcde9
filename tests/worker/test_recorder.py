"""Notes for an audit are whole lines, come before what they are about, and never end a training."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elasticd import worker
from elasticd.core.auditlog import FOLDER, VARIABLE, Committed, Entered, Note, Took, Weights, lines, unpack
from elasticd.worker.data import Data
from elasticd.worker.recorder import Recorder, digest, recorder


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / FOLDER))
    monkeypatch.setenv("ELASTICD_AUDIT_EVERY", "2")
    recorder.cache_clear()
    yield tmp_path / FOLDER
    recorder.cache_clear()


def noted(folder: Path) -> list[Note]:
    [path] = folder.iterdir()
    return [note for _, note in lines(path.read_bytes())]


def train(data: Data, model: nn.Module | None = None, **how: Any) -> worker.State:
    torch.manual_seed(1)
    model = model or nn.Linear(1, 1)
    state = worker.State(model, torch.optim.AdamW(model.parameters(), lr=0.01), data=data, **how)
    state.begin()
    state.agree(1)
    state.enter(None)
    for step in state.steps():
        for batch in step:
            step.backward(state.model(batch).square().mean())
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.commit()
    state.finish()
    return state


def test_what_is_taken_is_noted_before_it_is_committed_and_weights_now_and_then(folder):
    data = Data(Numbers(), global_batch=4, virtual_ranks=2, accumulate=2, shuffle=False)
    state = train(data, wrap=None)
    entered, *rest = noted(folder)
    assert entered == Entered(1, 0, 1, 0, "", 0, 0, data.facts)
    kinds = [type(note) for note in rest]
    assert kinds == [Took, Committed, Took, Committed, Weights, Took, Committed, Weights]
    took = [note for note in rest if isinstance(note, Took)]
    assert [list(unpack(t.ids)) for t in took] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [(start, count) for start, count, _ in took[0].parts] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert rest[-1] == Weights(3, digest(learned(state)))


def learned(state: worker.State) -> list[torch.Tensor]:
    """The weights, and what the optimizer has of them: its moments, and how many steps it took."""
    had = state.optimizer.state_dict()["state"]
    moments = [had[i][name] for i in sorted(had) for name in ("exp_avg", "exp_avg_sq", "step")]
    return [*state.model.parameters(), *moments]


def test_buffers_are_digested_too_where_all_workers_have_the_same(folder):
    data = Data(Numbers(), global_batch=4, virtual_ranks=1, consistent=True)
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
    state = train(data, model)
    parameters, moments = learned(state)[:4], learned(state)[4:]
    assert noted(folder)[-1] == Weights(3, digest([*parameters, *model.buffers(), *moments]))
    assert int(model[0].num_batches_tracked) == 3


def test_without_data_the_commits_are_noted(folder):
    model = nn.Linear(1, 1)
    state = worker.State(model, wrap=None)
    state.begin()
    state.agree(1)
    state.enter(None)
    state.commit()
    assert [type(note) for note in noted(folder)] == [Entered, Committed]


def test_a_full_disk_ends_the_notes_with_a_torn_line_and_not_the_training(tmp_path, monkeypatch, caplog):
    notes = Recorder(tmp_path)
    notes.entered(1, 0, 1, 0, None)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    with caplog.at_level(logging.WARNING):
        notes.committed(1, [])
    monkeypatch.undo()
    notes.committed(2, [])
    assert noted(tmp_path) == [Entered(1, 0, 1, 0)]
    assert "no more is noted for an audit" in caplog.text


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    notes = Recorder(tmp_path / "file" / FOLDER)
    notes.entered(1, 0, 1, 0, None)
    assert os.strerror(errno.ENOTDIR) in caplog.text


def test_digests_tell_types_shapes_and_bits():
    assert digest([torch.tensor(1.0)]) == digest([torch.tensor([1.0])])
    assert digest([torch.tensor(0.0)]) != digest([torch.tensor(-0.0)])
    assert digest([torch.ones(2, dtype=torch.bfloat16)]) != digest([torch.ones(2)])
