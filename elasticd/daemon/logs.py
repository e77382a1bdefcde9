"""The destinations of workers' output: the folders of torch's DefaultLogsSpecs, or the user's LogsSpecs.

The agent imports no torch, so the default layout is made here. A test compares it with torch's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from elasticd.daemon.config import CannotStart, LogOptions
from elasticd.data import auditnotes, debugrecords
from elasticd.procs.logdest import LogDest
from elasticd.telemetry.runs import state_dir

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import LogsSpecs

RUNS_KEPT = 50
RECENT_S = 86_400.0
_OUT, _ERR = 1, 2  # torchrun's notation of --redirects and --tee; 3: both


class LogLayout(Protocol):
    """Where workers print. ``begin`` makes the run's folder, if the layout has one. ``reify`` takes the
    attempt and the environments by local rank, makes the folders, and adds TORCHELASTIC_ERROR_FILE to each
    environment. Both raise OSError."""

    def begin(self, run_id: str) -> Path | None: ...

    def reify(self, attempt: str, envs: dict[int, dict[str, str]]) -> LogDest: ...


def layout(options: LogOptions) -> LogLayout:
    """Return the user's layout (entry point group ``torchrun.logs_specs``) or torch's default. Raise
    CannotStart for bad options."""
    try:
        folder = options.dir or state_dir() / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        _try_out(folder)
        if options.dir is None:  # users clean up the folders that they chose
            forget_old_runs(folder)
    except OSError as error:
        raise CannotStart(f"no logs can be kept: {error}; name another folder with --log-dir") from error
    return TorchLayout(folder, options) if options.specs is None else UserLayout(folder, options)


class TorchLayout:
    """``<folder>/<run id>_<random>/attempt_<n>/<local rank>/``, with ``stdout.log``, ``stderr.log`` and
    ``error.json``."""

    def __init__(self, folder: Path, options: LogOptions) -> None:
        self._folder = folder
        self._options = options
        self._run: Path | None = None

    def begin(self, run_id: str) -> Path:
        if self._run is None:
            self._run = Path(tempfile.mkdtemp(prefix=f"{run_id}_", dir=self._folder))
        return self._run

    def reify(self, attempt: str, envs: dict[int, dict[str, str]]) -> LogDest:
        run_id = next(iter(envs.values())).get("TORCHELASTIC_RUN_ID", "run")
        folder = self.begin(run_id) / f"attempt_{attempt}"
        shutil.rmtree(folder, ignore_errors=True)
        files: dict[int, dict[int, str]] = {_OUT: {}, _ERR: {}}
        tees: dict[int, dict[int, str]] = {_OUT: {}, _ERR: {}}
        error_files: dict[int, str] = {}
        for local_rank, env in envs.items():
            own = folder / str(local_rank)
            own.mkdir(parents=True)
            tee = _streams(self._options.tee, local_rank)
            to_file = _streams(self._options.redirects, local_rank) | tee
            shown = not self._options.local_ranks or local_rank in self._options.local_ranks
            for stream, name in ((_OUT, "stdout.log"), (_ERR, "stderr.log")):
                elsewhere = "" if shown else os.devnull
                files[stream][local_rank] = str(own / name) if to_file & stream else elsewhere
                if tee & stream and shown:
                    tees[stream][local_rank] = str(own / name)
            error_files[local_rank] = env["TORCHELASTIC_ERROR_FILE"] = str(own / "error.json")
        return LogDest(
            stdouts=files[_OUT],
            stderrs=files[_ERR],
            tee_stdouts=tees[_OUT],
            tee_stderrs=tees[_ERR],
            error_files=error_files,
            filtered_stdout=str(folder / "filtered_stdout.log"),
            filtered_stderr=str(folder / "filtered_stderr.log"),
        )


def _streams(text: str, local_rank: int) -> int:
    """Return which streams torchrun's notation names for this rank: "3", or "0:3,1:2"."""
    if ":" not in text:
        return int(text)
    by_rank = dict(part.split(":") for part in text.split(","))
    return int(by_rank.get(str(local_rank), 0))


class UserLayout:
    """The LogsSpecs that a package installed here offers to torchrun."""

    def __init__(self, folder: Path, options: LogOptions) -> None:
        found = metadata.entry_points(group="torchrun.logs_specs", name=options.specs or "")
        if not found:
            raise CannotStart(
                f"no package installed here offers --logs-specs {options.specs}, an entry point of the group "
                "torchrun.logs_specs"
            )
        from torch.distributed.elastic.multiprocessing.api import Std

        self._specs: LogsSpecs = next(iter(found)).load()(
            log_dir=str(folder),
            redirects=Std.from_str(options.redirects),
            tee=Std.from_str(options.tee),
            local_ranks_filter=set(options.local_ranks) if options.local_ranks else None,
        )

    def begin(self, run_id: str) -> None:
        pass

    def reify(self, attempt: str, envs: dict[int, dict[str, str]]) -> LogDest:
        # LogsSpecs expects the environments of all local ranks, so the missing ones are copies.
        some = next(iter(envs.values()))
        asked = {
            local_rank: {**envs.get(local_rank, some), "TORCHELASTIC_RESTART_COUNT": attempt}
            for local_rank in range(max(envs) + 1)
        }
        dest = self._specs.reify(asked)
        for local_rank, env in envs.items():
            if "TORCHELASTIC_ERROR_FILE" in asked[local_rank]:
                env["TORCHELASTIC_ERROR_FILE"] = asked[local_rank]["TORCHELASTIC_ERROR_FILE"]
        for local_rank in asked.keys() - envs.keys():
            file = dest.error_files.get(local_rank)
            if file and file != os.devnull:
                with contextlib.suppress(OSError):  # the folder is not empty
                    os.rmdir(os.path.dirname(file))
        return LogDest(
            stdouts=dest.stdouts,
            stderrs=dest.stderrs,
            tee_stdouts=dest.tee_stdouts,
            tee_stderrs=dest.tee_stderrs,
            error_files=dest.error_files,
            filtered_stdout=getattr(dest, "filtered_stdout", ""),  # torch before 2.10 has no filters
            filtered_stderr=getattr(dest, "filtered_stderr", ""),
        )


def _try_out(folder: Path) -> None:
    """Raise CannotStart if no folder can be made there."""
    try:
        os.rmdir(tempfile.mkdtemp(dir=folder, prefix="."))
    except OSError as error:
        raise CannotStart(
            f"no logs can be kept in {folder}: {error.strerror}; name another folder with --log-dir"
        ) from error


def forget_old_runs(folder: Path, keep: int = RUNS_KEPT, recent_s: float = RECENT_S) -> None:
    """Remove the logs of all runs but the newest ``keep``. Runs that wrote within ``recent_s`` stay, since
    they may go on, also on other machines that share the folder."""
    written = {run: _last_written(run) for run in folder.iterdir() if run.is_dir()}
    newest_first = sorted(written, key=lambda run: -written[run])
    for old in newest_first[keep:]:
        if written[old] < time.time() - recent_s:
            shutil.rmtree(old, ignore_errors=True)


def _last_written(run: Path) -> float:
    """Return the time of the last write to the run's folder, in seconds since the epoch. A live run writes
    its timeline regularly."""
    times = [0.0]
    for path in (run, *run.glob("*")):
        with contextlib.suppress(OSError):  # another agent may have removed the file
            times.append(path.stat().st_mtime)
    return max(times)


class Destinations:
    """Makes the output destinations of a round's workers. Torch's "attempt" is a round, counted from 0. Each
    start of standbys (round 0) has its own "attempt"."""

    def __init__(self, layout: LogLayout, *, audit: bool = False, debug: bool = False) -> None:
        """``audit``, ``debug``: the workers' environment names the folder of the audit, and that of the
        records of ``--debug``."""
        self._layout = layout
        self._audit, self._debug = audit, debug
        self._standbys = 0
        self._folder: Path | None = None

    def begin(self, job: str) -> None:
        """Make the run's folder before the first worker starts, so that earlier events can be written. Do
        nothing with the user's own LogsSpecs."""
        if self._folder is None:
            with contextlib.suppress(OSError):  # the start of a worker reports the error
                self._folder = self._layout.begin(job)

    def run_folder(self) -> Path | None:
        """Return the folder of this run's logs. None before ``begin`` or the first start, and if the user's
        LogsSpecs does not use torch's layout."""
        return self._folder

    def reify(self, round_number: int, envs: dict[int, dict[str, str]]) -> LogDest:
        if round_number:
            attempt = str(round_number - 1)
        else:
            self._standbys += 1
            attempt = f"standby_{self._standbys}"
        dest = self._layout.reify(attempt, envs)
        folders = {
            local_rank: os.path.dirname(file)
            for local_rank, file in dest.error_files.items()
            if file and file != os.devnull
        }
        self._folder = next(filter(None, map(_run_folder, folders.values())), None)
        for env in envs.values():
            file = env.get("TORCHELASTIC_ERROR_FILE", "")
            run = _run_folder(os.path.dirname(file))
            if self._audit and run:
                env[auditnotes.VARIABLE] = str(run / auditnotes.FOLDER)
            if self._debug and run:
                _add_debug_folder(env, run / debugrecords.FOLDER)
        return replace(dest, capture_dirs=folders)


def _add_debug_folder(env: dict[str, str], folder: Path) -> None:
    """Name the folder for the records of ``--debug``, also to torch, which writes NCCL's flight recorder."""
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
    env[debugrecords.VARIABLE] = str(folder)
    env.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / "nccl_trace_rank_"))


def _run_folder(worker: str) -> Path | None:
    """Return the run's folder, which contains a worker's output folder; None if the layout is not torch's."""
    attempt = Path(worker).parent
    return attempt.parent if attempt.name.startswith("attempt_") else None
