"""The warden: a small process that is the parent of a node's workers and services.

When the agent dies, the warden lives long enough to kill all workers and services and to remove registered
files. It also enforces the fence, so that workers stop in time even if the agent is stopped.

Standard library only, started as ``python -I -S``. Faults of torch, grpc or the agent's threads do not affect
the warden, and a fork takes a fraction of a millisecond. One thread does all work. Other threads only wait
for deaths of workers, and report these deaths (``death_notices``). The agent uses ``warden_client``.

The warden forks workers itself, or from a zygote (``zygote``) if one is ready. In both cases the workers are
its children.

``channel.warden_messages`` declares the messages. The agent's death, or the end of the socket, means
``CloseWarden`` without grace.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from elasticd.channel.codec import ChannelClosed
from elasticd.channel.framing import QueuedChannel, close_all, pair
from elasticd.channel.warden_messages import (
    AGENT_TO_WARDEN,
    WARDEN_TO_AGENT,
    AgentToWarden,
    CloseWarden,
    Ended,
    Forked,
    Gone,
    Imported,
    ImportModules,
    LateNotices,
    LeftOut,
    Leftover,
    MoveFence,
    NoZygote,
    RemoveAtEnd,
    SpareWorker,
    Spawn,
    Spawned,
    StartZygote,
    StopProcesses,
    StopService,
    WardenToAgent,
    ZygoteNews,
    ZygoteToWarden,
)
from elasticd.core.page_layout import MUTEX
from elasticd.procs.death_notices import DeathNotices
from elasticd.procs.launch import CANNOT_RUN, launch, start_error
from elasticd.procs.linux import (
    TAKING_DOWN_S,
    adopt_orphans,
    came_from,
    children,
    is_exiting,
    is_resource_tracker,
    kill,
    kill_group,
    kill_tree,
    name_process,
    session_of,
    stat_of,
    steady_now,
)
from elasticd.procs.zygote import Fork, ZygoteProcess

_REMEMBERED = 1024  # the most ended workers whose late orphans are still recognised
_TRACKER_GRACE_S = 5.0  # time for a resource tracker to remove a killed worker's shared memory
_LAST_REAPING_S = 5.0  # time for processes that SIGKILL does not end at once (stuck in a driver)


@dataclass(slots=True)
class _Child:
    """A child process of the warden. ``mark``: a ``NAME=value`` that only this process and its descendants
    have in their environment. ``told``: its exit has begun, and the agent knows how it ends."""

    id: int
    pid: int
    service: bool
    mark: str
    whole_group: bool
    errors: int
    kill_at: float | None = None
    fenced: bool = False
    told: bool = False
    failure: str = ""  # why the process could not be started

    def start_error(self) -> str | None:
        """Return why the program could not be started; None if it was. Call once, when the outcome is
        known."""
        errors, self.errors = self.errors, -1
        return start_error(errors) if errors >= 0 else None


class WardenProcess:
    def __init__(self, sock: socket.socket, worker_files: int | None) -> None:
        self._worker_files = worker_files
        self._agent: QueuedChannel[WardenToAgent, AgentToWarden] | None
        self._agent = QueuedChannel(sock, WARDEN_TO_AGENT, AGENT_TO_WARDEN)
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _Child] = {}
        self._deaths = DeathNotices(8 * MUTEX, self._hear_of_exit, self._hear_of_late_notices)
        self._working = threading.RLock()  # guards all of this object; the loop is without it while it waits
        self._late_notices = False  # whether the agent knows why
        self._woken, self._wake = os.pipe()
        self._zygote: ZygoteProcess | None = None
        self._fresh_at: float | None = None  # when a worker was last started without the zygote
        self._fresh_s: float | None = None  # the seconds from that start to the start of the first zygote
        self._ended_early: dict[int, int] = {}  # by pid: exit codes of forks that ended before ``_take``
        self._ended_sessions: deque[int] = deque(maxlen=_REMEMBERED)
        self._ended_marks: deque[str] = deque(maxlen=_REMEMBERED)
        self._trackers: dict[int, float] = {}  # resource trackers, and when to kill them
        self._fence_at: float | None = None
        self._fence_passed = False
        self._paths: list[str] = []
        self._closing = False
        self._give_up_at: float | None = None
        self._patient = True

    # ------------------------------------------------------------ the loop

    def run(self, agent_pid: int) -> None:
        """Serve until the agent closes or dies. Then end all processes, and return."""
        for fd in (self._woken, self._wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._woken, selectors.EVENT_READ, "child")
        assert self._agent is not None
        self._selector.register(self._agent, selectors.EVENT_READ, "agent")
        with self._working:
            self._watch(agent_pid)
            while not (self._closing and self._is_over()):
                self._work(self._wait())
        for path in self._paths:
            _remove(path)

    def _wait(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for an event or a deadline. Meanwhile other threads may work."""
        within_s = self._until_next_deadline()
        self._working.release()
        try:
            return self._selector.select(within_s)
        finally:
            self._working.acquire()

    def _work(self, ready: Sequence[tuple[selectors.SelectorKey, int]]) -> None:
        for key, events in ready:
            if key.data == "child":
                _drain(self._woken)
                self._reap()
            elif key.data == "death":
                self._selector.unregister(key.fileobj)
                self._lose_agent()
            elif key.data == "zygote":
                self._hear_zygote(events)
            elif isinstance(key.data, _Child):
                self._hear_beginning(key.data)
            else:
                self._serve(events)
        self._keep_deadlines()
        self._want_writes()

    def _watch(self, agent_pid: int) -> None:
        """Notice the agent's death even if another process still has the agent's end of the socket."""
        with contextlib.suppress(OSError):  # if the kernel has no pidfds, only the socket is watched
            self._selector.register(os.pidfd_open(agent_pid), selectors.EVENT_READ, "death")
        if os.getppid() != agent_pid:
            self._lose_agent()

    def _serve(self, events: int) -> None:
        if self._agent is None:
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._agent.flush()
            if events & selectors.EVENT_READ:
                while self._agent is not None and (heard := self._agent.poll()) is not None:
                    message, fds = heard
                    try:
                        self._obey(message, fds)
                    finally:
                        close_all(fds)
        except ChannelClosed:
            self._lose_agent()

    def _obey(self, message: AgentToWarden, fds: Sequence[int]) -> None:
        match message:
            case Spawn():
                self._spawn(message, fds)
            case StartZygote():
                self._start_zygote(message, fds)
            case ImportModules():
                self._ask_zygote(lambda zygote: zygote.preload(message))
            case StopProcesses(number, grace_s, ids):
                self._stop(number, grace_s, ids)
            case SpareWorker(id):
                for child in self._workers([id]):
                    child.kill_at = None
            case StopService(id, grace_s):
                self._stop_service(id, grace_s)
            case MoveFence(until):
                self._fence_at, self._fence_passed = until, False
            case RemoveAtEnd(path):
                self._paths.append(path)
            case CloseWarden(grace_s):
                self._close(grace_s)
            case _:
                assert_never(message)

    def _tell(self, message: WardenToAgent) -> None:
        if self._agent is None:
            return
        try:
            self._agent.post(message)
        except ChannelClosed:
            self._lose_agent()

    def _want_writes(self) -> None:
        zygote = self._zygote.channel if self._zygote is not None else None
        for channel, name in ((self._agent, "agent"), (zygote, "zygote")):
            if channel is not None:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.pending else 0)
                if self._selector.get_key(channel).events != wanted:
                    self._selector.modify(channel, wanted, name)

    def _lose_agent(self) -> None:
        if self._agent is not None:
            self._selector.unregister(self._agent)
            self._agent.close()
            self._agent = None
        self._close(grace_s=0.0)

    # ------------------------------------------------------------ starting and ending

    def _spawn(self, message: Spawn, fds: Sequence[int], *, zygote: bool = False) -> None:
        service = message.service
        if not service and (self._fence_passed or _is_past(self._fence_at)):
            self._tell_end(message.id, 0, -signal.SIGKILL, fenced=True)
            return
        if message.fork and self._zygote is not None and self._zygote.accepts_requests:
            try:
                self._ask_zygote(lambda zygote: zygote.fork(message, fds))
                return
            except OSError:
                pass  # too few descriptors are free: a start without the zygote needs fewer
        try:
            ours = service and not zygote  # workers inherit the zygote's limits
            pid, errors = launch(message.program, fds, None if ours else self._worker_files)
        except OSError as error:
            self._tell_end(message.id, 0, CANNOT_RUN, error=f"cannot fork: {error.strerror}")
            return
        if not service:
            self._fresh_at = steady_now()
        child = _Child(message.id, pid, service, message.mark, message.whole_group, errors)
        self._add(child, message.page)
        if service:  # the caller waits until the program runs
            self._selector.register(errors, selectors.EVENT_READ, child)
        else:
            self._tell(Spawned(child.id, pid))

    def _hear_beginning(self, child: _Child) -> None:
        """Tell the agent that a service runs its program. If the program cannot run, the agent is told when
        the child exits, as with a worker."""
        if child.errors < 0:
            return
        self._selector.unregister(child.errors)
        child.failure = child.start_error() or ""
        if not child.failure:
            self._tell(Spawned(child.id, child.pid))

    def _add(self, child: _Child, page: str) -> None:
        self._children[child.pid] = child
        if page:
            self._deaths.watch(child.id, child.pid, page)
        if child.pid in self._ended_sessions:  # pids are reused
            self._ended_sessions.remove(child.pid)

    def _stop(self, signal_number: int, grace_s: float, ids: Collection[int] | None) -> None:
        self._drop_forks(-signal_number, ids)
        kill_at = steady_now() + grace_s
        for child in self._workers(ids):
            child.kill_at = kill_at if child.kill_at is None else min(child.kill_at, kill_at)
            (kill_group if child.whole_group else kill)(child.pid, signal_number)

    def _stop_service(self, id: int, grace_s: float) -> None:
        for child in self._children.values():
            if child.id == id and child.service:
                child.kill_at = steady_now() + grace_s
                kill(child.pid, signal.SIGTERM)

    def _close(self, grace_s: float) -> None:
        """End the workers now and the services within the grace; ``run`` then returns."""
        self._closing = True
        self._give_up_at = steady_now() + grace_s + _LAST_REAPING_S
        self._drop_forks(-signal.SIGKILL)
        for child in self._children.values():
            if child.service and grace_s > 0:
                child.kill_at = steady_now() + grace_s
                kill(child.pid, signal.SIGTERM)
            else:
                child.kill_at = 0.0
        self._keep_deadlines()
        self._sweep()

    def _hear_of_exit(self, id: int, code: int) -> None:
        """Report a worker that is exiting, before the kernel has taken it down. Any thread may call this."""
        with self._working:
            for child in self._workers([id]):  # none if it was reaped meanwhile
                child.told = True
                self._tell_at_once(Ended(id, child.pid, code, time.time(), fenced=child.fenced, lingers=True))

    def _hear_of_late_notices(self, why: str) -> None:
        """Report once that deaths are noticed late. Any thread may call this."""
        with self._working:
            if not self._late_notices:
                self._late_notices = True
                self._tell_at_once(LateNotices(why))

    def _tell_at_once(self, message: WardenToAgent) -> None:
        """Tell the agent, from any thread. If the message cannot be sent yet, wake the loop, which sends it
        later. The loop notices by itself that the agent is lost."""
        if self._agent is not None:
            with contextlib.suppress(ChannelClosed):
                self._agent.post(message)
            if self._agent.pending:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake, b"\0")

    def _reap(self) -> None:
        while True:
            try:
                # WNOWAIT leaves the child a zombie for now, so its pid, group and session are not reused.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if ended is None:
                break
            child = self._children.pop(ended.si_pid, None)
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            if child is None:
                os.waitpid(ended.si_pid, 0)
                self._trackers.pop(ended.si_pid, None)
                if self._zygote is not None and self._zygote.until is not None:
                    self._ended_early[ended.si_pid] = code
                continue
            at = time.time()
            if self._zygote is not None and child.pid == self._zygote.pid:
                self._lose_zygote()  # its group may contain workers that have not called setsid yet
            else:
                self._kill_group(child, children(os.getpid()))
            os.waitpid(child.pid, 0)
            self._finish(child, code, at)
        self._sweep()

    def _finish(self, child: _Child, code: int, at: float) -> None:
        """Kill the orphans of a reaped process, and report its exit."""
        self._deaths.forget(child.id)
        self._ended_sessions.append(child.pid)
        if child.mark:
            self._ended_marks.append(child.mark)
        self._sweep()
        if child.service:
            self._hear_beginning(child)
        error = child.failure or child.start_error()
        if child.told:
            self._tell(Gone(child.id))
        else:
            self._tell_end(
                child.id, child.pid, code if error is None else CANNOT_RUN, at, error or "", child.fenced
            )

    def _tell_end(
        self, id: int, pid: int, code: int, at: float | None = None, error: str = "", fenced: bool = False
    ) -> None:
        self._tell(Ended(id, pid, code, time.time() if at is None else at, error, fenced))

    def _sweep(self) -> None:
        """Kill the orphans of ended workers; when no worker runs, kill all orphans.

        An orphan of a running worker is left alone: the worker may have started a daemon. Killing an orphan
        may orphan its children; they become children of the warden, and SIGCHLD leads to another sweep. A
        resource tracker gets time to remove shared memory.
        """
        deserted = not self._workers()
        for pid in children(os.getpid()):
            if pid in self._children or (self._zygote is not None and session_of(pid) == self._zygote.pid):
                continue
            if deserted or came_from(pid, self._ended_sessions, self._ended_marks):
                if is_resource_tracker(pid) and not _is_past(
                    self._trackers.setdefault(pid, steady_now() + _TRACKER_GRACE_S)
                ):
                    continue
                self._trackers.pop(pid, None)
                kill_tree(pid)

    def _kill_group(self, child: _Child, near: Sequence[int]) -> None:
        """Kill the process group of the child, unless a resource tracker among ``near`` is in its session.
        ``_sweep`` then kills the rest of the group as orphans."""
        if not any(session_of(pid) == child.pid and is_resource_tracker(pid) for pid in near):
            kill_group(child.pid, signal.SIGKILL)

    def _workers(self, ids: Collection[int] | None = None) -> list[_Child]:
        return [c for c in self._children.values() if not c.service and (ids is None or c.id in ids)]

    def _is_over(self) -> bool:
        """Return whether no process is left to wait for. Processes that the kernel is taking down get more
        time than others."""
        left = children(os.getpid())
        if not left or not _is_past(self._give_up_at):
            return not left
        waits = self._patient and any(is_exiting(stat_of(pid)) for pid in left)
        if waits:
            self._give_up_at, self._patient = steady_now() + TAKING_DOWN_S, False
        self._tell(Leftover(tuple(left), TAKING_DOWN_S if waits else 0.0))
        return not waits

    # ------------------------------------------------------------ the zygote

    def _start_zygote(self, message: StartZygote, fds: Sequence[int]) -> None:
        self._lose_zygote()
        ours, theirs = pair()
        with theirs:
            self._spawn(
                Spawn(message.id, message.program, service=True), [*fds, theirs.fileno()], zygote=True
            )
        pid = next((child.pid for child in self._children.values() if child.id == message.id), None)
        if pid is None:
            ours.close()
            return
        if self._fresh_s is None and self._fresh_at is not None:
            self._fresh_s = steady_now() - self._fresh_at
        self._zygote = ZygoteProcess(message.id, pid, ours, self._fresh_s)
        self._selector.register(self._zygote.channel, selectors.EVENT_READ, "zygote")

    def _ask_zygote(self, ask: Callable[[ZygoteProcess], None]) -> None:
        if self._zygote is not None:
            try:
                ask(self._zygote)
            except ChannelClosed:
                self._lose_zygote()

    def _hear_zygote(self, events: int) -> None:
        zygote = self._zygote
        if zygote is None:
            return
        try:
            if events & selectors.EVENT_WRITE:
                zygote.channel.flush()
            if events & selectors.EVENT_READ:
                while (heard := zygote.channel.poll()) is not None:
                    message, fds = heard
                    close_all(fds)
                    self._note(zygote, message)
        except ChannelClosed:
            self._lose_zygote()

    def _note(self, zygote: ZygoteProcess, message: ZygoteToWarden) -> None:
        match message:
            case Forked(pids):
                for id, pid in pids:
                    fork = zygote.made(id)
                    if fork is not None:
                        self._take(fork, pid)
                self._ended_early.clear()
            case Imported(asked, untried):
                zygote.imported(asked)
                self._tell(ZygoteNews(zygote.id, ready=zygote.ready, untried=untried))
            case LeftOut(modules):
                self._tell(ZygoteNews(zygote.id, left_out=modules))
            case NoZygote(why):
                self._tell(ZygoteNews(zygote.id, unfit=why))
            case _:
                assert_never(message)

    def _take(self, fork: Fork, pid: int) -> None:
        """Take over a forked process, which is now a child of the warden and waits to be released."""
        if not pid:
            self._start_without([fork])
            return
        fork.take()
        request, errors = fork.request, fork.link
        if request.service:  # it has no program of its own that could fail to start
            os.close(errors)
            errors = -1
        child = _Child(request.id, pid, request.service, request.mark, request.whole_group, errors)
        self._add(child, request.page)
        self._tell(Spawned(child.id, pid))
        code = self._ended_early.pop(pid, None)
        if code is not None:
            del self._children[pid]
            self._finish(child, code, time.time())

    def _lose_zygote(self) -> None:
        """End the zygote, and start the workers that it has not forked yet without it."""
        zygote, self._zygote = self._zygote, None
        if zygote is None:
            return
        self._selector.unregister(zygote.channel)
        zygote.channel.close()
        kill(zygote.pid, signal.SIGKILL)
        self._start_without(zygote.give_up())

    def _start_without(self, forks: Sequence[Fork]) -> None:
        for fork in forks:
            fds = fork.start_afresh()
            self._spawn(replace(fork.request, fork=False), fds)
            close_all(fds)

    def _drop_forks(self, code: int, ids: Collection[int] | None = None, *, fenced: bool = False) -> None:
        """Cancel the workers that are not forked yet; when the warden closes, also services."""
        if self._zygote is None:
            return
        for fork in self._zygote.give_up(ids, workers_only=not self._closing):
            fork.drop()
            self._tell_end(fork.request.id, 0, code, fenced=fenced)

    # ------------------------------------------------------------ deadlines

    def _until_next_deadline(self) -> float | None:
        deadlines = [child.kill_at for child in self._children.values() if child.kill_at is not None]
        deadlines += self._trackers.values()
        if self._fence_at is not None and not self._fence_passed:
            deadlines.append(self._fence_at)
        if self._give_up_at is not None:
            deadlines.append(self._give_up_at)
        if self._zygote is not None and self._zygote.until is not None:
            deadlines.append(self._zygote.until)
        return max(0.0, min(deadlines) - steady_now()) if deadlines else None

    def _keep_deadlines(self) -> None:
        if not self._fence_passed and _is_past(self._fence_at):
            self._fence_passed = True
            self._drop_forks(-signal.SIGKILL, fenced=True)
            for child in self._workers():
                child.fenced = True
                child.kill_at = 0.0
        if self._zygote is not None and _is_past(self._zygote.until):
            if self._zygote.ready:
                self._lose_zygote()
            else:
                self._start_without(self._zygote.give_up_late())
        for child in list(self._children.values()):
            if _is_past(child.kill_at):
                child.kill_at = None
                self._kill_group(child, children(child.pid))
                kill(child.pid, signal.SIGKILL)  # the child may not have called setsid yet
        if any(map(_is_past, self._trackers.values())):
            self._sweep()


def _is_past(deadline: float | None) -> bool:
    return deadline is not None and steady_now() >= deadline


def _drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def main(socket_fd: int, agent_pid: int, worker_files: int | None) -> None:
    """Run the warden of an agent. ``socket_fd``: the socket to the agent. ``worker_files``: see
    ``Warden.start``."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(socket_fd, False)
    name_process("elasticd-warden")
    adopt_orphans()
    WardenProcess(socket.socket(fileno=socket_fd), worker_files).run(agent_pid)
