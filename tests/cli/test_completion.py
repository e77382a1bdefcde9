"""The completion of the shell, installed as docs/install.md says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = (Path(__file__).parents[2] / "docs" / "install.md").read_text()
SHELLS = re.findall(r"^_ELASTICD_COMPLETE=(\w+)_source elasticd > ", GUIDE, re.MULTILINE)


def printed(instruction: str, **env: str) -> str:
    argv = [str(Path(sys.executable).with_name("elasticd"))]
    environ = {**os.environ, "_ELASTICD_COMPLETE": instruction, **env}
    return subprocess.run(argv, env=environ, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_gets_a_script_that_asks_elasticd(shell: str) -> None:
    assert f"_ELASTICD_COMPLETE={shell}_complete" in printed(f"{shell}_source")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("elasticd sta", ["status"]),
        ("elasticd run --checkpoint-r", ["--checkpoint-rate"]),
        ("elasticd export graf", ["grafana"]),
    ],
)
def test_bash_offers_commands_options_and_values(words: str, offered: list[str], tmp_path: Path) -> None:
    (tmp_path / "completion").write_text(printed("bash_source"))
    script = (
        f"source {tmp_path}/completion; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1));"
        ' $(complete -p elasticd | grep -o "_\\w*") elasticd; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == offered, done.stderr
