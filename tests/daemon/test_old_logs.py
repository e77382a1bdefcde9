from __future__ import annotations

import os
import time
from pathlib import Path

from elasticd.daemon.logs import forget_old_runs
from elasticd.telemetry.events import TIMELINE


def make_run(folder: Path, at: float) -> Path:
    (folder / "attempt_0").mkdir(parents=True)
    (folder / TIMELINE).touch()
    for path in (folder / "attempt_0", folder / TIMELINE, folder):
        os.utime(path, (at, at))
    return folder


def test_only_the_newest_runs_keep_their_logs(tmp_path: Path) -> None:
    for age in range(5):
        make_run(tmp_path / f"run{age}", 1000 - age)
    forget_old_runs(tmp_path, keep=2)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["run0", "run1"]
    forget_old_runs(tmp_path, keep=2)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_run_that_goes_on_keeps_its_logs_however_many_have_begun_since(tmp_path: Path) -> None:
    now = time.time()
    goes_on = make_run(tmp_path / "long", now - 1_000_000)
    os.utime(goes_on / TIMELINE, (now - 3600, now - 3600))  # the folder itself is unchanged
    make_run(tmp_path / "over", now - 1_000_000)
    for n in range(3):
        make_run(tmp_path / f"later{n}", now - n)
    forget_old_runs(tmp_path, keep=1)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["later0", "later1", "later2", "long"]
