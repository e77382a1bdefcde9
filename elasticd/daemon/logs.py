"""The destinations of workers' output, as torch's LogsSpecs decides them."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from importlib import metadata
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import (
    DefaultLogsSpecs,
    LogsSpecs,
    Std,
)

from elasticd.daemon.config import CannotStart, LogOptions
from elasticd.data.auditnotes import FOLDER, VARIABLE
from elasticd.procs.logdest import LogDest
from elasticd.telemetry.runs import state_dir

RUNS_KEPT = 50
RECENT_S = 86_400.0


def logs_specs(options: LogOptions) -> LogsSpecs:
    """Return the user's LogsSpecs (entry point group ``torchrun.logs_specs``) or torch's own. Torch's layout
    is ``<dir>/<job>_<random>/attempt_<n>/<local rank>/``. Raise CannotStart for bad options."""
    made: type[LogsSpecs] = DefaultLogsSpecs
    if options.specs is not None:
        found = metadata.entry_points(group="torchrun.logs_specs", name=options.specs)
        if not found:
            raise CannotStart(
                f"no package installed here offers --logs-specs {options.specs}, an entry point of the group "
                "torchrun.logs_specs"
            )
        made = next(iter(found)).load()
    try:
        folder = options.dir or state_dir() / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        _try_out(folder)
        if options.dir is None:  # users clean up the folders that they chose
            forget_old_runs(folder)
    except OSError as error:
        raise CannotStart(f"no logs can be kept: {error}; name another folder with --log-dir") from error
    return made(
        log_dir=str(folder),
        redirects=Std.from_str(options.redirects),
        tee=Std.from_str(options.tee),
        local_ranks_filter=set(options.local_ranks) if options.local_ranks else None,
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

    def __init__(self, specs: LogsSpecs, *, audit: bool = False) -> None:
        """``audit``: the workers' environment names the folder of the audit."""
        self._specs = specs
        self._audit = audit
        self._standbys = 0
        self._begun = False
        self._latest: LogDest | None = None

    def begin(self, job: str) -> None:
        """Have torch make the run's folder before the first worker starts, so that earlier events can be
        written. Do nothing with the user's own LogsSpecs."""
        if self._begun or self._latest is not None or type(self._specs) is not DefaultLogsSpecs:
            return
        self._begun = True
        with contextlib.suppress(OSError):  # the start of a worker reports the error
            for worker in self.reify(1, {0: {"TORCHELASTIC_RUN_ID": job}}).capture_dirs.values():
                shutil.rmtree(Path(worker).parent)  # torch makes the folder again for the first round

    def run_folder(self) -> Path | None:
        """Return the folder of this run's logs. None before the first start, and if the user's LogsSpecs does
        not use torch's layout."""
        dirs = self._latest.capture_dirs.values() if self._latest is not None else ()
        return next((found for folder in dirs if (found := _run_folder(Path(folder)))), None)

    def reify(self, round_number: int, envs: dict[int, dict[str, str]]) -> LogDest:
        if round_number:
            attempt = str(round_number - 1)
        else:
            self._standbys += 1
            attempt = f"standby_{self._standbys}"
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
                if self._audit and (folder := _run_folder(Path(env["TORCHELASTIC_ERROR_FILE"]).parent)):
                    env[VARIABLE] = str(folder / FOLDER)
        for local_rank in asked.keys() - envs.keys():
            file = dest.error_files.get(local_rank)
            if file and file != os.devnull:
                with contextlib.suppress(OSError):  # the folder is not empty
                    os.rmdir(os.path.dirname(file))
        self._latest = LogDest(
            stdouts=dest.stdouts,
            stderrs=dest.stderrs,
            tee_stdouts=dest.tee_stdouts,
            tee_stderrs=dest.tee_stderrs,
            error_files=dest.error_files,
            filtered_stdout=getattr(dest, "filtered_stdout", ""),  # torch before 2.10 has no filters
            filtered_stderr=getattr(dest, "filtered_stderr", ""),
            capture_dirs={
                local_rank: os.path.dirname(file)
                for local_rank, file in dest.error_files.items()
                if file and file != os.devnull
            },
        )
        return self._latest


def _run_folder(worker: Path) -> Path | None:
    """Return the run's folder, which contains a worker's output folder; None if the layout is not torch's."""
    return worker.parents[1] if worker.parent.name.startswith("attempt_") else None
