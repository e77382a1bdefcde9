"""The benchmark of connecting workers prints figures. If a worker fails, it ends at once, and says how."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, signal
from tests.bench import connecting

def join(rank, size, port):
    if rank == 1:
        {fault}
    return connecting._join_elasticds(rank, size, port)

connecting.KINDS = {{"elasticd": (join, connecting._serve_elasticds)}}
print(*connecting.connecting([3], 1))
"""


def said_by(fault: str = "pass") -> str:
    """Return what the benchmark of three workers prints if worker 1 has a fault."""
    command = [sys.executable, "-c", PROGRAM.format(fault=fault)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def test_the_bench_prints_figures() -> None:
    figures = r"connected \d+\.\d\d s, first sum \d+\.\d\d s.* a sum after a death \d+\.\d\d s"
    said = said_by()
    assert re.search(rf"3 workers, elasticd +: {figures}", said), said


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise OSError('no route')", "RuntimeError: worker 1 failed: OSError('no route')"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "RuntimeError: worker 1 was ended by SIGKILL"),
        ("os._exit(7)", "RuntimeError: worker 1 ended with exit code 7"),
    ],
)
def test_a_worker_that_fails_ends_the_bench_at_once_with_its_error(fault: str, words: str) -> None:
    assert words in said_by(fault)
