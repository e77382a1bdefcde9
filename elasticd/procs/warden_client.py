"""The agent's end of the channel to the warden. One thread receives messages and calls the agent back."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, assert_never

from elasticd.channel.codec import ChannelClosed
from elasticd.channel.framing import QueuedChannel, close_all, pair
from elasticd.channel.warden_messages import (
    AGENT_TO_WARDEN,
    WARDEN_TO_AGENT,
    AgentToWarden,
    CloseWarden,
    Ended,
    Gone,
    ImportModules,
    LateNotices,
    Leftover,
    MoveFence,
    Program,
    RemoveAtEnd,
    SpareWorker,
    Spawn,
    Spawned,
    StartZygote,
    StopProcesses,
    StopService,
    WardenToAgent,
    ZygoteNews,
)
from elasticd.procs.linux import (
    TAKING_DOWN_S,
    adopt_orphans,
    came_from,
    children,
    is_exiting,
    is_ready,
    kill_tree,
    stat_of,
    steady_now,
)

_log = logging.getLogger(__name__)
_ROOT = str(Path(__file__).parents[2])
_PROGRAM = (
    "import sys; sys.path.append({root!r}); from elasticd.procs.warden import main; "
    "main({socket}, {agent}, {worker_files})"
)
_SPAWN_ANSWER_S = 30.0
_KILL_ORPHANS_S = 5.0
_LOOK_S = 0.1
_CLOSE_S = 10.0  # what the warden may need beyond the grace


class WardenError(RuntimeError):
    """A process could not be started, or the warden has ended. The message is one sentence."""


@dataclass(slots=True)
class _Running:
    """A process that is not gone. ``lingers``: its exit was reported, and the kernel still takes it down."""

    ended: Callable[[Ended], None]
    mark: str
    service: bool
    pid: int = 0
    started: Callable[[int], None] | None = None
    gone: Callable[[], None] | None = None
    heard: Callable[[ZygoteNews], None] | None = None
    lingers: bool = False


class Warden:
    """The agent's handle of the warden, which is the parent of the agent's other processes.

    Start the warden early, before any thread. Only ``spawn_service`` and ``close`` block. Callbacks come from
    one thread, in the order of events; they must not block.
    """

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self._process = process
        self._channel = QueuedChannel(sock, AGENT_TO_WARDEN, WARDEN_TO_AGENT)
        self._lock = threading.Lock()
        self._running: dict[int, _Running] = {}
        self._next_id = 1
        self._soon: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._watched: dict[int, Callable[[], None]] = {}
        self._closing = False
        self._lost = False
        self._over = False  # whether the thread has ended
        self._on_lost: Callable[[], None] | None = None
        self._bereaved: list[_Running] = []  # what ran when the warden was killed
        self._wait_until = 0.0  # of ``close``, on the monotonic clock
        self.left: tuple[int, ...] = ()  # after ``close``: processes that SIGKILL has not ended
        self._thread = threading.Thread(target=self._listen, name="elasticd-warden-client", daemon=True)

    @classmethod
    def start(cls, worker_files: int | None = None) -> Warden:
        """Start the warden. If the warden is killed, its orphans become children of the agent.
        ``worker_files``: how many files a worker may have open; None: as many as this process."""
        adopt_orphans()
        ours, theirs = pair()
        with theirs:
            program = _PROGRAM.format(
                root=_ROOT, socket=theirs.fileno(), agent=os.getpid(), worker_files=worker_files
            )
            process = subprocess.Popen(
                # Isolated and without site-packages: the warden starts in milliseconds, and runs no code
                # from a user's Python path. UTF-8, so that both ends encode strings alike.
                [sys.executable, "-I", "-S", "-X", "utf8", "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        warden = cls(process, ours)
        warden._thread.start()
        return warden

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def closing(self) -> bool:
        """Whether ``close`` was called."""
        return self._closing

    def on_lost(self, lost: Callable[[], None]) -> None:
        """Call ``lost`` if the warden dies by itself, after all its workers and services were killed and
        reported as ended."""
        with self._lock:
            self._on_lost = lost
            if not self._lost:
                return
        lost()

    # ------------------------------------------------------------ workers

    def spawn_worker(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        fds: Sequence[int],
        mark: str = "",
        page: str = "",
        whole_group: bool = False,
        fork: bool = False,
        started: Callable[[int], None] | None = None,
        ended: Callable[[Ended], None],
        gone: Callable[[], None] | None = None,
    ) -> int:
        """Start a worker in its own session with exactly the files ``fds``, which the warden then owns.
        Return the id for ``stop_workers``.

        ``mark``: a ``NAME=value`` that only this worker has in its environment; it identifies the worker's
        orphans. ``page``: the path of its page, by which its end is noticed early. ``whole_group``: signals
        go to the worker's process group. ``fork``: fork from the zygote if ready. ``ended`` is always called
        once; ``started`` is called before, with the pid, if the worker starts. When ``ended`` is called, the
        process runs no more code of its own, but the kernel may still be releasing its memory and files
        (``Ended.lingers``). ``gone`` is then called once the process is gone.
        """
        running = _Running(ended, mark, False, 0, started, gone)
        program = _program(argv, env, cwd)
        return self._spawn(
            lambda id: Spawn(
                id, program, _portable(mark), _portable(page), whole_group=whole_group, fork=fork
            ),
            program,
            fds,
            running,
        )

    def stop_workers(self, signal_number: int, grace_s: float, ids: Sequence[int] | None = None) -> None:
        """Signal all workers, or those with ``ids``, and SIGKILL them after the grace. Signal 0: only SIGKILL
        after the grace."""
        chosen = None if ids is None else tuple(ids)
        self._tell(StopProcesses(int(signal_number), grace_s, chosen))

    def spare_worker(self, id: int) -> None:
        """Cancel the SIGKILL at the end of a worker's grace."""
        self._tell(SpareWorker(id))

    def fence(self, in_s: float | None) -> None:
        """Kill all workers in ``in_s`` seconds unless another call moves the fence before; None: never."""
        deadline = None if in_s is None else steady_now() + in_s
        self._tell(MoveFence(deadline))

    # ------------------------------------------------------------ the zygote

    def start_zygote(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        fds: Sequence[int],
        heard: Callable[[ZygoteNews], None],
        ended: Callable[[Ended], None],
    ) -> None:
        """Start the process that workers are forked from, or replace the present one. The process gets its
        socket as its fourth file, after ``fds``. ``heard`` is called with the zygote's messages."""
        running = _Running(ended, "", True, heard=heard)
        program = _program(argv, env, cwd)
        self._spawn(lambda id: StartZygote(id, program), program, fds, running)

    def preload(self, request: ImportModules) -> None:
        """Have the zygote import modules. Workers are forked after the imports."""
        self._tell(request)

    # ------------------------------------------------------------ services

    def spawn_service(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: int | None = None,
        output: int | None = None,
        also: Sequence[int] = (),
        log_path: str | Path = os.devnull,
        ended: Callable[[Ended], None] = lambda _: None,
    ) -> int:
        """Start a helper process (such as etcd) that must not outlive the agent, and return its pid.

        Its output goes to ``output``, or is appended to ``log_path``. The process gets copies of ``stdin``,
        ``output`` and ``also`` (descriptors 3 and on). Waits until the program runs; raises ``WardenError``
        if it cannot run. The fence and ``stop_workers`` do not affect services.
        """
        answered = threading.Event()
        outcome: list[int | Ended] = []

        def answer(what: int | Ended) -> None:
            outcome.append(what)
            answered.set()

        def service_ended(end: Ended) -> None:
            if answered.is_set():
                ended(end)
            else:
                answer(end)

        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            log = os.dup(output) if output is not None else os.open(log_path, flags, 0o600)
        except OSError as error:
            raise WardenError(f"cannot write the log of {argv[0]}, {log_path}: {error.strerror}") from error
        given = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) if stdin is None else os.dup(stdin)
        fds = [given, log, os.dup(log), *map(os.dup, also)]
        running = _Running(service_ended, "", True, 0, answer)
        program = _program(argv, os.environ if env is None else env, str(cwd or os.getcwd()))
        id = self._spawn(lambda id: Spawn(id, program, service=True), program, fds, running)
        if not answered.wait(_SPAWN_ANSWER_S):
            self._tell(StopService(id, 0.0))  # the caller gets an error, so the service must not run
            raise WardenError(f"{argv[0]} did not start within {_SPAWN_ANSWER_S:.0f} s")
        match outcome[0]:
            case int(pid):
                return pid
            case end:
                raise WardenError(end.error or f"{argv[0]} ended at once with code {end.code}")

    def start_store(self, argv: Sequence[str], fds: Sequence[int], ended: Callable[[Ended], None]) -> None:
        """Start the process that serves the stores of rounds, without waiting for it. It is forked from the
        zygote, if there is one, and runs ``argv`` otherwise. Takes over ``fds``, its first files."""
        running = _Running(ended, "", True)
        program = _program(argv, os.environ, os.getcwd())
        self._spawn(lambda id: Spawn(id, program, service=True, fork=True), program, fds, running)

    def stop_service(self, pid: int, grace_s: float = 5.0) -> None:
        """Send SIGTERM, and SIGKILL after the grace. Returns at once; ``ended`` is called later."""
        with self._lock:
            ids = [id for id, running in self._running.items() if running.pid == pid and running.service]
        for id in ids:
            self._tell(StopService(id, grace_s))

    # ------------------------------------------------------------ the end

    def remove_at_end(self, path: str | Path) -> None:
        """Have the warden remove a file or folder after the agent has exited or died."""
        self._tell(RemoveAtEnd(_portable(os.path.abspath(path))))

    def close(self, grace_s: float = 3.0) -> None:
        """Kill the workers, end the services (SIGKILL after ``grace_s`` seconds), and remove the registered
        paths. Wait until all processes are gone; if the kernel takes longer, up to a minute more. A second
        call does nothing."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wait_until = time.monotonic() + grace_s + _CLOSE_S
        self._tell(CloseWarden(grace_s))
        while self._process.poll() is None and (rest_s := self._wait_until - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(rest_s)
        self._process.kill()
        self._process.wait()
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)
        self._outlast_orphans()

    def _hear_of_the_left(self, message: Leftover) -> None:
        pids, waits_s = message.pids, message.waits_s
        if waits_s:
            self._wait_until = time.monotonic() + waits_s + _CLOSE_S
            _log.warning(
                "the kernel is still taking down processes %s, which were killed: waiting up to %.0f s more",
                ", ".join(map(str, pids)),
                waits_s,
            )
        else:
            self.left = pids

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ the channel

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call ``call`` in the callback thread, or at once if that thread has ended."""
        self._soon.append(call)
        self._nudge()
        if self._over:
            self._call_queued()

    def watch(self, file: socket.socket, readable: Callable[[], None]) -> None:
        """Call ``readable`` in the callback thread whenever ``file`` is readable."""

        def register() -> None:
            # The descriptor is -1 if ``unwatch`` was called meanwhile.
            if file.fileno() >= 0 and not self._over:
                self._watched[file.fileno()] = readable
                self._selector.register(file, selectors.EVENT_READ)

        self.call_soon(register)

    def unwatch(self, file: socket.socket) -> None:
        """Stop watching the file, and close it."""

        def unregister() -> None:
            if self._watched.pop(file.fileno(), None) is not None:
                with contextlib.suppress(KeyError, RuntimeError):  # the selector may be closed
                    self._selector.unregister(file)
            file.close()

        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self.call_soon(unregister)
        else:
            unregister()

    def _nudge(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _spawn(
        self,
        message: Callable[[int], AgentToWarden],
        program: Program,
        fds: Sequence[int],
        running: _Running,
    ) -> int:
        with self._lock:
            id = self._next_id
            self._next_id += 1
            lost = self._lost or self._closing
            if not lost:
                self._running[id] = running
        if lost:
            close_all(fds)
            why = f"cannot run {program.argv[0]}: the warden has ended"
            end = Ended(id, 0, 127, time.time(), why)
            if running.service:
                running.ended(end)
            else:
                self.call_soon(lambda: running.ended(end))
            return id
        self._tell(message(id), fds)
        close_all(fds)
        return id

    def _tell(self, message: AgentToWarden, fds: Sequence[int] = ()) -> None:
        with self._lock:
            if self._lost:
                return
            with contextlib.suppress(ChannelClosed):  # the listening thread reports the end
                self._channel.post(message, fds)
            pending = self._channel.pending
        if pending:
            self._nudge()

    def _listen(self) -> None:
        selector = self._selector
        selector.register(self._channel, selectors.EVENT_READ)
        selector.register(self._wake, selectors.EVENT_READ)
        try:
            while True:
                with self._lock:
                    writing = selectors.EVENT_WRITE if self._channel.pending else 0
                selector.modify(self._channel, selectors.EVENT_READ | writing)
                for key, events in selector.select():
                    if key.fileobj == self._wake:
                        os.eventfd_read(self._wake)
                    elif key.fd in self._watched:
                        _call(self._watched[key.fd])
                    else:
                        self._exchange(events)
                self._call_queued()
        except ChannelClosed:
            selector.unregister(self._channel)  # unregister before the descriptor's number can be reused
            self._lose()
        finally:
            selector.close()

    def _exchange(self, events: int) -> None:
        if events & selectors.EVENT_READ:  # read before writing, to get the last messages of a dead warden
            while (heard := self._channel.poll()) is not None:
                message, fds = heard
                close_all(fds)
                self._hear(message)
        if events & selectors.EVENT_WRITE:
            with self._lock:
                self._channel.flush()

    def _hear(self, message: WardenToAgent) -> None:
        if isinstance(message, LateNotices):
            _log.warning(
                "deaths of workers are noticed later, once the kernel has taken the process down: %s",
                message.why,
            )
            return
        if isinstance(message, Leftover):
            self._hear_of_the_left(message)
            return
        with self._lock:
            running = self._running.get(message.id)
            if running is None:
                return
            if isinstance(message, Spawned):
                running.pid = message.pid
            elif isinstance(message, Ended) and message.lingers:
                running.lingers = True
            elif isinstance(message, Ended | Gone):
                del self._running[message.id]
        match message:
            case Spawned(pid=pid):
                if running.started is not None:
                    _call(partial(running.started, pid))
            case Ended():
                _call(partial(running.ended, message))
            case Gone():
                if running.gone is not None:
                    _call(running.gone)
            case ZygoteNews():
                if running.heard is not None:
                    _call(partial(running.heard, message))
            case _:
                assert_never(message)

    def _call_queued(self) -> None:
        with contextlib.suppress(IndexError):  # the queue is empty
            while True:
                _call(self._soon.popleft())

    def _lose(self) -> None:
        """Handle the end of the warden, after ``close`` or because it was killed."""
        with self._lock:
            self._lost = True
            left = dict(self._running)
            self._running.clear()
            self._channel.close()
        if not self._closing:
            self._process.kill()
            self._process.wait()
            self._bereaved = list(left.values())
            self._kill_orphans()
        error = "" if self._closing else "the warden of this node was killed"
        for id, running in left.items():
            if running.lingers:
                continue
            # Reported as fenced, because the workers are not to blame.
            end = Ended(id, running.pid, -signal.SIGKILL, time.time(), error, fenced=bool(error))
            _call(partial(running.ended, end))
        with self._lock:
            lost = None if self._closing else self._on_lost
        if lost is not None:
            _call(lost)
        self._over = True
        self._call_queued()

    def _orphans(self) -> list[int]:
        """Return the processes that a killed warden's children had started, and the children, if they are not
        gone."""
        pids = {running.pid for running in self._bereaved}
        marks = [running.mark for running in self._bereaved if running.mark]
        return [pid for pid in children(os.getpid()) if pid in pids or came_from(pid, pids, marks)]

    def _kill_orphans(self) -> None:
        """Kill the orphans, and wait until none runs. The kernel may still be taking some down."""
        killed: set[int] = set()
        give_up_at = time.monotonic() + _KILL_ORPHANS_S
        while time.monotonic() < give_up_at:
            running = [pid for pid in self._orphans() if pid not in killed or not is_exiting(stat_of(pid))]
            if not running:
                return
            for pid in running:
                kill_tree(pid)
                killed.add(pid)
            for pid in running:
                _reap(pid, time.monotonic() + _LOOK_S)

    def _outlast_orphans(self) -> None:
        for wait_s, more_s in ((_KILL_ORPHANS_S, TAKING_DOWN_S), (TAKING_DOWN_S, 0.0)):
            until = time.monotonic() + wait_s
            while (left := self._orphans()) and time.monotonic() < until:
                for pid in left:
                    kill_tree(pid)
                    _reap(pid, until)
            if not left:
                return
            self._hear_of_the_left(Leftover(tuple(left), more_s))


def _reap(pid: int, give_up_at: float) -> None:
    try:
        ended = os.pidfd_open(pid)
        try:
            is_ready(ended, select.POLLIN, max(0.0, give_up_at - time.monotonic()))
        finally:
            os.close(ended)
        os.waitpid(pid, os.WNOHANG)
    except (ProcessLookupError, ChildProcessError):
        pass


def _program(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> Program:
    variables = {_portable(name): _portable(value) for name, value in env.items()}
    return Program(tuple(map(_portable, argv)), variables, _portable(cwd))


def _portable(text: str) -> str:
    """Return the text re-encoded for a process whose encoding is UTF-8, with the same bytes for the operating
    system."""
    return os.fsencode(text).decode("utf-8", "surrogateescape")


def _call(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:  # noqa: BLE001  # a failing callback must not end the thread
        _log.exception("a callback of the warden client failed")
