"""Where the processes of a node log, also those that are started one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std

from elasticd.daemon.config import CannotStart, LogOptions
from elasticd.daemon.logs import Destinations, logs_specs
from elasticd.procs.logdest import LogDest


@pytest.fixture
def destinations(tmp_path: Path) -> Destinations:
    return Destinations(DefaultLogsSpecs(log_dir=str(tmp_path), redirects={1: Std.OUT}))


def _reify(destinations: Destinations, round_number: int, *local_ranks: int) -> LogDest:
    return destinations.reify(round_number, {r: {"TORCHELASTIC_RUN_ID": "job"} for r in local_ranks})


def test_a_folder_that_no_run_can_keep_logs_in_is_refused_before_anything_starts() -> None:
    with pytest.raises(CannotStart, match="no logs can be kept in /proc: "):
        logs_specs(LogOptions(dir=Path("/proc")))


def test_a_process_started_alone_logs_as_its_own_local_rank(destinations: Destinations) -> None:
    dest = _reify(destinations, 3, 1)
    assert dest.stdouts[1].endswith("attempt_2/1/stdout.log")
    folder = Path(dest.capture_dirs[1])
    assert [f.name for f in folder.parent.iterdir()] == ["1"], "nobody else is started"


def test_processes_started_ahead_of_rounds_do_not_share_a_folder(destinations: Destinations) -> None:
    first, second = (Path(_reify(destinations, 0, 2).error_files[2]) for _ in range(2))
    assert first.parent.is_dir()
    assert second.parent.is_dir()
    assert first.parent != second.parent
    of_a_round = Path(_reify(destinations, 1, 0, 1, 2).error_files[2])
    assert of_a_round.parent.parent.name == "attempt_0"
    assert first.parent.is_dir()


def test_a_run_that_has_started_nothing_yet_has_its_folder_all_the_same(destinations: Destinations) -> None:
    assert destinations.run_folder() is None
    for _ in range(2):
        destinations.begin("job")
    folder = destinations.run_folder()
    assert folder is not None and folder.name.startswith("job_") and list(folder.iterdir()) == []
    first = Path(_reify(destinations, 1, 0).error_files[0])
    assert first.parents[2] == folder == destinations.run_folder()
    destinations.begin("job")
    assert first.parent.is_dir()


def test_a_process_is_told_of_its_own_error_file(destinations: Destinations) -> None:
    envs = {1: {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "5"}}
    dest = destinations.reify(2, envs)
    assert envs[1]["TORCHELASTIC_ERROR_FILE"] == dest.error_files[1]
    assert envs[1]["TORCHELASTIC_RESTART_COUNT"] == "5", "which is the worker's, and nothing to do with logs"
