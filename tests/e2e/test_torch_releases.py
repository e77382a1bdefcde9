"""The main paths on the oldest and on the newest release of torch that elasticd supports, each in a Python
environment of its own. The builds for Linux are made for CUDA, so several GB are fetched for each release."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from elasticd import torchparts

ROOT = Path(__file__).parents[2]
# the packages that the tests below import beside elasticd
TESTING = [
    "pytest", "pytest-timeout", "psutil", "hypothesis", "pyyaml", "cryptography", "prometheus-client", "pyte",
    "jsonschema",
]  # fmt: skip
TRAINING = "tests/e2e/test_training.py::test_training_goes_on_after"
IN_PLACE = "tests/e2e/test_in_place.py::test"
PATHS = [
    "tests/house/test_torch_parts.py",
    "tests/worker/test_world.py",
    "tests/checkpoint/test_groups.py",
    "tests/checkpoint/test_metadata.py",
    "tests/checkpoint/test_plain_dcp.py",
    "tests/e2e/test_checkpoints.py",
    f"{TRAINING}_a_worker_is_killed_and_only_its_death_is_charged",
    f"{IN_PLACE}_survivors_of_killed_workers_and_of_an_exception_keep_their_process_and_every_step",
    f"{IN_PLACE}_nodes_that_leave_join_or_are_lost_and_scaling_restart_no_worker_elsewhere",
]
DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


@pytest.mark.parametrize("path", PATHS)
def test_the_main_paths_exist(path: str) -> None:
    file, _, name = path.partition("::")
    assert f"def {name}" in (ROOT / file).read_text()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("release", [torchparts.CHECKED[0], torchparts.CHECKED[-1]])
def test_the_main_paths_work_on_this_release_of_torch(release: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    others = [d for d in DEPENDENCIES if not d.startswith("torch")]
    pip = [python, "-m", "pip", "install", "-q", "--no-cache-dir"]
    got = subprocess.run([*pip, f"torch=={release}"], capture_output=True, text=True)
    if got.returncode != 0:
        pytest.skip(f"torch {release} cannot be had here: {got.stderr.strip().splitlines()[-1:]}")
    subprocess.run([*pip, "setuptools", *others, *TESTING], check=True)
    subprocess.run([*pip, "--no-deps", ROOT], check=True)
    mine = re.compile("PET_|ELASTICD_|TORCH|PYTEST_|PYTHONPATH")
    ran = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", *PATHS],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not mine.match(name)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
