"""A checkpoint of one world size and sharding is loaded at any other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "worlds.py"
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_what_any_world_saved_any_other_resumes_and_so_does_plain_dcp(tmp_path):
    world = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = world.communicate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(world.pid, signal.SIGKILL)
        world.wait()
    assert world.returncode == 0, said
    assert said.count("stage") == 3 + 2 + 3 + 1 + 3 + 2 + 3, said
