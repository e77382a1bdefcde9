"""``elasticd export`` writes what comes with elasticd, from a checkout and from a wheel; ``demo`` trains."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from elasticd.cli.main import _exit_code

ROOT = Path(__file__).parents[2]
WRITTEN = {
    "workers": "train_gpt.py",
    "k8s": "base/kustomization.yaml",
    "grafana": "dashboards",
    "prometheus": "rules.yml",
    "systemd": "elasticd@.service",
    "slurm": "train.sbatch",
}


@pytest.mark.parametrize("what", WRITTEN)
def test_files_are_written_to_a_new_folder_without_what_makes_them(what: str, tmp_path: Path) -> None:
    assert _exit_code(["export", what, str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / WRITTEN[what]).exists()
    assert not {file.name for file in (tmp_path / "new").rglob("*.py")} & {"boards.py", "generate.py"}


def test_alerts_lead_to_the_documentation_that_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(["export", "prometheus", str(tmp_path / "new"), "--docs", "https://docs.corp/e/"]) == 0
    for name in ("rules.yml", "prometheus-rule.yaml"):
        text = (tmp_path / "new" / name).read_text()
        assert "runbook_url: https://docs.corp/e/docs/runbooks.html#elasticdstalled" in text
        assert "example.org" not in text
    assert capfd.readouterr().err == ""
    assert _exit_code(["export", "prometheus", str(tmp_path / "unnamed")]) == 0
    assert "leads nowhere: give --docs URL" in capfd.readouterr().err
    for argv in (["prometheus", "a", "--docs", "docs.corp"], ["slurm", "a", "--docs", "https://docs.corp"]):
        assert _exit_code(["export", *argv]) == 2


def test_no_file_is_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (mine := tmp_path / "train_gpt.py").write_text("mine")
    assert _exit_code(["export", "workers", str(tmp_path)]) == 2
    assert "exists: give a folder that does not" in capfd.readouterr().err
    assert mine.read_text() == "mine"


@pytest.mark.slow
def test_the_demonstration_trains(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "elasticd", "demo", "--max", "1", "--", "--steps", "2"]
    done = subprocess.run(
        argv,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Running: elasticd run --min 1 --max 1" in done.stderr
    assert "held-out loss" in done.stdout


@pytest.mark.slow
def test_a_wheel_has_the_files_too(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path)]
    subprocess.run([*argv, str(ROOT)], check=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "__pycache__" in name]
        archive.extractall(tmp_path / "installed")
    for what, file in WRITTEN.items():
        subprocess.run(
            [sys.executable, "-m", "elasticd", "export", what, str(tmp_path / what)],
            env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
            cwd=tmp_path,
            check=True,
        )
        assert (tmp_path / what / file).exists()
