"""The workers of one node: ``elasticd.core.ports.Procs`` with real processes."""

from __future__ import annotations

import os
import shutil
import signal as signals
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from elasticd.channel import worker_messages as wire
from elasticd.channel.warden_messages import Ended
from elasticd.core.facts import Exit, SlotProgress
from elasticd.core.lifecycle import Life, become
from elasticd.core.page_layout import PageContents
from elasticd.core.ports import (
    Assignment,
    WorkerBroke,
    WorkerCheckpointed,
    WorkerGone,
    WorkerLingers,
    WorkerLinked,
    WorkerNews,
    WorkerReturned,
    WorkerWaiting,
)
from elasticd.procs.logdest import STDERR, STDOUT, LogDest, Reify
from elasticd.procs.output import Output
from elasticd.procs.page import BOOT_DIR, VARIABLE, Page, shared_memory_dir
from elasticd.procs.preload import LogFunction, Preload
from elasticd.procs.standard_files import OutputFiles, StandardFiles
from elasticd.procs.warden_client import Warden
from elasticd.procs.worker_links import LinkListener
from elasticd.procs.worker_process import Worker

_LAST_OUTPUT_S = 0.1  # the last output of a dead worker arrives in microseconds, unless the console is stuck


@dataclass(frozen=True, slots=True)
class Watched:
    """A worker of the present round that has a page. ``steps_before``: see ``Worker``."""

    slot: int
    rank: int
    pid: int
    page: Page
    steps_before: int


class LocalProcs:
    """Runs workers through the warden; ``core.ports.Procs`` defines the behaviour.

    ``command``: the argv of every worker, or a function that returns it. ``base_env``: the environment that
    each assignment adds to. ``reify``: returns the output files of a round's workers, given the round's
    number and the environments by local rank. It may add variables, as torch's ``LogsSpecs.reify`` does.
    ``line_prefix``: for tee'd lines, with torchrun's macros. ``heartbeat``: whether Python workers report
    their steps; only such workers can keep their process from round to round. ``whole_group``: whether
    ``stop`` signals the worker's process group (for a command that starts Python itself, such as a shell
    script) or only the worker, so that its children can still work while it saves.

    ``zygote``: whether Python workers may be forked from a process that has imported the workers' modules.
    ``command`` must then run Python, and may differ between workers only in the script's arguments.
    ``imports``: the imports before the first worker starts (see ``Preload``). ``say`` gets the events of the
    zygote (see ``Preload``), and ``worker.entered``, ``worker.done``, ``worker.broken`` and
    ``worker.unlinked``. ``warn`` gets ``worker.crashed_at_exit``, for a worker that crashes or hangs after
    its script finished, and ``log.not_kept``. ``duplicate_*``: the filters of torchrun's
    ``--duplicate-stdout-filters``.
    ``clock``: the clock of ``fence`` and ``step_times``; it must not jump as the system clock may.
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
        imports: tuple[str, ...] = (),
        say: LogFunction = lambda event, **fields: None,
        warn: LogFunction = lambda event, **fields: None,
        duplicate_stdout: Sequence[str] = (),
        duplicate_stderr: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._warden = warden
        self._clock = clock
        self._command = command
        self._cwd = str(cwd or os.getcwd())
        self._base_env = dict(os.environ if base_env is None else base_env)
        duplicates = {STDOUT: tuple(duplicate_stdout), STDERR: tuple(duplicate_stderr)}
        self._standard_files = StandardFiles(reify, output or Output(), role, line_prefix, duplicates, warn)
        self._heartbeat = heartbeat
        self._whole_group = whole_group
        self._say = say
        self._warn = warn
        self._news: Callable[[WorkerNews], None] = lambda news: None
        self._lock = threading.Lock()
        self._round = 0
        self._workers: dict[int, Worker] = {}  # by slot: the latest worker, running or ended
        self._started = 0
        self._error_files: dict[int, str] = {}
        self.page_dir = shared_memory_dir()
        self._warden.remove_at_end(self.page_dir)
        self._links = LinkListener(warden) if heartbeat else None
        self._preload = Preload(warden, self.page_dir, say, imports) if zygote and heartbeat else None

    # ------------------------------------------------------------ core.ports.Procs

    def listen(self, news: Callable[[WorkerNews], None]) -> None:
        self._news = news

    def start(
        self,
        round_number: int,
        assignments: tuple[Assignment, ...],
        exited: Callable[[int, Exit], None],
        waiting: Collection[int] = (),
    ) -> None:
        with self._lock:
            others = [w for w in self._workers.values() if w.life.in_round]
            assert not others, f"round {round_number} starts while workers are in round {others[0].round}"
            self._round = round_number
            for slot in [slot for slot, w in self._workers.items() if not w.alive]:
                _discard_page(self._workers.pop(slot))
            kept = [a for a in assignments if a.slot in self._workers]
            for a in kept:
                worker = self._workers[a.slot]
                worker.exited = exited
                self._take_along(worker, round_number, a)
        fresh = [a for a in assignments if a not in kept and a.slot not in waiting]
        self._start_afresh(round_number, fresh, exited)

    def standby(self, assignments: tuple[Assignment, ...], exited: Callable[[int, Exit], None]) -> None:
        self._start_afresh(0, assignments, exited)

    def leave(
        self,
        planned: bool,
        signal: int,
        grace_s: float,
        leave_s: float | None,
        going: Collection[int] = (),
    ) -> None:
        with self._lock:
            told: list[Worker] = []
            others: list[Worker] = []
            ending: list[Worker] = []
            for slot, worker in self._workers.items():
                if worker.life is Life.DYING:
                    continue  # the worker needs no order any more
                leave = wire.Leave(worker.round, planned, slot in going)
                done = worker.protocol.last is wire.Done and planned
                if worker.life is Life.FAILING or (worker.life.in_round and done):
                    ending.append(worker)  # the worker has failed or finished, and exits by itself
                elif worker.life.in_round and worker.protocol.linked and worker.tell(leave):
                    worker.become(Life.LEAVING)
                    told.append(worker)
                elif worker.life.in_round:
                    others.append(worker)
            if leave_s is not None:
                self._warden.stop_workers(0, leave_s, [worker.id for worker in told])
            self._warden.stop_workers(0, grace_s, [worker.id for worker in ending])
            self._stop(others, signal, grace_s)

    def stop(self, signal: int, grace_s: float, slots: tuple[int, ...] | None = None) -> None:
        with self._lock:
            chosen = [w for slot, w in self._workers.items() if slots is None or slot in slots]
            self._stop(chosen, signal, grace_s)

    def go_on(self, slots: tuple[int, ...]) -> None:
        with self._lock:
            for worker in (self._workers[slot] for slot in slots if slot in self._workers):
                if worker.held and worker.link is not None:
                    worker.held = False
                    worker.link.disconnect()

    def fence(self, until: float | None) -> None:
        self._warden.fence(None if until is None else until - self._clock())

    def steps(self) -> Mapping[int, int]:
        with self._lock:
            return {slot: worker.steps for slot, worker in self._of_this_round()}

    # ------------------------------------------------------------ beyond core.ports.Procs

    def expect(self, assignment: Assignment) -> None:
        """Have the zygote import what the script begins with, for workers that start later. Their assignments
        differ from this one only in variables that no module may read on import."""
        if self._preload is not None:
            env = {**self._base_env, **assignment.env}
            env["PYTHONPATH"] = _python_path(env)
            self._preload.begin(self._argv(assignment), env, self._cwd)

    def progress(self, round_number: int | None = None) -> tuple[SlotProgress, ...]:
        """Return the heartbeats of this round's workers, in the order of their slots; none if
        ``round_number`` is another round."""
        with self._lock:
            if round_number not in (None, self._round):
                return ()
            return tuple(worker.progress() for _, worker in sorted(self._of_this_round()))

    def watched(self) -> tuple[Watched, ...]:
        """Return the workers in this round, in the order of their slots. Their pages are valid until
        the next ``start`` or ``standby``."""
        with self._lock:
            return tuple(
                Watched(slot, w.assignment.rank, w.pid, w.page, w.steps_before)
                for slot, w in sorted(self._of_this_round())
                if (w.life.in_round or w.life is Life.STOPPING) and w.pid and w.page is not None
            )

    def step_times(self, slot: int, after: int) -> tuple[float, ...]:
        """Return the times of the steps after ``after`` that the slot's worker made in this round, oldest
        first, by ``clock``. At most the last 250 are returned."""
        with self._lock:
            worker = dict(self._of_this_round()).get(slot)
            if worker is None or worker.page is None:
                return ()
            times = worker.page.step_times(after + worker.steps_before)[1]
        offset_s = self._clock() - time.monotonic()
        return tuple(at + offset_s for at in times)

    def page_contents(self, round_number: int | None = None) -> Mapping[int, PageContents]:
        """Return the reports of this round's workers about their training, by slot; nothing if
        ``round_number`` is another round."""
        with self._lock:
            if round_number not in (None, self._round):
                return {}
            return {slot: worker.page_contents() for slot, worker in self._of_this_round()}

    def condemn(self, slot: int, pid: int, why: str) -> None:
        """Kill a worker that hangs. ``why`` becomes the message of its exit. A worker that has ended is
        ignored."""
        with self._lock:
            worker = self._workers.get(slot)
            if worker is not None and worker.alive and worker.pid == pid:
                worker.hung = why
                # By id, since the pid may be reused.
                self._warden.stop_workers(signals.SIGKILL, 0.0, [worker.id])

    def pids(self) -> Mapping[int, int]:
        """Return the pids of live workers, by slot; 0 while a worker is being started."""
        with self._lock:
            return {slot: worker.pid for slot, worker in self._workers.items() if worker.alive}

    def error_file(self, slot: int) -> str:
        """Return the error file of the slot's process that failed last; empty if none has failed."""
        with self._lock:
            return self._error_files.get(slot, "")

    def close(self) -> None:
        """Remove the pages, and pass on the last output. The workers must have ended."""
        with self._lock:
            for worker in self._workers.values():
                _discard_page(worker)
        if self._links is not None:
            self._links.close()
        if self._preload is not None:
            self._preload.close()
        self._standard_files.close()
        shutil.rmtree(self.page_dir, ignore_errors=True)

    # ------------------------------------------------------------ starting a worker

    def _start_afresh(
        self, round_number: int, assignments: Sequence[Assignment], exited: Callable[[int, Exit], None]
    ) -> None:
        if not assignments:
            return
        envs = {a.local_rank: {**self._base_env, **a.env} for a in assignments}
        output_files = self._standard_files.output_files(round_number, envs)
        workers = []
        for a in assignments:
            life = become(None, Life.TRAINING if round_number else Life.STARTING)
            worker = Worker(a, round_number, life, exited, output_files.dest, a.local_rank)
            if worker.error_file not in ("", os.devnull):
                envs[a.local_rank].setdefault("TORCHELASTIC_ERROR_FILE", worker.error_file)
            workers.append(worker)
        with self._lock:
            for worker in workers:
                before = self._workers.get(worker.assignment.slot)
                if before is not None:
                    assert not before.alive, f"slot {worker.assignment.slot} has a worker already"
                    _discard_page(before)
                self._workers[worker.assignment.slot] = worker
        for worker in workers:
            try:
                self._launch(worker, envs[worker.log_rank], output_files)
            except OSError as error:
                end = Ended(0, 0, 127, time.time(), f"cannot start a worker: {error}")
                self._warden.call_soon(partial(self._ended, worker, end))

    def _launch(self, worker: Worker, env: dict[str, str], output_files: OutputFiles) -> None:
        a = worker.assignment
        mark = self._add_heartbeat(worker, env) if self._heartbeat else ""
        if self._links is not None:
            worker.link = self._links.new_link(partial(self._heard, worker), partial(self._unlinked, worker))
            env[wire.ADDRESS] = self._links.address
        argv = self._argv(a)
        worker.id = self._warden.spawn_worker(
            argv,
            env=env,
            cwd=self._cwd,
            fds=self._standard_files.connect(worker, output_files),
            mark=mark,
            page=str(worker.page.path) if worker.page is not None else "",
            whole_group=self._whole_group,
            fork=self._preload is not None and self._preload.suits(argv, env, self._cwd),
            started=worker.started,
            ended=partial(self._ended, worker),
            gone=lambda: self._news(WorkerGone(worker.pid)),
        )

    def _argv(self, assignment: Assignment) -> Sequence[str]:
        return self._command(assignment) if callable(self._command) else self._command

    def _add_heartbeat(self, worker: Worker, env: dict[str, str]) -> str:
        """Give the worker a page. Return the mark that identifies its descendants."""
        self._started += 1
        page = Page(self.page_dir / f"process{self._started}-slot{worker.assignment.slot}")
        with self._lock:
            worker.page = page
        env |= {VARIABLE: str(page.path), "PYTHONPATH": _python_path(env)}
        return f"{VARIABLE}={page.path}"

    # ------------------------------------------------------------ the rounds of a worker

    def _of_this_round(self) -> Iterable[tuple[int, Worker]]:
        return [(slot, w) for slot, w in self._workers.items() if w.round == self._round and w.round]

    def _take_along(self, worker: Worker, round_number: int, assignment: Assignment) -> None:
        """Assign a live worker to this round: it enters now if it waits, else once it waits."""
        worker.assignment, worker.round = assignment, round_number
        if worker.life is not Life.STOPPING:  # a stopping worker exits soon; the exit counts for this round
            worker.become(Life.TRAINING)
        page = worker.page_contents()
        worker.steps_before, worker.commits_before = page.steps, page.commits
        self._standard_files.relabel(worker)
        if worker.protocol.last is wire.Waiting:
            self._let_enter(worker)

    def _let_enter(self, worker: Worker) -> None:
        worker.protocol.told_to_enter(worker.round)
        if not worker.tell(wire.Enter(worker.round, worker.assignment.env)):
            self._stop([worker], signals.SIGKILL, 0.0)  # the worker would wait for ever

    def _stop(self, workers: Iterable[Worker], signal: int, grace_s: float) -> None:
        alive = [worker for worker in workers if worker.alive]
        for worker in alive:
            worker.become(Life.STOPPING)
        if alive:
            self._warden.stop_workers(signal, grace_s, [worker.id for worker in alive])
        for worker in alive:
            if worker.held:
                worker.tell(wire.Leave(worker.round, planned=True))

    # ------------------------------------------------------------ from the warden client's thread

    def _heard(self, worker: Worker, message: wire.WorkerToAgent) -> None:
        with self._lock:
            if not worker.alive:
                return
            worker.protocol.receive(message)
            slot, has_left = worker.assignment.slot, False
            if isinstance(message, wire.Waiting):
                has_left = self._handle_waiting(worker, message)
            if isinstance(message, wire.Broken) and message.fails and worker.life.in_round:
                worker.become(Life.FAILING)
                worker.error = message.why
            if isinstance(message, wire.Checkpointed) and not worker.protocol.linked:
                worker.held = True
                if worker.life is Life.STOPPING:  # the worker has saved because it was told to end
                    worker.tell(wire.Leave(worker.round, planned=True))
            number, steps = worker.round, worker.steps
        match message:
            case wire.Hello():
                self._news(WorkerLinked(slot))
            case wire.Waiting(age=age, state=holds, memory=memory) if has_left:
                self._news(WorkerWaiting(slot, number, steps, age, holds is wire.Holds.SHARD, memory))
            case wire.Entered(number, step, group_s, state_s, batch, rates, source, shard, copies):
                took = {"group_s": round(group_s, 6), "state_s": round(state_s, 6)}
                grown = {"batch": batch, "rates_times": round(rates, 6)} if batch else {}
                came = {"slot": slot, "round": number, "step": step, "state_from": source}
                sizes = {"shard_bytes": shard, "copies_bytes": copies} if shard else {}
                self._say("worker.entered", **came, **took, **grown, **sizes)
            case wire.Checkpointed(path):
                self._news(WorkerCheckpointed(slot, number, path))
            case wire.Broken(fails=fails, why=why):
                self._say("worker.broken", slot=slot, round=number, fails=fails, why=why)
                self._news(WorkerBroke(slot, number, fails))
            case wire.Done(round=number):
                self._say("worker.done", slot=slot, round=number)
                self._news(WorkerReturned(slot, number))

    def _handle_waiting(self, worker: Worker, message: wire.Waiting) -> bool:
        """Handle a worker's message that it waits. Return whether the worker has left its round."""
        if worker.life is Life.STOPPING:
            return False  # the worker ends soon
        if worker.life is Life.TRAINING and message.round == 0:
            self._let_enter(worker)  # the worker is new, and was started for this round
            return False
        if worker.life is Life.LEAVING:
            self._warden.spare_worker(worker.id)
        worker.become(Life.WAITING)
        return True

    def _unlinked(self, worker: Worker, why: str) -> None:
        """Handle the end of a link; ``why`` is empty if the worker closed it."""
        if why:
            self._say("worker.unlinked", slot=worker.assignment.slot, why=why)
        with self._lock:
            if worker.protocol.linked and worker.life in (Life.STARTING, Life.WAITING):
                self._stop([worker], signals.SIGKILL, 0.0)  # without a link, the worker would wait for ever

    def _ended(self, worker: Worker, end: Ended) -> None:
        if worker.link is not None:
            worker.link.drain()  # the last message may be that an exception ends the worker
            worker.link.close()
        if end.lingers:
            with self._lock:
                failed = end.code != 0 and not worker.finished(end) and not end.fenced
                dies = failed and worker.life is Life.TRAINING
                if dies:
                    worker.become(Life.DYING)
            self._news(WorkerLingers(worker.assignment.slot, end.pid, dies))
        self._standard_files.drain(worker, _LAST_OUTPUT_S)
        with self._lock:
            if end.code != 0:
                self._error_files[worker.assignment.slot] = worker.error_file
            number, exited, exit = worker.round, worker.exited, worker.ended(end)
        if end.code != exit.code:
            did = "did not exit" if -end.code == signals.SIGALRM else "crashed"
            why = f"Python {did} after the script had finished ({signals.Signals(-end.code).name})"
            self._warn(
                "worker.crashed_at_exit", slot=exit.slot, rank=exit.rank, why=why, counts_as="finished"
            )
        exited(number, exit)


def _python_path(env: Mapping[str, str]) -> str:
    """Return the PYTHONPATH of a worker, led by the boot code."""
    # An empty PYTHONPATH means none; an empty entry would mean the working directory.
    return os.pathsep.join(filter(None, (BOOT_DIR, env.get("PYTHONPATH"))))


def _discard_page(worker: Worker) -> None:
    if worker.page is not None:
        worker.page.close()
        worker.page = None
