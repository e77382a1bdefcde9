"""The command that builds a release and tries it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticd import __version__

ROOT = Path(__file__).parents[2]
RELEASE = ROOT / "tests" / "release"


def test_no_release_is_replaced(tmp_path: Path) -> None:
    done = subprocess.run(["bash", RELEASE, tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == f"tests/release: {tmp_path} exists: remove it, or name another folder\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_release_is_built_and_works_where_nothing_else_is_installed(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    environ = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(["bash", RELEASE, dist], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held-out loss" in done.stdout
    built = {f"elasticd-{__version__}.tar.gz", f"elasticd-{__version__}-py3-none-any.whl", "docs"}
    assert {path.name for path in dist.iterdir()} == built
    assert all(name in done.stdout for name in built)
    assert (dist / "docs" / "docs" / "install.html").exists()
