"""The times of steps that workers send to ``elasticd bench scaling``."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from elasticd.procs.page import BOOT_DIR, Page
from tests import forkserver
from tests.procs.agents import PROGRAMS

FAKE_TORCH = f"""import os, sys, time
sys.path.insert(0, {str(PROGRAMS / "faketorch")!r})
from torch.optim.optimizer import Optimizer
assert sys.argv[1:] == ["--log", "--"], sys.argv
assert "ELASTICD_MEASURED" not in os.environ
optimizer = Optimizer()
for _ in range(100):
    optimizer.step()
time.sleep(0.1)
optimizer.step()
"""

LOADING = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
import torch
from torch.utils.data import DataLoader
from elasticd_steptimes import Loads
from elasticd_waits import Waits

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        time.sleep(0.02)
        return {"image": torch.ones(3), "label": index}

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
waits = Waits()
waits.follow(optimizer)
loads = Loads(waits)
loads.wrap()
loads.wrap()  # as at each step
for batch in DataLoader(Slow(), 4):
    time.sleep(0.1)
seen = [(loads.total_ns / 1e9, loads.samples)]
with torch.no_grad():
    for batch in DataLoader(Slow(), 4):
        pass
seen.append((loads.total_ns / 1e9, loads.samples))
print(json.dumps(seen))
"""


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "steps"
    os.mkfifo(path)
    return path


def heard(reader: int) -> list[tuple[int, ...]]:
    return list(struct.iter_unpack("=8Q", os.read(reader, 1 << 16)))


def test_a_worker_of_torchrun_sends_each_step_once(fifo: Path) -> None:
    (fifo.parent / "job.py").write_text(FAKE_TORCH)
    page = Page(fifo.parent / "3")
    reader = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    words = json.dumps([str(fifo.parent / "job.py"), "--log", "--"])
    env = {**os.environ, "RANK": "3", "ELASTICD_STEP_TIMES": str(fifo), "ELASTICD_MEASURED": words}
    argv = [sys.executable, os.path.join(BOOT_DIR, "elasticd_measured.py")]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    records = heard(reader)
    os.close(reader)
    page.close()
    assert [(rank, step) for rank, step, *_ in records] == [(3, step) for step in range(1, 102)]
    assert all(before[2] <= after[2] for before, after in pairwise(records)), "times do not go back"
    assert records[-1][2] - records[-2][2] > 0.1e9


def test_a_script_runs_on_when_no_process_reads_its_step_times(fifo: Path) -> None:
    (fifo.parent / "job.py").write_text(FAKE_TORCH)
    page = Page(fifo.parent / "0")
    words = json.dumps([str(fifo.parent / "job.py"), "--log", "--"])
    env = {**os.environ, "RANK": "0", "ELASTICD_STEP_TIMES": str(fifo), "ELASTICD_MEASURED": words}
    argv = [sys.executable, os.path.join(BOOT_DIR, "elasticd_measured.py")]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, page.contents().steps) == (0, "", 101)
    page.close()


def test_the_time_in_the_loader_is_measured_and_samples_of_an_evaluation_do_not_count(tmp_path: Path) -> None:
    done = forkserver.run(
        ["-c", LOADING, BOOT_DIR], env=os.environ, cwd=tmp_path, timeout_s=120, entry=forkserver.PROGRAM
    )
    assert done.returncode == 0, done.stderr
    (training_s, trained), (both_s, counted) = json.loads(done.stdout)
    assert 0.24 <= training_s < both_s and both_s - training_s >= 0.24
    assert (trained, counted) == (12, 12)
