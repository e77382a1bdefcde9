"""Saved at one world size and sharding, loaded at any other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "worlds.py"
ROOT = Path(__file__).parents[2]


def test_what_any_world_saved_any_other_resumes_and_so_does_plain_dcp(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        said = [rank.communicate(timeout=110)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0, 0], "\n".join(said)
    assert said[0].count("stage") == 7
