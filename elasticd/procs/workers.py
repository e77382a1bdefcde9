"""The workers of one node: ``elasticd.core.ports.Procs`` on real processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Template

from elasticd.core.facts import Exit, SlotProgress
from elasticd.core.ports import Assignment
from elasticd.procs.errorfile import read_error_file, read_tail, tail_of
from elasticd.procs.keeper import Ended, Warden
from elasticd.procs.output import STDERR, STDOUT, Feed, Filtered, LogDest, Output
from elasticd.procs.page import BOOT_DIR, VARIABLE, Page, shared_memory_dir
from elasticd.procs.preload import Preload, Say

LINE_PREFIX = "[${role_name}${local_rank}]:"  # torchrun's
_LAST_OUTPUT_S = 0.1  # what a dead worker printed last arrives in microseconds, unless the console is stuck

Reify = Callable[[int, dict[int, dict[str, str]]], LogDest]


@dataclass(slots=True)
class _Worker:
    assignment: Assignment
    round: int
    exited: Callable[[int, Exit], None]
    dest: LogDest
    error_file: str
    feeds: tuple[Feed, ...] = ()
    pid: int = 0


class LocalProcs:
    """Runs workers through the warden; ``core.ports.Procs`` says how it behaves.

    ``command``: the argv of every worker, or what makes it for one. ``base_env``: their
    environment, before what each assignment adds. ``reify``: says where a round's workers print,
    given the round's number and their environments by local rank, which it may add to (torch's
    ``LogsSpecs.reify`` does). ``line_prefix``: for tee'd lines, with torchrun's macros.
    ``heartbeat``: whether Python workers report their steps. ``whole_group``: whether ``stop``
    signals the worker's process group (for programs that start Python themselves, such as shell
    scripts) or only the worker, whose children then keep working for it while it saves.
    ``zygote``: whether Python workers may be forked from a process that has imported what they
    import, once it is known what that is; ``command`` is then one of Python, and alike for all but
    for the arguments of the script. ``say``: is told of that process, as ``Preload`` has it.
    ``duplicate_*``: filters of torchrun's ``--duplicate-stdout-filters``. ``clock``: the one that
    ``fence`` is told the time by, which must not jump as the machine's may.
    """

    def __init__(
        self,
        warden: Warden,
        command: Sequence[str] | Callable[[Assignment], Sequence[str]],
        *,
        cwd: str | Path | None = None,
        base_env: Mapping[str, str] | None = None,
        reify: Reify = lambda _round, _envs: LogDest(),
        output: Output | None = None,
        role: str = "default",
        line_prefix: str | None = None,
        heartbeat: bool = True,
        whole_group: bool = False,
        zygote: bool = False,
        say: Say = lambda event, **fields: None,
        duplicate_stdout: Sequence[str] = (),
        duplicate_stderr: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._warden = warden
        self._clock = clock
        self._command = command
        self._cwd = str(cwd or os.getcwd())
        self._base_env = dict(os.environ if base_env is None else base_env)
        self._reify = reify
        self._output = output or Output()
        self._role = role
        self._line_prefix = Template(line_prefix or LINE_PREFIX)
        self._heartbeat = heartbeat
        self._whole_group = whole_group
        self._duplicates = {STDOUT: tuple(duplicate_stdout), STDERR: tuple(duplicate_stderr)}
        self._lock = threading.Lock()
        self._workers: dict[int, _Worker] = {}
        self._pages: dict[int, tuple[Assignment, Page]] = {}
        self.page_dir = shared_memory_dir()
        self._warden.remove_at_end(self.page_dir)
        self._preload = Preload(warden, self.page_dir, say) if zygote and heartbeat else None

    # ------------------------------------------------------------ the port

    def start(
        self, round_number: int, assignments: tuple[Assignment, ...], exited: Callable[[int, Exit], None]
    ) -> None:
        with self._lock:
            assert not self._workers, f"round {round_number} starts while workers of another run"
            self._drop_pages()
            envs = {a.local_rank: {**self._base_env, **a.env} for a in assignments}
            try:
                dest = self._reify(round_number, envs)
                filtered = self._open_filtered(dest)
                trouble = ""
            except OSError as error:
                dest, filtered, trouble = (LogDest(), {}, f"cannot make the log folder: {error}")
            for a in assignments:
                error_file = dest.error_files.get(a.local_rank, "")
                if error_file and error_file != os.devnull:
                    envs[a.local_rank].setdefault("TORCHELASTIC_ERROR_FILE", error_file)
                self._workers[a.slot] = _Worker(a, round_number, exited, dest, error_file)
            workers = list(self._workers.values())
        for worker in workers:
            try:
                if trouble:
                    raise OSError(trouble)
                self._launch(worker, envs[worker.assignment.local_rank], filtered)
            except OSError as error:
                end = Ended(0, 127, time.time(), f"cannot start a worker: {error}")
                self._warden.call_soon(partial(self._ended, worker, end))

    def listen(self, linked: Callable[[int], None], waiting: Callable[[int, int, int], None]) -> None:
        """No worker is linked yet."""

    def standby(self, assignments: tuple[Assignment, ...], exited: Callable[[int, Exit], None]) -> None:
        raise AssertionError("no worker is linked, so none is to wait")

    def part(self, planned: bool, signal: int, grace_s: float, part_s: float) -> None:
        self.stop(signal, grace_s)

    def stop(self, signal: int, grace_s: float, slots: tuple[int, ...] | None = None) -> None:
        self._warden.stop_workers(signal, grace_s)

    def fence(self, until: float | None) -> None:
        self._warden.fence(None if until is None else until - self._clock())

    def steps(self) -> Mapping[int, int]:
        with self._lock:
            return {slot: page.read().steps for slot, (_, page) in self._pages.items()}

    # ------------------------------------------------------------ beyond the port

    def progress(self) -> tuple[SlotProgress, ...]:
        """The heartbeats of this round's workers, in the order of their slots."""
        with self._lock:
            beats = {slot: (a.rank, page.read()) for slot, (a, page) in sorted(self._pages.items())}
            pids = {slot: worker.pid for slot, worker in self._workers.items()}
        return tuple(
            SlotProgress(slot, rank, pids.get(slot, beat.pid), beat.steps, beat.at)
            for slot, (rank, beat) in beats.items()
        )

    def close(self) -> None:
        """Forget the heartbeats and pass on the last output. The workers have ended by now."""
        with self._lock:
            self._drop_pages()
        if self._preload is not None:
            self._preload.close()
        self._output.close()
        shutil.rmtree(self.page_dir, ignore_errors=True)

    # ------------------------------------------------------------ a worker's beginning

    def _launch(self, worker: _Worker, env: dict[str, str], filtered: Mapping[int, Filtered]) -> None:
        a = worker.assignment
        mark = self._add_heartbeat(worker, env) if self._heartbeat else ""
        argv = self._command(a) if callable(self._command) else self._command
        prefix = self._line_prefix.safe_substitute(
            role_name=self._role, local_rank=a.local_rank, rank=a.rank
        ).encode()
        with contextlib.ExitStack() as undo:
            fds = [_duplicate_stdin()]
            undo.callback(_close_all, fds)
            feeds = []
            for stream in (STDOUT, STDERR):
                fd, feed = self._plug(worker, stream, prefix)
                fds.append(fd)
                if feed is not None:
                    feeds.append(feed)
                    undo.callback(feed.discard)
                    if stream in filtered and worker.dest.tee_of(stream, a.local_rank):
                        feed.filtered = filtered[stream].share()
            undo.pop_all()
        worker.feeds = tuple(feeds)
        if feeds:
            self._output.carry(feeds)
        self._warden.spawn_worker(
            argv,
            env=env,
            cwd=self._cwd,
            fds=fds,
            mark=mark,
            whole_group=self._whole_group,
            fork=self._preload is not None and self._preload.suits(argv, env, self._cwd),
            started=partial(setattr, worker, "pid"),
            ended=partial(self._ended, worker),
        )

    def _add_heartbeat(self, worker: _Worker, env: dict[str, str]) -> str:
        """Give it a page; returns the mark by which its descendants are known."""
        a = worker.assignment
        page = Page(self.page_dir / f"round{worker.round}-slot{a.slot}")
        with self._lock:
            self._pages[a.slot] = (a, page)
        env[VARIABLE] = str(page.path)
        # An empty PYTHONPATH means none; an empty entry would mean the working directory.
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (BOOT_DIR, env.get("PYTHONPATH"))))
        return f"{VARIABLE}={page.path}"

    def _plug(self, worker: _Worker, stream: int, prefix: bytes) -> tuple[int, Feed | None]:
        """What the worker gets for its stdout or stderr, and how it is passed on, if it is."""
        dest, local_rank = worker.dest, worker.assignment.local_rank
        path, tee = dest.file_of(stream, local_rank), dest.tee_of(stream, local_rank)
        if path and not tee:
            return _open_for_writing(path, os.O_TRUNC), None
        copies = []
        if tee:
            copies.append(_open_for_writing(tee, os.O_TRUNC))
        elif capture := dest.capture_of(stream, local_rank):
            Path(capture).parent.mkdir(parents=True, exist_ok=True)
            copies.append(_open_for_writing(capture, os.O_APPEND))
        return self._output.open(stream, prefix=prefix if tee else b"", copies=copies, terminal=not tee)

    def _open_filtered(self, dest: LogDest) -> dict[int, Filtered]:
        paths = {STDOUT: dest.filtered_stdout, STDERR: dest.filtered_stderr}
        tees = {STDOUT: dest.tee_stdouts, STDERR: dest.tee_stderrs}
        return {
            stream: Filtered(paths[stream], needles)
            for stream, needles in self._duplicates.items()
            if needles and paths[stream] and tees[stream]
        }

    # ------------------------------------------------------------ and its end

    def _ended(self, worker: _Worker, end: Ended) -> None:
        for feed in worker.feeds:
            feed.ended.wait(_LAST_OUTPUT_S)
        exit = self._judge(worker, end)
        with self._lock:
            self._workers.pop(worker.assignment.slot, None)
        worker.exited(worker.round, exit)

    def _judge(self, worker: _Worker, end: Ended) -> Exit:
        a = worker.assignment
        message, traceback = end.error, ""
        if end.fenced:
            message = "killed by its keeper: the agent had not said in time that it may run on"
        elif not message and end.code != 0:
            message, traceback = read_error_file(worker.error_file) or read_tail(self._stderr_tail(worker))
        return Exit(a.slot, a.rank, end.code, end.at, message, traceback, _log_place(worker), end.fenced)

    def _stderr_tail(self, worker: _Worker) -> bytes:
        for feed in worker.feeds:
            if feed.stream == STDERR:
                return feed.tail
        return tail_of(worker.dest.file_of(STDERR, worker.assignment.local_rank))

    def _drop_pages(self) -> None:
        for _, page in self._pages.values():
            page.close()
        self._pages.clear()


def _log_place(worker: _Worker) -> str:
    """The file with its stderr, or the folder if its stdout is kept there too."""
    dest, local_rank = worker.dest, worker.assignment.local_rank
    paths = [
        Path(path)
        for stream in (STDERR, STDOUT)
        if (path := dest.file_of(stream, local_rank) or dest.capture_of(stream, local_rank))
        and path != os.devnull
    ]
    if len(paths) == 2 and paths[0].parent == paths[1].parent:
        return str(paths[0].parent)
    return str(paths[0]) if paths else ""


def _open_for_writing(path: str, flags: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o644)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _duplicate_stdin() -> int:
    try:
        return os.dup(0)
    except OSError:  # the agent has none
        return os.open(os.devnull, os.O_RDONLY)
