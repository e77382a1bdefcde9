"""The log files of a node's processes, also of processes that are started one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std

from elasticd.daemon.config import CannotStart, LogOptions
from elasticd.daemon.logs import Destinations, TorchLayout, layout
from elasticd.procs.logdest import LogDest


@pytest.fixture
def destinations(tmp_path: Path) -> Destinations:
    return Destinations(TorchLayout(tmp_path, LogOptions(redirects="1:1")))


def _reify(destinations: Destinations, round_number: int, *local_ranks: int) -> LogDest:
    return destinations.reify(round_number, {r: {"TORCHELASTIC_RUN_ID": "job"} for r in local_ranks})


def test_a_folder_that_no_run_can_keep_logs_in_is_refused_before_anything_starts() -> None:
    with pytest.raises(CannotStart, match="no logs can be kept in /proc: "):
        layout(LogOptions(dir=Path("/proc")))


@pytest.mark.parametrize("shown", [None, frozenset({0}), frozenset({1, 2})], ids=str)
@pytest.mark.parametrize("tee", ["0", "3", "1:2,0:1"])
@pytest.mark.parametrize("redirects", ["0", "1", "2", "3", "0:3,1:0,2:1"])
def test_the_layout_is_torchs(tmp_path: Path, redirects: str, tee: str, shown: frozenset[int] | None) -> None:
    """The agent does not import torch, so it makes the folders of torch's DefaultLogsSpecs itself."""

    def envs() -> dict[int, dict[str, str]]:
        return {rank: {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "4"} for rank in range(3)}

    def below(folder: Path, files: Mapping[int, str] | str) -> object:
        """Return the same paths for both, whatever the random part of the run's folder."""
        (run,) = folder.iterdir()
        if isinstance(files, str):
            return files.replace(str(run), "RUN")
        return {rank: file.replace(str(run), "RUN") for rank, file in files.items()}

    theirs_in, ours_in, their_envs, our_envs = tmp_path / "theirs", tmp_path / "ours", envs(), envs()
    ours_in.mkdir()
    specs = DefaultLogsSpecs(
        str(theirs_in), Std.from_str(redirects), Std.from_str(tee), set(shown) if shown else None
    )
    theirs = specs.reify(their_envs)
    ours = TorchLayout(ours_in, LogOptions(redirects=redirects, tee=tee, local_ranks=shown)).reify(
        "4", our_envs
    )
    for field in dataclasses.fields(theirs):
        assert below(ours_in, getattr(ours, field.name)) == below(theirs_in, getattr(theirs, field.name))
    for rank in range(3):
        assert below(ours_in, our_envs[rank]["TORCHELASTIC_ERROR_FILE"]) == below(
            theirs_in, their_envs[rank]["TORCHELASTIC_ERROR_FILE"]
        )
    assert sorted(p.relative_to(*ours_in.iterdir()) for p in ours_in.glob("*/**/*")) == sorted(
        p.relative_to(*theirs_in.iterdir()) for p in theirs_in.glob("*/**/*")
    )


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


def test_a_process_gets_its_own_error_file(destinations: Destinations) -> None:
    envs = {1: {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "5"}}
    dest = destinations.reify(2, envs)
    assert envs[1]["TORCHELASTIC_ERROR_FILE"] == dest.error_files[1]
    assert envs[1]["TORCHELASTIC_RESTART_COUNT"] == "5", "which is the worker's, and nothing to do with logs"
