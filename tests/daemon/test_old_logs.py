from __future__ import annotations

import os
from pathlib import Path

from elasticd.daemon.logs import forget_old_runs


def test_only_the_newest_runs_keep_their_logs(tmp_path: Path) -> None:
    for age in range(5):
        run = tmp_path / f"run{age}"
        (run / "attempt_0").mkdir(parents=True)
        os.utime(run, (1000 - age, 1000 - age))
    forget_old_runs(tmp_path, keep=2)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["run0", "run1"]
    forget_old_runs(tmp_path, keep=2)
    assert len(list(tmp_path.iterdir())) == 2
