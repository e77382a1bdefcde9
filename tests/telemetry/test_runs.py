"""Where runs are found, and what happens to the links to deleted runs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from elasticd.telemetry import runs


def test_without_a_home_that_can_be_written_the_place_is_a_temporary_one_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = runs.state_dir()
    assert place.parent == tmp_path
    assert place.stat().st_mode & 0o777 == 0o700
    assert runs.state_dir() == place


def test_a_temporary_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"elasticd-state-{os.getuid()}").symlink_to(tmp_path / "theirs")
    with pytest.raises(PermissionError, match="is not yours; set XDG_STATE_HOME"):
        runs.state_dir()


def test_jobs_of_which_nothing_is_left_are_forgotten(tmp_path: Path) -> None:
    logs = [tmp_path / name for name in ("gone", "kept", "new")]
    for folder in logs[:2]:
        folder.mkdir()
        runs.note(tmp_path, f"job {folder.name}", "a", 1.0, folder)
    logs[0].rmdir()
    logs[2].mkdir()
    runs.note(tmp_path, "job new", "a", 2.0, logs[2])
    assert set(runs.jobs(tmp_path)) == {"job kept", "job new"}
    assert [run.folder for run in runs.of_job(tmp_path, "job kept")] == [logs[1]]
