"""The options for logs and signals, read as torchrun reads them."""

from __future__ import annotations

import re
import signal
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from elasticd.cli.command_error import CommandError
from elasticd.cli.options import RunOptions, flag
from elasticd.daemon.config import LogOptions

_STREAMS = re.compile(r"[0-3]|(\d:[0-3],)*\d:[0-3]")  # torch's own pattern: ten ranks at most


def logs(options: RunOptions, environ: Mapping[str, str]) -> LogOptions:
    """Return where the workers' output goes. Raises CommandError."""
    for name in ("redirects", "tee"):
        value = getattr(options, name)
        if value is not None and not _STREAMS.fullmatch(value):
            raise CommandError(
                f"{flag(name)} {value!r} is neither 0, 1, 2 or 3 nor of the form RANK:0-3,RANK:0-3."
            )
    if options.log_dir is not None:
        _check_writable(options.log_dir)
    if options.logs_specs is not None:
        known = sorted(e.name for e in metadata.entry_points(group="torchrun.logs_specs"))
        if options.logs_specs not in known:
            have = f"those installed are {', '.join(known)}" if known else "none is installed"
            raise CommandError(
                f"--logs-specs {options.logs_specs} names no entry point of torchrun.logs_specs: {have}."
            )
    return LogOptions(
        dir=options.log_dir,
        redirects=options.redirects or "0",
        tee=options.tee or "0",
        local_ranks=_ranks(options.local_ranks_filter),
        line_prefix=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        specs=options.logs_specs,
        duplicate_stdout=_commas(options.duplicate_stdout_filters),
        duplicate_stderr=_commas(options.duplicate_stderr_filters),
    )


def _check_writable(folder: Path) -> None:
    """Check by writing a temporary folder: permissions alone are not enough (root, read-only mounts)."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".elasticd-", dir=existing):
            pass
    except OSError as error:
        raise CommandError(f"--log-dir {folder} cannot be written to: {error.strerror}.") from error


def _ranks(text: str | None) -> frozenset[int] | None:
    if not text:
        return None
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*(,\s*[0-9]{1,9}\s*)*", text):
        raise CommandError(f"--local-ranks-filter {text!r} is not a list of numbers such as 0,1,2.")
    return frozenset(int(part) for part in text.split(","))


def _commas(text: str | None) -> tuple[str, ...]:
    """Split a list as torchrun does: a comma separates, and two commas stand for one."""
    if text is None:
        return ()
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(","))


def signals(text: str) -> tuple[str, ...]:
    """Return the names of the signals to handle, without duplicates. Raises CommandError."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in signal.Signals.__members__:
            raise CommandError(f"--signals-to-handle: there is no signal named {name}.")
        if name in ("SIGKILL", "SIGSTOP"):
            raise CommandError(f"--signals-to-handle: no process can handle {name}.")
    if not names:
        raise CommandError("--signals-to-handle names no signal.")
    return names
