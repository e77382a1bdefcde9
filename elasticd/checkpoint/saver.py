"""The saver: a process beside the workers that writes what they hand over, and commits it.

It is no worker's child in spirit: workers may be killed at any time, and what they have handed over
is written, checked and committed all the same. It imports no torch: it moves bytes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from elasticd.checkpoint.committing import Committer, Committing, told
from elasticd.checkpoint.handover import Gone, Line, Memory, Message, Paper, is_ours
from elasticd.checkpoint.jobs import Jobs
from elasticd.checkpoint.manifest import BadCheckpoint, File, parse_folder
from elasticd.checkpoint.pace import Pace
from elasticd.checkpoint.pointer import FilePointer
from elasticd.checkpoint.replicas import Label, Replica, offers
from elasticd.checkpoint.replication import Replication
from elasticd.checkpoint.report import Fate, Footprint, Report
from elasticd.checkpoint.store import Store, store_at
from elasticd.checkpoint.worlds import Gathering, Plan, World
from elasticd.core.facts import Checkpoint, Holder, Saved
from elasticd.core.replicas import Offer
from elasticd.core.retention import Keep, Refused


@dataclass(slots=True, eq=False)
class _Client:
    line: Line
    world: World | None = None
    rank: int = -1
    plan: Plan | None = None
    number: int = -1


class Saver:
    """Serves those who connect to ``listener``. ``committer_of``: by the store of the checkpoints.

    ``linger_s``: how long to stay when nobody is connected and nothing is left to do; None: for ever.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        committer_of: Callable[[Store], Committer] = FilePointer,
        pace: Pace | None = None,
        linger_s: float | None = 0.0,
        first_s: float = 60.0,
        say: Callable[[str], None] = lambda _: None,
        report: Callable[[Report], None] = lambda _: None,
        occupies: Callable[[Footprint], None] = lambda _: None,
        replication: Replication | None = None,
    ) -> None:
        self._listener = listener
        self._committing = Committing(committer_of, pace)
        self._linger_s = linger_s
        self._first_s = first_s
        self._say = say
        self._report = report
        self._occupies = occupies
        self._footprint = Footprint()
        self._replication = replication
        self._selector = selectors.DefaultSelector()
        self._clients: set[_Client] = set()
        self._worlds: list[World] = []
        self._jobs = Jobs()
        self._leaves = False
        self._writers = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 2)), "write")
        self._committers = ThreadPoolExecutor(8, "commit")
        self._witnesses = ThreadPoolExecutor(2, "witness")

    def leave(self) -> None:
        """Return from ``serve`` once nothing is left to do. Signal handlers may call this."""
        self._leaves = True
        self._jobs.wake()

    def serve(self) -> None:
        """Until there is nobody to serve."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._jobs.fd, selectors.EVENT_READ)
        if self._replication is not None:
            self._replication.join(self._jobs, self._over)
            self._selector.register(self._replication.listener, selectors.EVENT_READ, self._replication)
        idle_since = time.monotonic()
        linger_s = None if self._linger_s is None else self._first_s
        try:
            while True:
                leaves = self._leaves and not self._jobs
                if leaves:
                    timeout: float | None = 0.0  # what was said before is heard first
                elif self._clients or self._jobs:
                    idle_since = time.monotonic()
                    timeout = None
                elif linger_s is None:
                    timeout = None
                else:
                    timeout = idle_since + linger_s - time.monotonic()
                    if timeout <= 0:
                        return
                ready = self._selector.select(timeout)
                if leaves and not ready:
                    return
                for key, _ in ready:
                    if key.fileobj is self._listener:
                        self._accept()
                        linger_s = self._linger_s
                    elif self._replication is not None and key.data is self._replication:
                        self._replication.accept()
                    elif key.data in self._clients:
                        self._hear(key.data)
                self._jobs.finish()
                self._measure()
        finally:
            self._writers.shutdown(cancel_futures=True)
            self._committers.shutdown(cancel_futures=True)
            self._witnesses.shutdown(cancel_futures=True)
            if self._replication is not None:
                self._replication.close()
            self._selector.close()
            self._jobs.close()

    def _measure(self) -> None:
        replicas = self._replication.size if self._replication is not None else 0
        now = Footprint(sum(world.memory for world in self._worlds), replicas)
        if now != self._footprint:
            self._footprint = now
            self._occupies(now)

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
        store, token = store_at(message["path"]), str(message["token"])
        world = next((w for w in self._worlds if (w.store.url, w.token) == (store.url, token)), None)
        if world is None:
            keep = Keep(int(message["last"]), int(message["every"]))
            locals_ = frozenset(map(int, message["locals"]))
            round_, fence = int(message["round"]), int(message["fence"])
            world = World(store, token, round_, fence, int(message["world"]), locals_, keep)
            world.holder = str(message.get("holder", "")) if self._replication is not None else ""
            self._worlds.append(world)
            if world.commits:
                self._witnesses.submit(self._committing.open, world)
        client.world, client.rank = world, int(message["rank"])
        world.lines[client.rank] = client.line

    def _hear_plan(self, client: _Client, message: Message, files: list[int]) -> None:
        [fd] = files
        plan = Plan(int(message["size"]), Paper.of(fd), fd)
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
        if not world.settled and all(
            (step, name) in world.plans[r].holds.values() if r in world.plans else False for r in world.locals
        ):
            world.handed.add(name)
        self._forget_older(world)
        gathering = world.gatherings.get(name)
        if gathering is None:
            gathering = Gathering(name, step, float(message["at"]), time.monotonic(), plan.paper)
            world.gatherings[name] = gathering
            if world.commits:
                gathering.witness = self._witnesses.submit(self._committing.witness, world)
        if rank == min(world.locals):
            self._report(Report(Fate.COPIED, step, name, blocked_s=float(message.get("blocked_s", 0.0))))
        gathering.heard.add(rank)
        if rank == 0:
            gathering.paper = plan.paper
        self._miss_those_gone(world, gathering)
        if gathering.why:
            for what in ("copied", "free"):
                _reply(client.line, {"is": what, "plan": message["plan"], "buffer": buffer})
            self._settle_if_failed(world, gathering)
            return
        gathering.writing.add(rank)
        note: Message = {"plan": message["plan"], "buffer": buffer}
        using = {"disk"}  # of the buffer, which is free when nobody does
        if world.holder and self._replication is not None:
            using.add(world.holder)
            label = Label(world.store.url, name, world.round, step, world.size, rank)

            def copied(why: str) -> None:
                if why:
                    self._say(f"no copy of rank {rank}'s shard of step {step} is held elsewhere: {why}")
                _reply(client.line, {"is": "copied", **note})
                used(world.holder)

            self._replication.push(world.holder, label, plan.paper.index, memory, copied)

        def used(by: str) -> None:
            using.discard(by)
            if not using:
                _reply(client.line, {"is": "free", **note})

        def written(outcome: File | BaseException) -> None:
            gathering.writing.discard(rank)
            used("disk")
            if isinstance(outcome, BaseException):
                gathering.why = (
                    gathering.why or f"the shard of rank {rank} could not be written: {told(outcome)}"
                )
            else:
                gathering.files[rank] = outcome
            self._settle_if_failed(world, gathering)
            self._advance(world)

        self._jobs.run(self._writers, lambda: self._committing.write(world, name, rank, memory), written)

    def _hear_miss(self, client: _Client, message: Message, _: list[int]) -> None:
        world, name = client.world, str(message["name"])
        if world is None or parse_folder(name) is None:
            raise ValueError(f"{name} is no checkpoint's name")
        gathering = world.gatherings.get(name)
        if gathering is None:
            paper = client.plan.paper if client.plan else Paper(b"", b"")
            gathering = Gathering(name, int(message["step"]), time.time(), time.monotonic(), paper)
            world.gatherings[name] = gathering
        gathering.heard.add(client.rank)
        gathering.why = gathering.why or f"rank {client.rank} could not copy: {message['why']}"
        self._settle_if_failed(world, gathering)

    def _hear_skip(self, client: _Client, message: Message, _: list[int]) -> None:
        if client.world is not None and client.world.commits and client.rank == 0:
            self._report(Report(Fate.SKIPPED, int(message["step"])))

    def _hear_known(self, client: _Client, message: Message, _: list[int]) -> None:
        """It may have been committed, and the copy of that not yet written where workers can read it."""
        store = store_at(message["path"])

        def told_(outcome: tuple[Checkpoint, bool] | BaseException) -> None:
            if isinstance(outcome, BaseException):
                _reply(
                    client.line, {"is": "known", "why": f"what is committed cannot be read: {told(outcome)}"}
                )
                return
            known, own = outcome
            _reply_at_length(client.line, {"is": "known", "own": own}, known)

        self._jobs.run(self._witnesses, lambda: self._committing.known(store), told_)

    def _hear_survey(self, client: _Client, message: Message, _: list[int]) -> None:
        path = str(message["path"])

        def found(offered: list[Offer]) -> None:
            _reply_at_length(client.line, {"is": "offers"}, offered)

        if self._replication is not None:
            self._replication.survey(path, found)
        else:
            found(offers(self._over(path), ""))

    def _hear_lend(self, client: _Client, message: Message, _: list[int]) -> None:
        path, name = str(message["path"]), str(message["name"])
        here = self._over(path) if self._replication is None else self._replication.held(path)
        for replica in here:
            if replica.label.name == name:
                paper = Paper(replica.index, b"").file()
                try:
                    client.line.send({"is": "held", "rank": replica.label.rank}, (replica.memory.fd, paper))
                finally:
                    os.close(paper)

        def found(places: list[Holder]) -> None:
            _reply_at_length(client.line, {"is": "places"}, places)

        if self._replication is not None:
            self._replication.places(map(str, message["nodes"]), found)
        else:
            found([])

    def _over(self, path: str) -> list[Replica]:
        """What is whole here of worlds that are over: what others still write into is not to be read."""
        over = [w for w in self._worlds if w.store.url == path and not w.lines]
        return [replica for world in over for replica in world.whole()]

    def _lose(self, client: _Client) -> None:
        self._clients.discard(client)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.line.socket)
        client.line.close()
        world = client.world
        if world is None:
            return
        if world.lines.get(client.rank) is client.line:
            del world.lines[client.rank]
        world.gone.add(client.rank)
        if not world.lines:
            world.forget_all_but_newest()
        for gathering in list(world.gatherings.values()):
            self._miss_those_gone(world, gathering)
            self._settle_if_failed(world, gathering)

    def _miss_those_gone(self, world: World, gathering: Gathering) -> None:
        """Whoever is gone and has not handed over never will."""
        missed = world.gone - gathering.files.keys() - gathering.writing
        if missed and not gathering.why:
            gathering.why = f"rank {min(missed)} was gone before it had handed over"

    def _advance(self, world: World) -> None:
        """Commit the oldest if all of it is here: in order, or the older one would be refused."""
        first = next(iter(world.gatherings.values()), None)
        if first is None or first.why or first.committing or not world.locals <= first.files.keys():
            return
        first.committing = True
        if not world.commits:

            def handed_in(outcome: BaseException | None) -> None:
                if outcome is None:
                    self._tell(world, {"is": "written", "name": first.name})
                    self._forget(world, first)
                else:
                    first.why = f"the one that commits could not be told of it: {told(outcome)}"
                    self._settle_if_failed(world, first)

            self._jobs.run(self._committers, lambda: self._committing.hand_in(world, first), handed_in)
            return
        self._jobs.run(
            self._committers,
            lambda: self._committing.commit(world, first),
            lambda outcome: self._settle(world, first, outcome),
        )

    def _plan(self, client: _Client, message: Message) -> Plan:
        if client.plan is None or client.number != message["plan"]:
            raise ValueError(f"plan {message['plan']} is not known")
        return client.plan

    # ------------------------------------------------------------ memory

    def _forget_older(self, newest: World) -> None:
        """Once a world has handed over, the memory of those before it is given back."""
        if newest.settled:
            for world in [w for w in self._worlds if w.store.url == newest.store.url and w is not newest]:
                if not world.lines and not world.gatherings:
                    self._worlds.remove(world)
            if self._replication is not None:
                self._replication.forget(newest.store.url, before=newest.round)

    # ------------------------------------------------------------ what became of them

    def _settle(self, world: World, gathering: Gathering, outcome: Saved | BaseException) -> None:
        if isinstance(outcome, BaseException):
            refused = isinstance(outcome, Refused | BadCheckpoint | TimeoutError)
            gathering.why = str(outcome) if refused else f"it could not be committed: {told(outcome)}"
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
        self._report(Report(Fate.COMMITTED, outcome.step, outcome.name, took_s=took_s, size=outcome.size))

    def _settle_if_failed(self, world: World, gathering: Gathering) -> None:
        """Say so once nothing writes there any more. Once no rank here will come with it, what was written
        is removed, and it is the turn of the next."""
        if not gathering.why or gathering.writing:
            return
        if not gathering.failed:
            gathering.failed = True
            failed = {"name": gathering.name, "step": gathering.step, "why": gathering.why}
            self._tell(world, {"is": "failed", **failed})
            if world.commits:
                self._report(Report(Fate.FAILED, gathering.step, gathering.name, why=gathering.why))
            else:
                self._jobs.run(
                    self._writers, lambda: self._committing.refuse(world, gathering), lambda _: None
                )
        if not gathering.settled and world.locals <= gathering.heard | world.gone:
            gathering.settled = True
            if world.commits:
                self._jobs.run(
                    self._committers,
                    lambda: self._committing.discard(world, gathering),
                    lambda _: self._forget(world, gathering),
                )
            else:
                self._forget(world, gathering)

    def _forget(self, world: World, gathering: Gathering) -> None:
        world.gatherings.pop(gathering.name, None)
        self._advance(world)

    def _tell(self, world: World, message: Message) -> None:
        for line in world.lines.values():
            _reply(line, message)


def _reply(line: Line, message: Message, *files: int) -> None:
    with contextlib.suppress(Gone):  # it is noticed where we read
        line.send(message, files, wait=False)


def _reply_at_length(line: Line, message: Message, what: object) -> None:
    """In a file: of a large job it may be more than a socket holds."""
    file = Paper(msgspec.json.encode(what), b"").file()
    try:
        _reply(line, message, file)
    finally:
        os.close(file)
