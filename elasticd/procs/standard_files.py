"""The standard files of workers: standard input, and the destinations of their output."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from elasticd.channel.framing import close_all
from elasticd.core.ports import Assignment
from elasticd.procs.logdest import STDERR, STDOUT, LogDest, Reify, trouble_with
from elasticd.procs.output import Feed, Filtered, Output
from elasticd.procs.preload import LogFunction
from elasticd.procs.worker_process import Worker

LINE_PREFIX = "[${role_name}${local_rank}]:"  # the default of torchrun


@dataclass(frozen=True, slots=True)
class OutputFiles:
    """The files to which workers that start together print. ``filtered``: the file for the lines that match
    a filter, by stream."""

    dest: LogDest = field(default_factory=LogDest)
    filtered: Mapping[int, Filtered] = field(default_factory=dict)


class StandardFiles:
    """Connects the standard files of a node's workers; ``LocalProcs`` explains the arguments.
    ``duplicates``: filters, by stream.

    If a log file cannot be written, the output goes to the console and ``warn`` is called: no training fails
    because of its logs.
    """

    def __init__(
        self,
        reify: Reify,
        output: Output,
        role: str,
        line_prefix: str | None,
        duplicates: Mapping[int, Sequence[str]],
        warn: LogFunction,
    ) -> None:
        self._reify = reify
        self._output = output
        self._role = role
        self._line_prefix = Template(line_prefix or LINE_PREFIX)
        self._duplicates = duplicates
        self._warn = warn

    def output_files(self, round_number: int, envs: dict[int, dict[str, str]]) -> OutputFiles:
        """Return the output files of a round's workers. ``envs``: the workers' environments, by local rank. A
        layout of logs (torch's LogsSpecs) may add variables to the environments."""
        try:
            dest = self._reify(round_number, envs)
            return OutputFiles(dest, self._open_filtered(dest))
        except OSError as error:
            self._not_kept(error)
            return OutputFiles()

    def connect(self, worker: Worker, output_files: OutputFiles) -> list[int]:
        """Return the worker's first three files, which the caller owns, and start to pass on its output.
        Raises OSError if no more files can be opened."""
        feeds: list[Feed] = []
        with contextlib.ExitStack() as undo:
            fds = [_duplicate_stdin()]
            undo.callback(close_all, fds)
            for stream in (STDOUT, STDERR):
                fd, feed = self._plug(worker, stream)
                fds.append(fd)
                if feed is not None:
                    feeds.append(feed)
                    undo.callback(feed.discard)
                    if worker.dest.tee_of(stream, worker.log_rank):
                        feed.filtered = output_files.filtered.get(stream)
            undo.pop_all()
        worker.feeds = tuple(feeds)
        if feeds:
            self._output.carry(feeds)
        return fds

    def relabel(self, worker: Worker) -> None:
        """Update the prefix of the worker's lines after a change of its rank."""
        for feed in worker.feeds:
            if feed.console_stream.prefix:
                feed.console_stream.prefix = self._prefix(worker.assignment)

    def drain(self, worker: Worker, timeout_s: float) -> None:
        """Wait until all output of the worker is passed on."""
        self._output.drain(worker.feeds, timeout_s)

    def close(self) -> None:
        """Pass on the last output."""
        self._output.close()

    def _plug(self, worker: Worker, stream: int) -> tuple[int, Feed | None]:
        """Return the descriptor that the worker gets as stdout or stderr, and the ``Feed`` that passes on
        what the worker writes; None if the output goes to a file only."""
        dest, local_rank = worker.dest, worker.log_rank
        path, tee = dest.file_of(stream, local_rank), dest.tee_of(stream, local_rank)
        copies = []
        try:
            if path and not tee:
                if why := trouble_with(path):  # the worker would fail at its first print
                    raise OSError(why)
                return _open_for_writing(path, os.O_TRUNC), None
            if tee:
                copies.append(_open_for_writing(tee, os.O_TRUNC))
            elif capture := dest.capture_of(stream, local_rank):
                Path(capture).parent.mkdir(parents=True, exist_ok=True)
                copies.append(_open_for_writing(capture, os.O_APPEND))
        except OSError as error:
            worker.dest = dest.without_files()
            self._not_kept(error, slot=worker.assignment.slot, rank=worker.assignment.rank)
        prefix = self._prefix(worker.assignment) if tee else b""
        return self._output.open(stream, prefix=prefix, copies=copies, terminal=not tee)

    def _open_filtered(self, dest: LogDest) -> dict[int, Filtered]:
        paths = {STDOUT: dest.filtered_stdout, STDERR: dest.filtered_stderr}
        tees = {STDOUT: dest.tee_stdouts, STDERR: dest.tee_stderrs}
        return {
            stream: Filtered(paths[stream], needles)
            for stream, needles in self._duplicates.items()
            if needles and paths[stream] and tees[stream]
        }

    def _not_kept(self, error: OSError, **whose: int) -> None:
        why = f"{error.filename} cannot be written: {error.strerror}" if error.filename else str(error)
        self._warn("log.not_kept", why=why, note="the output goes to the console only", **whose)

    def _prefix(self, a: Assignment) -> bytes:
        macros = {"role_name": self._role, "local_rank": a.local_rank, "rank": a.rank}
        return self._line_prefix.safe_substitute(macros).encode()


def _open_for_writing(path: str, flags: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o644)


def _duplicate_stdin() -> int:
    try:
        return os.dup(0)
    except OSError:  # the agent has no stdin
        return os.open(os.devnull, os.O_RDONLY)
