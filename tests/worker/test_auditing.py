"""Notes for an audit are whole lines. Samples are noted before their step is committed. Notes that cannot be
written do not end a training."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elasticd import worker
from elasticd.cli.audit_command import finding
from elasticd.data.audit import judge
from elasticd.data.auditnotes import (
    FOLDER,
    VARIABLE,
    BatchNote,
    CommitNote,
    EntryNote,
    Gap,
    Note,
    Weights,
    decode,
    lines,
    unpack,
)
from elasticd.worker.data import Data
from elasticd.worker.samples.auditing import Recorder, digest, recorder
from tests.worker.worlds import entered, take_steps


def may_mount() -> bool:
    try:
        return not subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode
    except FileNotFoundError:
        return False


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
    entered(state)
    take_steps(state)
    state._loop.finish()
    return state


def test_samples_are_noted_before_their_commit_and_weights_now_and_then(folder):
    data = Data(Numbers(), global_batch=4, virtual_ranks=2, accumulate=2, shuffle=False)
    state = train(data, wrap=None)
    entered, *rest = noted(folder)
    assert entered == EntryNote(1, 0, 1, 0, "", 0, 0, data.facts)
    kinds = [type(note) for note in rest]
    assert kinds == [BatchNote, CommitNote, BatchNote, CommitNote, Weights, BatchNote, CommitNote, Weights]
    took = [note for note in rest if isinstance(note, BatchNote)]
    assert [list(unpack(t.ids)) for t in took] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [(start, count) for start, count, _ in took[0].parts] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert rest[-1] == Weights(3, digest(learned(state)))


def learned(state: worker.State) -> list[torch.Tensor]:
    """Return the weights, and the optimizer's state: its moments and its count of steps."""
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
    entered(state)
    state.commit()
    assert [type(note) for note in noted(folder)] == [EntryNote, CommitNote]


def test_a_full_disk_leaves_a_gap_that_is_told_and_no_torn_line(tmp_path, monkeypatch, caplog):
    notes = Recorder(tmp_path)
    notes.entered(1, 0, 1, 0, None)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            notes.committed(step, [])
        notes.entered(2, 0, 1, 2, None)
    assert noted(tmp_path) == [EntryNote(1, 0, 1, 0)], "half a line is none, and is not left there"
    monkeypatch.undo()
    with caplog.at_level(logging.WARNING):
        notes.committed(3, [])
        notes.committed(4, [])
    full = os.strerror(errno.ENOSPC)
    assert noted(tmp_path) == [
        EntryNote(1, 0, 1, 0),
        EntryNote(2, 0, 1, 2),
        Gap(3, 3, full),
        CommitNote(3),
        CommitNote(4),
    ]
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"notes for an audit cannot be written, and are lost for now: {full}",
        "notes for an audit are written again: 3 of them are missing",
    ]
    files = {str(path): lines(path.read_bytes()) for path in tmp_path.iterdir()}
    assert any("3 notes before step 3 could not be written" in finding(f) for f in judge(files).findings)


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="nothing may be mounted here")
def test_a_recorder_on_a_disk_that_was_full_goes_on_when_there_is_room():
    inside = 'd=$(mktemp -d) && mount -t tmpfs -o size=64k t $d && exec "$@" $d'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", inside, "sh", sys.executable, "-c", FULL],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    gaps = [note for note in map(decode, done.stdout.encode().splitlines()) if isinstance(note, Gap)]
    assert len(gaps) == 1 and gaps[0].why == os.strerror(errno.ENOSPC) and gaps[0].notes > 0


FULL = """
import sys
from pathlib import Path
from elasticd.worker.samples.auditing import Recorder
disk = Path(sys.argv[1])
notes = Recorder(disk / "audit")
notes.entered(1, 0, 1, 0, None)
with open(disk / "junk", "wb", buffering=0) as junk:
    try:
        while True:
            junk.write(bytes(4096))
    except OSError:
        pass
for step in range(1, 400):
    notes.committed(step, [])
(disk / "junk").unlink()
notes.committed(400, [])
print(next((disk / "audit").iterdir()).read_text(), end="")
"""


def test_a_folder_that_can_be_made_later_only_is_used_from_then_on(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    notes = Recorder(tmp_path / "file" / FOLDER)
    notes.entered(1, 0, 1, 0, None)
    assert os.strerror(errno.ENOTDIR) in caplog.text
    (tmp_path / "file").unlink()
    notes.committed(1, [])
    assert noted(tmp_path / "file" / FOLDER) == [
        EntryNote(1, 0, 1, 0),
        Gap(1, 1, os.strerror(errno.ENOTDIR)),
        CommitNote(1),
    ]


def test_digests_tell_types_shapes_and_bits():
    assert digest([torch.tensor(1.0)]) == digest([torch.tensor([1.0])])
    assert digest([torch.tensor(0.0)]) != digest([torch.tensor(-0.0)])
    assert digest([torch.ones(2, dtype=torch.bfloat16)]) != digest([torch.ones(2)])
