"""The saver: a process beside the workers that writes what they hand over, and commits it.

It is no worker's child in spirit: workers may be killed at any time, and what they have handed over
is written, checked and committed all the same. It imports no torch: it moves bytes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec

from elasticd.checkpoint import disk
from elasticd.checkpoint.handover import Gone, Line, Memory, Message, Paper, is_ours
from elasticd.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    BadCheckpoint,
    File,
    digest,
    encode,
    parse_folder,
    shard_name,
)
from elasticd.checkpoint.pointer import FilePointer
from elasticd.core.facts import Saved
from elasticd.core.retention import Commit, Keep, Refused

_log = logging.getLogger(__name__)
_OTHERS_S: Final = 600.0  # how long the shards of other nodes may take
_LOOK_S: Final = 0.1  # how often to look for them: a shared disk tells nobody
_ALONE_S: Final = 30.0  # the same, once our own workers of that world are gone
_NICE: Final = 19
_T = TypeVar("_T")


class Committer(Protocol):
    """Makes a checkpoint that is on disk the newest. See ``FilePointer``."""

    def commit(self, new: Saved, keep: Keep, fence: int) -> Commit: ...


class _Receipt(msgspec.Struct, frozen=True):
    """What the savers of other nodes leave beside their shards for the one that commits."""

    file: File | None = None
    why: str = ""


@dataclass(slots=True, eq=False)
class _Plan:
    """How one rank's shard is laid out, and the memory it comes in."""

    size: int
    paper: Paper
    paper_fd: int
    buffers: dict[int, Memory] = field(default_factory=dict)
    holds: dict[int, tuple[int, str]] = field(default_factory=dict)  # buffer: (step, name) if whole

    def __del__(self) -> None:
        os.close(self.paper_fd)


@dataclass(slots=True, eq=False)
class _Gathering:
    """A checkpoint on its way: whose shards are on disk."""

    name: str
    step: int
    at: float
    began: float
    paper: Paper
    files: dict[int, File] = field(default_factory=dict)
    writing: set[int] = field(default_factory=set)
    why: str = ""  # it came to nothing
    committing: bool = False
    settled: bool = False


@dataclass(slots=True, eq=False)
class _World:
    """Those who save together, as far as they are served here."""

    path: Path
    token: str
    round: int
    fence: int
    size: int
    locals: frozenset[int]
    keep: Keep
    clients: dict[int, _Client] = field(default_factory=dict)
    plans: dict[int, _Plan] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    gatherings: dict[str, _Gathering] = field(default_factory=dict)

    @property
    def commits(self) -> bool:
        return 0 in self.locals

    def newest_held(self) -> tuple[int, str] | None:
        """The newest step, and its name, of which all shards of this node are whole in memory."""
        common = [set(plan.holds.values()) for plan in self.plans.values()]
        if not self.locals <= self.plans.keys() or not common:
            return None
        return max(set.intersection(*common), default=None)

    def forget_all_but_newest(self) -> None:
        """It is over: what is of no use any more is given back."""
        newest = self.newest_held()
        for plan in self.plans.values():
            for buffer in [b for b in plan.buffers if plan.holds.get(b) != newest or newest is None]:
                del plan.buffers[buffer]
                plan.holds.pop(buffer, None)


@dataclass(slots=True, eq=False)
class _Client:
    line: Line
    world: _World | None = None
    rank: int = -1
    plan: _Plan | None = None
    number: int = -1
    waiting: deque[tuple[Message, tuple[int, ...]]] = field(default_factory=deque)


class Saver:
    """Serves those who connect to ``listener``. ``committer_of``: by the path of the checkpoints.

    ``linger_s``: how long to stay when nobody is connected and nothing is left to do; None: for ever.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        committer_of: Callable[[Path], Committer] = FilePointer,
        pace: disk.Pace | None = None,
        linger_s: float | None = 0.0,
        first_s: float = 60.0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._listener = listener
        self._committer_of = committer_of
        self._pace = pace
        self._linger_s = linger_s
        self._first_s = first_s
        self._say = say
        self._selector = selectors.DefaultSelector()
        self._clients: set[_Client] = set()
        self._worlds: list[_World] = []
        self._jobs = 0
        self._done: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._writers = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 2)), "write")
        self._committers = ThreadPoolExecutor(8, "commit")

    def serve(self) -> None:
        """Until there is nobody to serve."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        idle_since = time.monotonic()
        linger_s = None if self._linger_s is None else self._first_s
        try:
            while True:
                if self._clients or self._jobs:
                    idle_since = time.monotonic()
                    timeout = None
                elif linger_s is None:
                    timeout = None
                else:
                    timeout = idle_since + linger_s - time.monotonic()
                    if timeout <= 0:
                        return
                for key, _ in self._selector.select(timeout):
                    if key.fileobj is self._listener:
                        self._accept()
                        linger_s = self._linger_s
                    elif key.fd == self._wake:
                        os.eventfd_read(self._wake)
                    elif key.data in self._clients:
                        self._hear(key.data)
                while self._done:
                    self._done.popleft()()
        finally:
            self._writers.shutdown(cancel_futures=True)
            self._committers.shutdown(cancel_futures=True)
            self._selector.close()

    # ------------------------------------------------------------ the workers

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = self._listener.accept()
            if not is_ours(sock):
                sock.close()
                return
            client = _Client(Line(sock))
            self._clients.add(client)
            self._selector.register(sock, selectors.EVENT_READ, client)

    def _hear(self, client: _Client) -> None:
        try:
            heard = client.line.receive(wait=False)
        except Gone:
            self._lose(client)
            return
        if heard is None:
            return
        message, files = heard
        try:
            getattr(self, f"_hear_{message['is']}")(client, message, files)
        except (KeyError, AttributeError, IndexError, ValueError, TypeError, OSError) as error:
            self._say(f"a worker was not understood ({message.get('is')}: {error!r})")
            for fd in files:
                with contextlib.suppress(OSError):
                    os.close(fd)
            self._lose(client)

    def _hear_open(self, client: _Client, message: Message, _: list[int]) -> None:
        path, token = Path(message["path"]), str(message["token"])
        world = next((w for w in self._worlds if (w.path, w.token) == (path, token)), None)
        if world is None:
            keep = Keep(int(message["last"]), int(message["every"]))
            locals_ = frozenset(map(int, message["locals"]))
            round_, fence = int(message["round"]), int(message["fence"])
            world = _World(path, token, round_, fence, int(message["world"]), locals_, keep)
            self._worlds.append(world)
        client.world, client.rank = world, int(message["rank"])
        world.clients[client.rank] = client

    def _hear_plan(self, client: _Client, message: Message, files: list[int]) -> None:
        [fd] = files
        plan = _Plan(int(message["size"]), Paper.of(fd), fd)
        client.plan, client.number = plan, int(message["plan"])
        if client.world is not None:
            client.world.plans[client.rank] = plan

    def _hear_buffer(self, client: _Client, message: Message, files: list[int]) -> None:
        [fd] = files
        plan = self._plan(client, message)
        plan.buffers[int(message["buffer"])] = Memory(fd, plan.size, writable=False)

    def _hear_torn(self, client: _Client, message: Message, _: list[int]) -> None:
        if client.plan is not None:
            client.plan.holds.pop(int(message["buffer"]), None)

    def _hear_save(self, client: _Client, message: Message, _: list[int]) -> None:
        plan, buffer, world, rank = self._plan(client, message), message["buffer"], client.world, client.rank
        name, step = str(message["name"]), int(message["step"])
        memory = plan.buffers[buffer]
        if world is None or parse_folder(name) is None:
            raise ValueError(f"{name} is no checkpoint's name")
        plan.holds[buffer] = (step, name)
        self._forget_older(world)
        gathering = world.gatherings.get(name)
        if gathering is None:
            gathering = _Gathering(name, step, float(message["at"]), time.monotonic(), plan.paper)
            world.gatherings[name] = gathering
        if rank == 0:
            gathering.paper = plan.paper
        self._miss_those_gone(world, gathering)
        if gathering.why:
            self._reply(client, {"is": "free", "plan": message["plan"], "buffer": buffer})
            self._settle_if_failed(world, gathering)
            return
        gathering.writing.add(rank)

        def written(outcome: File | BaseException) -> None:
            gathering.writing.discard(rank)
            self._reply(client, {"is": "free", "plan": message["plan"], "buffer": buffer})
            if isinstance(outcome, BaseException):
                gathering.why = (
                    gathering.why or f"the shard of rank {rank} could not be written: {_told(outcome)}"
                )
            else:
                gathering.files[rank] = outcome
            self._settle_if_failed(world, gathering)
            self._advance(world)

        folder = world.path / name
        self._run(self._writers, lambda: self._write(world, folder, rank, memory), written)

    def _hear_miss(self, client: _Client, message: Message, _: list[int]) -> None:
        world, name = client.world, str(message["name"])
        if world is None or parse_folder(name) is None:
            raise ValueError(f"{name} is no checkpoint's name")
        gathering = world.gatherings.get(name)
        if gathering is None:
            paper = client.plan.paper if client.plan else Paper(b"", b"")
            gathering = _Gathering(name, int(message["step"]), time.time(), time.monotonic(), paper)
            world.gatherings[name] = gathering
        gathering.why = gathering.why or f"rank {client.rank} could not copy: {message['why']}"
        self._settle_if_failed(world, gathering)

    def _hear_recall(self, client: _Client, message: Message, _: list[int]) -> None:
        """Only of worlds that are over: what others still write into is not to be read."""
        path = Path(message["path"])
        over = [w for w in self._worlds if w.path == path and not w.clients and w.newest_held()]
        if over:
            world = max(over, key=lambda w: (w.round, w.newest_held()))
            step, name = world.newest_held() or (0, "")
            for rank, plan in world.plans.items():
                for buffer, held in plan.holds.items():
                    if held == (step, name):
                        note: Message = {"rank": rank, "world": world.size, "round": world.round}
                        note |= {"step": step, "name": name, "size": plan.size}
                        client.line.send({"is": "held", **note}, (plan.buffers[buffer].fd, plan.paper_fd))
        client.line.send({"is": "that_is_all"})

    def _lose(self, client: _Client) -> None:
        self._clients.discard(client)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.line.socket)
        client.line.close()
        world = client.world
        if world is None:
            return
        if world.clients.get(client.rank) is client:
            del world.clients[client.rank]
        world.gone.add(client.rank)
        if not world.clients:
            world.forget_all_but_newest()
        for gathering in list(world.gatherings.values()):
            self._miss_those_gone(world, gathering)
            self._settle_if_failed(world, gathering)

    def _miss_those_gone(self, world: _World, gathering: _Gathering) -> None:
        """Whoever is gone and has not handed over never will."""
        missed = world.gone - gathering.files.keys() - gathering.writing
        if missed and not gathering.why:
            gathering.why = f"rank {min(missed)} was gone before it had handed over"

    def _advance(self, world: _World) -> None:
        """Commit the oldest if all of it is here: in order, or the older one would be refused."""
        first = next(iter(world.gatherings.values()), None)
        if first is None or first.why or first.committing or not world.locals <= first.files.keys():
            return
        if not world.commits:
            self._forget(world, first)
            return
        first.committing = True
        self._run(
            self._committers,
            lambda: self._commit(world, first),
            lambda outcome: self._settle(world, first, outcome),
        )

    def _plan(self, client: _Client, message: Message) -> _Plan:
        if client.plan is None or client.number != message["plan"]:
            raise ValueError(f"plan {message['plan']} is not known")
        return client.plan

    def _reply(self, client: _Client, message: Message) -> None:
        if client in self._clients:
            with contextlib.suppress(Gone):  # it is noticed where we read
                client.line.send(message, wait=False)

    # ------------------------------------------------------------ memory

    def _forget_older(self, newest: _World) -> None:
        """Once a world has handed over, the memory of those before it is given back."""
        if newest.locals <= {rank for rank, plan in newest.plans.items() if plan.holds}:
            for world in [w for w in self._worlds if w.path == newest.path and w is not newest]:
                if not world.clients and not world.gatherings:
                    self._worlds.remove(world)

    # ------------------------------------------------------------ the disk

    def _run(
        self,
        pool: ThreadPoolExecutor,
        job: Callable[[], _T],
        then: Callable[[_T | BaseException], None],
    ) -> None:
        """Run it in a thread, and what follows in the loop."""

        def finished(future: Future[_T]) -> None:
            error = future.exception()
            outcome: _T | BaseException = future.result() if error is None else error

            def close() -> None:
                self._jobs -= 1
                then(outcome)

            self._done.append(close)
            os.eventfd_write(self._wake, 1)

        self._jobs += 1
        pool.submit(job).add_done_callback(finished)

    def _write(self, world: _World, folder: Path, rank: int, memory: Memory) -> File:
        disk.make_folder(folder)
        receipt = folder / f"{shard_name(rank)}.receipt"
        try:
            file = disk.write_file(folder / shard_name(rank), memory.view, self._pace)
        except OSError as error:
            if not world.commits:
                with contextlib.suppress(OSError):
                    disk.replace_file(receipt, msgspec.json.encode(_Receipt(why=_told(error))))
            raise
        if not world.commits:
            disk.replace_file(receipt, msgspec.json.encode(_Receipt(file)))
        return file

    def _commit(self, world: _World, gathering: _Gathering) -> Saved:
        folder = world.path / gathering.name
        files = dict(gathering.files)
        for rank in sorted(set(range(world.size)) - files.keys()):
            files[rank] = self._elsewhere(world, gathering, rank)
        metadata = disk.write_file(folder / METADATA, memoryview(gathering.paper.metadata))
        listed = [*(files[rank] for rank in sorted(files)), metadata]
        manifest = encode(
            gathering.name,
            gathering.step,
            world.round,
            world.size,
            gathering.at,
            listed,
            gathering.paper.index,
        )
        disk.sync_folder(folder)
        disk.write_file(folder / MANIFEST, memoryview(manifest))
        disk.sync_folder(folder)
        size = sum(f.size for f in listed) + len(manifest)
        saved = Saved(
            gathering.name, gathering.step, world.round, world.size, gathering.at, size, digest(manifest)
        )
        made = self._committer_of(world.path).commit(saved, world.keep, world.fence)
        for old in made.dropped:
            disk.remove_folder(world.path / old.name)
        self._sweep(world, made, saved)
        return saved

    def _elsewhere(self, world: _World, gathering: _Gathering, rank: int) -> File:
        """What another node's saver says of its shard, once it is there."""
        receipt = world.path / gathering.name / f"{shard_name(rank)}.receipt"
        alone_since: float | None = None
        while True:
            with contextlib.suppress(FileNotFoundError):
                said = msgspec.json.decode(receipt.read_bytes(), type=_Receipt)
                if said.file is None:
                    raise TimeoutError(f"the shard of rank {rank} could not be written: {said.why}")
                receipt.unlink()
                return said.file
            now = time.monotonic()
            alone_since = None if world.clients else alone_since or now
            waited_s = _OTHERS_S if alone_since is None else alone_since + _ALONE_S - gathering.began
            if now > gathering.began + waited_s:
                raise TimeoutError(f"the shard of rank {rank}, which is on another node, never came")
            time.sleep(_LOOK_S)

    def _sweep(self, world: _World, made: Commit, new: Saved) -> None:
        """Remove what was begun and can never be committed any more."""
        committed = {s.name for s in made.checkpoint.saved}
        for entry in os.scandir(world.path):
            there = parse_folder(entry.name)
            if there is None or entry.name in committed:
                continue
            # Whoever still writes there would be refused, by the rule of ``retention.commit``.
            if (there.round, there.step) <= (new.round, new.step):
                disk.remove_folder(Path(entry.path))

    def _settle(self, world: _World, gathering: _Gathering, outcome: Saved | BaseException) -> None:
        if isinstance(outcome, BaseException):
            refused = isinstance(outcome, Refused | BadCheckpoint | TimeoutError)
            gathering.why = str(outcome) if refused else f"it could not be committed: {_told(outcome)}"
            self._settle_if_failed(world, gathering)
            return
        self._forget(world, gathering)
        took_s = time.monotonic() - gathering.began
        self._tell(
            world,
            {
                "is": "committed",
                "name": outcome.name,
                "step": outcome.step,
                "took_s": took_s,
                "size": outcome.size,
            },
        )
        self._say(
            f"committed step {outcome.step} as {outcome.name} ({outcome.size / 1e6:.1f} MB, {took_s:.2f} s)"
        )

    def _settle_if_failed(self, world: _World, gathering: _Gathering) -> None:
        """Once nothing writes there any more, say so, and remove what was written."""
        if not gathering.why or gathering.writing or gathering.settled:
            return
        gathering.settled = True
        if world.commits:
            folder = world.path / gathering.name
            self._run(
                self._committers, lambda: disk.remove_folder(folder), lambda _: self._forget(world, gathering)
            )
        else:
            self._forget(world, gathering)
        self._tell(
            world, {"is": "failed", "name": gathering.name, "step": gathering.step, "why": gathering.why}
        )
        self._say(f"step {gathering.step} was not saved as {gathering.name}: {gathering.why}")

    def _forget(self, world: _World, gathering: _Gathering) -> None:
        world.gatherings.pop(gathering.name, None)
        self._advance(world)

    def _tell(self, world: _World, message: Message) -> None:
        for client in list(world.clients.values()):
            self._reply(client, message)


def _told(error: BaseException) -> str:
    return (
        f"{error.strerror} ({error.filename})"
        if isinstance(error, OSError) and error.filename
        else str(error)
    )


def be_modest() -> None:
    """Take what processor and disk time the training leaves."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main(fd: int, options: str = "{}") -> None:
    """The process: serve a listening socket that it was given. ``options``: JSON of ``linger_s``
    and ``bytes_s`` (how much to write per second at most)."""
    given: dict[str, Any] = json.loads(options)
    be_modest()
    bytes_s = given.get("bytes_s")
    pace = disk.Pace(bytes_s, time.monotonic, time.sleep) if bytes_s else None

    def say(sentence: str) -> None:
        print(f"elasticd saver: {sentence}", file=sys.stderr, flush=True)

    listener = socket.socket(fileno=fd)
    Saver(listener, pace=pace, linger_s=given.get("linger_s", 0.0), say=say).serve()
