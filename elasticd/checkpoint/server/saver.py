"""The saver: a process beside the workers that writes and commits the shards that they hand over.

Workers may be killed at any time. The saver still writes and commits the shards that they handed over. The
saver imports no torch: it only moves bytes.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, assert_never

from elasticd.channel.codec import BadMessage, ChannelClosed
from elasticd.channel.framing import close_all, is_ours
from elasticd.checkpoint.format.layout import Layout
from elasticd.checkpoint.format.manifest import BadCheckpoint, Unreadable
from elasticd.checkpoint.newest.pointer import Committer, FilePointer
from elasticd.checkpoint.newest.retention import Keep
from elasticd.checkpoint.protocol import (
    SAVER_TO_WORKER,
    WORKER_TO_SAVER,
    Admitted,
    Alive,
    AllHeld,
    AskAlive,
    AskKnown,
    AskOffers,
    AskSavers,
    AskShards,
    AwaitSaves,
    BufferCopied,
    BufferFree,
    BufferTorn,
    Known,
    KnownUnreadable,
    MissSave,
    Offers,
    OpenWorld,
    PlanShard,
    ProveSecret,
    SaverAddresses,
    SaveShard,
    ShardHeld,
    ShareBuffer,
    SkipSave,
    WorkerChannel,
    WorkerToSaver,
    descends_from,
    memory_file,
    read_memory_file,
)
from elasticd.checkpoint.replication.replicas import Label, Offer, Replica, offers
from elasticd.checkpoint.server.background import Background
from elasticd.checkpoint.server.committing import Committing
from elasticd.checkpoint.server.pipeline import SavePipeline
from elasticd.checkpoint.server.replicating import Replication
from elasticd.checkpoint.server.save_report import Fate, Footprint, SaveReport
from elasticd.checkpoint.server.shards import SavingWorld, ShardPlan
from elasticd.checkpoint.shared_memory import Memory
from elasticd.checkpoint.storage import CheckpointStore, error_text, store_at
from elasticd.checkpoint.storage.rate_limit import RateLimit
from elasticd.core.checkpoint_names import WORLD_MAX, require_name
from elasticd.core.facts import Checkpoint, SaverAddress

_SHORT_PAUSE_S: Final = 0.1
_STRANGERS_S: Final = 60.0  # a rejected process is reported once in this time
_FIRST_S: Final = 60.0  # how long to wait for the first client, unless the saver stays for ever
_ENDING_S: Final = 5.0  # how long the kernel may take a worker down while others ask for what is in memory
_UNSETTLED: Final = 2  # earlier worlds to keep while other nodes may have no shards of the newest world


@dataclass(slots=True, eq=False)
class _Client:
    line: WorkerChannel
    world: SavingWorld | None = None
    rank: int = -1
    plan: ShardPlan | None = None
    number: int = -1
    waits: bool = False  # the client's training waits until its saves are durable
    admitted: bool = True


class _Asked(NamedTuple):
    """A client that has asked for offers of a path, and is answered at ``until`` at the latest."""

    client: _Client
    path: str
    until: float


class Saver:
    """Serves the workers that connect to ``listener``. ``committer_of`` returns the committer of a store.

    ``agent``: only descendants of this pid are admitted; ``secret``: only clients that send it first.
    ``linger_s``: how long to stay without clients and without work; None: for ever. ``occupies`` is called
    when the saver's memory grows or shrinks.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        committer_of: Callable[[CheckpointStore], Committer] = FilePointer,
        agent: int | None = None,
        secret: str = "",
        pace: RateLimit | None = None,
        linger_s: float | None = 0.0,
        say: Callable[[str], None] = lambda _: None,
        report: Callable[[SaveReport], None] = lambda _: None,
        occupies: Callable[[Footprint], None] = lambda _: None,
        replication: Replication | None = None,
    ) -> None:
        self._listener = listener
        self._agent, self._secret = agent, secret
        self._met = False  # whether a client was ever admitted
        self._short = False  # whether a client could not be admitted for lack of a file descriptor
        self._linger_s = linger_s
        self._say = say
        self._report = report
        self._occupies = occupies
        self._footprint = Footprint()
        self._replication = replication
        self._selector = selectors.DefaultSelector()
        self._clients: set[_Client] = set()
        self._asked: list[_Asked] = []
        self._worlds: list[SavingWorld] = []
        self._jobs = Background() if replication is None else replication.jobs
        self._committing = Committing(committer_of, say)
        self._pipeline = SavePipeline(self._jobs, self._committing, pace, report)
        self._pace = pace
        self._leaves = False
        self._stranger_at = -_STRANGERS_S  # when a rejected process was last reported

    def leave(self) -> None:
        """Return from ``serve`` once nothing is left to do. Signal handlers may call this."""
        self._leaves = True
        self._jobs.wake()

    def serve(self) -> None:
        """Serve until no client and no work is left for ``linger_s``, or until ``leave``."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._jobs.fd, selectors.EVENT_READ)
        if self._replication is not None:
            self._replication.join(self._over)
            self._selector.register(self._replication.listener, selectors.EVENT_READ, self._replication)
        idle_since = time.monotonic()
        linger_s = None if self._linger_s is None else _FIRST_S
        try:
            while True:
                if self._pace is not None:
                    self._pace.hurry(not self._trains())
                leaves = self._leaves and not self._jobs
                if leaves:
                    timeout: float | None = 0.0  # only read messages that have arrived already
                elif self._clients or self._jobs:
                    idle_since = time.monotonic()
                    timeout = None
                elif linger_s is None:
                    timeout = None
                else:
                    timeout = idle_since + linger_s - time.monotonic()
                    if timeout <= 0:
                        return
                if self._asked:
                    left = max(0.0, min(asked.until for asked in self._asked) - time.monotonic())
                    timeout = left if timeout is None else min(timeout, left)
                ready = self._selector.select(timeout)
                if leaves and not ready:
                    return
                for key, events in ready:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif self._replication is not None and key.data is self._replication:
                        self._replication.accept()
                    elif key.data in self._clients and events & selectors.EVENT_WRITE:
                        self._flush(key.data)
                    elif key.data in self._clients:
                        self._hear(key.data)
                if self._met:
                    linger_s = self._linger_s
                self._jobs.finish()
                self._answer_asked()
                self._choose_events()
                self._measure()
        finally:
            self._pipeline.close()
            if self._replication is not None:
                self._replication.close()
            self._selector.close()
            self._jobs.close()

    def _trains(self) -> bool:
        """Return whether writing could slow a training down: workers are connected, and none waits for a
        save."""
        saving = [client for client in self._clients if client.world is not None]
        return bool(saving) and not self._leaves and not any(client.waits for client in saving)

    def _measure(self) -> None:
        replicas = self._replication.size if self._replication is not None else 0
        now = Footprint(sum(world.memory for world in self._worlds), replicas)
        if now != self._footprint:
            self._footprint = now
            self._occupies(now)

    # ------------------------------------------------------------ the workers

    def _accept(self) -> None:
        """Accept all pending connections, and handle the first message of each."""
        try:
            while True:
                sock, _ = self._listener.accept()
                if not is_ours(sock) or (self._agent is not None and not descends_from(sock, self._agent)):
                    sock.close()
                    self._note_stranger()
                    continue
                line = WorkerChannel(sock, SAVER_TO_WORKER, WORKER_TO_SAVER)
                client = _Client(line, admitted=not self._secret)
                if client.admitted:
                    line.try_send(Admitted())
                self._met = self._met or client.admitted
                self._clients.add(client)
                self._selector.register(sock, selectors.EVENT_READ, client)
                self._hear(client)
        except BlockingIOError:
            pass
        except OSError as error:
            if not self._short:
                self._say(f"a worker cannot be admitted now: {error.strerror}")
            self._short = True
            time.sleep(_SHORT_PAUSE_S)  # pause, since the listener stays readable

    def _note_stranger(self) -> None:
        """Report a rejected process, at most once in ``_STRANGERS_S``: any process of the machine can
        connect."""
        now = time.monotonic()
        if now >= self._stranger_at + _STRANGERS_S:
            self._stranger_at = now
            self._say("a process that is no worker of this job was rejected")

    def _choose_events(self) -> None:
        """Read no more from a client that has not read its answers."""
        for client in self._clients:
            wanted = selectors.EVENT_WRITE if client.line.pending else selectors.EVENT_READ
            if self._selector.get_key(client.line.socket).events != wanted:
                self._selector.modify(client.line.socket, wanted, client)

    def _flush(self, client: _Client) -> None:
        try:
            client.line.flush()
        except ChannelClosed:
            self._lose(client)

    def _hear(self, client: _Client) -> bool:
        """Handle one message of the client. Return whether there was one."""
        try:
            heard = client.line.poll()
        except BadMessage as error:
            self._refuse(client, str(error))
            return True
        except ChannelClosed:
            self._lose(client)
            return True
        if heard is None:
            return False
        message, files = heard
        try:
            self._obey(client, message, files)
        except Exception as error:  # noqa: BLE001  # no client may end the saver, which others use
            close_all(files)
            self._refuse(client, f"{type(message).__name__}: {error!r}")
        return True

    def _refuse(self, client: _Client, why: str) -> None:
        self._say(f"a worker sent an invalid message and was disconnected ({why})")
        if client.plan is not None:
            client.plan.holds.clear()  # the worker may now change its buffers without a ``BufferTorn``
        self._lose(client)

    def _obey(self, client: _Client, message: WorkerToSaver, files: list[int]) -> None:
        """Handle a message. Raises an exception if the message is not valid: the caller then closes the
        files."""
        if not client.admitted and not isinstance(message, ProveSecret):
            raise ValueError("it has not sent the secret of this job")
        if len(files) != isinstance(message, PlanShard | ShareBuffer):
            raise ValueError(f"it carries {len(files)} files")
        match message:
            case ProveSecret(secret):
                if not hmac.compare_digest(secret.encode(errors="replace"), self._secret.encode()):
                    raise ValueError("it does not know the secret of this job")
                client.admitted = self._met = True
            case OpenWorld():
                self._open(client, message)
            case PlanShard(number, size):
                if size < 0:
                    raise ValueError(f"a shard of {size} bytes")
                plan = ShardPlan(size, Layout(read_memory_file(files[0])))
                os.close(files[0])
                client.plan, client.number = plan, number
                if client.world is not None:
                    client.world.plans[client.rank] = plan
            case ShareBuffer(number, buffer):
                plan = self._plan(client, number)
                plan.buffers[buffer] = Memory(files[0], plan.size, writable=False)
            case BufferTorn(buffer):
                if client.plan is not None:
                    client.plan.holds.pop(buffer, None)
            case SaveShard():
                self._save(client, message)
            case MissSave():
                self._miss(client, message)
            case SkipSave(step):
                if client.world is not None and client.world.commits and client.rank == 0:
                    self._report(SaveReport(Fate.SKIPPED, step))
            case AwaitSaves(on):
                client.waits = on
            case AskKnown(path, own):
                self._tell_known(client, path, own=own)
            case AskOffers(path):
                self._tell_offers(client, path)
            case AskShards():
                self._lend(client, message)
            case AskSavers(nodes):
                self._tell_addresses(client, nodes)
            case AskAlive():
                client.line.try_send(Alive())
            case _:
                assert_never(message)

    def _catch_up(self, client: _Client) -> None:
        """Read all messages that other clients sent before the client asked for offers. Clients that have
        left are then known to have left, and their shards can be offered."""
        for other in self._clients - {client}:
            while other in self._clients and self._hear(other):
                pass

    def _open(self, client: _Client, message: OpenWorld) -> None:
        store, token = store_at(message.path), message.token
        world = next((w for w in self._worlds if (w.store.url, w.token) == (store.url, token)), None)
        same = world is None or (world.size, world.locals) == (message.world, frozenset(message.locals))
        if not same:
            raise ValueError("its world was opened with other ranks")
        possible = all(0 <= rank < message.world <= WORLD_MAX for rank in message.locals)
        if message.rank not in message.locals or not possible:
            raise ValueError(f"rank {message.rank} of {message.world}, with {message.locals} on this node")
        if world is None:
            keep, locals_ = Keep(message.last, message.every), frozenset(message.locals)
            world = SavingWorld(store, token, message.round, message.fence, message.world, locals_, keep)
            world.holder = message.holder if self._replication is not None else ""
            self._worlds.append(world)
            self._pipeline.open(world)
        client.world, client.rank = world, message.rank
        world.lines[client.rank] = client.line
        world.left.discard(client.rank)

    def _save(self, client: _Client, message: SaveShard) -> None:
        plan, world, rank = self._plan(client, message.plan), client.world, client.rank
        name, step, buffer = message.name, message.step, message.buffer
        memory = plan.buffers[buffer]
        if world is None:
            raise ValueError("it has not sent OpenWorld")
        require_name(name, step, world.round, world.size)
        plan.holds[buffer] = (step, name)
        if not world.settled and all(
            (step, name) in world.plans[r].holds.values() if r in world.plans else False for r in world.locals
        ):
            world.handed.add(name)
        self._forget_older(world)
        save = self._pipeline.find_or_begin(world, name, step, message.at, plan.layout)
        if rank == min(world.locals):
            self._report(SaveReport(Fate.COPIED, step, name, blocked_s=message.blocked_s))
        save.answered.add(rank)
        if rank == 0:
            save.layout = plan.layout
        self._pipeline.fail_if_ranks_left(world, save)
        copied_note, free_note = BufferCopied(message.plan, buffer), BufferFree(message.plan, buffer)
        using: set[str] = set()  # the readers of the buffer; the buffer is free when the set is empty
        if world.holder and self._replication is not None:
            using.add(world.holder)
            label = Label(world.store.url, name, world.round, step, world.size, rank)

            def copied(why: str) -> None:
                if why:
                    self._say(f"rank {rank}'s shard of step {step} was not copied to another node: {why}")
                client.line.try_send(copied_note)
                used(world.holder)

            self._replication.push(world.holder, label, plan.layout, memory, copied)

        def used(by: str) -> None:
            using.discard(by)
            if not using:
                client.line.try_send(free_note)

        if save.why:  # the other node may have a copy all the same
            self._pipeline.settle_if_failed(world, save)
        else:
            using.add("disk")
            self._pipeline.write(world, save, rank, memory, lambda: used("disk"))
        if not using:
            client.line.try_send(free_note)

    def _miss(self, client: _Client, message: MissSave) -> None:
        world, name = client.world, message.name
        if world is None:
            raise ValueError("it has not sent OpenWorld")
        require_name(name, message.step, world.round, world.size)
        layout = client.plan.layout if client.plan else Layout(b"")
        save = self._pipeline.find_or_begin(world, name, message.step, time.time(), layout)
        save.answered.add(client.rank)
        save.why = save.why or f"rank {client.rank} could not copy its shard: {message.why}"
        self._pipeline.settle_if_failed(world, save)

    def _tell_known(self, client: _Client, path: str, *, own: bool) -> None:
        def answer(outcome: Checkpoint | BaseException) -> None:
            if isinstance(outcome, BaseException):
                why = f"the committed checkpoints cannot be read: {error_text(outcome)}"
                lasting = isinstance(outcome, BadCheckpoint) and not isinstance(outcome, Unreadable)
                client.line.try_send(KnownUnreadable(why, lasting))
            else:
                client.line.try_send(Known(outcome))

        store = store_at(path)
        # The committer is asked, because the file that workers can read may lag behind.
        self._jobs.run(self._pipeline.askers, lambda: self._committing.committer(store).read(own=own), answer)

    def _tell_offers(self, client: _Client, path: str) -> None:
        """Tell the client which states are in memory. If some workers of a world have left, wait first until
        the others have left, too. The connection of a killed worker stays until the kernel has taken the
        process down."""
        self._catch_up(client)
        if self._is_ending(path):
            self._asked.append(_Asked(client, path, time.monotonic() + _ENDING_S))
        else:
            self._offer(client, path)

    def _is_ending(self, path: str) -> bool:
        return any(w.store.url == path and w.lines and w.left for w in self._worlds)

    def _answer_asked(self) -> None:
        """Answer the clients that have waited for the end of a world, if that world has ended."""
        for asked in self._asked[:]:
            if time.monotonic() >= asked.until or not self._is_ending(asked.path):
                self._asked.remove(asked)
                if asked.client in self._clients:
                    self._offer(asked.client, asked.path)

    def _offer(self, client: _Client, path: str) -> None:
        def found(offered: list[Offer]) -> None:
            client.line.try_send(Offers(tuple(offered)))

        if self._replication is not None:
            self._replication.survey(path, found)
        else:
            found(offers(self._over(path), ""))

    def _lend(self, client: _Client, message: AskShards) -> None:
        path = message.path
        here = self._over(path) if self._replication is None else self._replication.held(path)
        wanted = [replica for replica in here if replica.label.name == message.name]

        def lend(outcome: list[bytes] | BaseException) -> None:
            if client not in self._clients:
                return
            try:
                if not isinstance(outcome, BaseException):  # otherwise other nodes may have a valid index
                    for replica, index in zip(wanted, outcome, strict=True):
                        self._lend_one(client, replica, index)
                client.line.try_send(AllHeld())
            except ChannelClosed:
                self._lose(client)
            except OSError as error:  # there is no descriptor, or no memory
                self._refuse(client, f"AskShards: {error!r}")

        self._jobs.run(self._pipeline.lenders, lambda: [replica.layout.index for replica in wanted], lend)

    def _lend_one(self, client: _Client, replica: Replica, index: bytes) -> None:
        file = memory_file(index)
        try:
            client.line.post(ShardHeld(replica.label.rank), (replica.memory.fd, file))
        finally:
            os.close(file)

    def _tell_addresses(self, client: _Client, nodes: tuple[str, ...]) -> None:
        def found(addresses: list[SaverAddress]) -> None:
            client.line.try_send(SaverAddresses(tuple(addresses)))

        if self._replication is not None:
            self._replication.addresses(nodes, found)
        else:
            found([])

    def _over(self, path: str) -> list[Replica]:
        """Return the whole shards of ended worlds. Workers may still write into the memory of other
        worlds."""
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
        world.left.add(client.rank)
        if not world.lines:
            self._accept()  # a worker of this world may have connected meanwhile
        if not world.lines:
            world.left |= world.locals  # the other ranks never connected
            world.forget_all_but_newest()
        for save in list(world.pending.values()):
            self._pipeline.fail_if_ranks_left(world, save)
            self._pipeline.settle_if_failed(world, save)

    def _plan(self, client: _Client, number: int) -> ShardPlan:
        if client.plan is None or client.number != number:
            raise ValueError(f"plan {number} is not known")
        return client.plan

    # ------------------------------------------------------------ memory

    def _forget_older(self, newest: SavingWorld) -> None:
        """Free the memory of earlier worlds at the same path, once a newer world has handed over. The last
        two earlier worlds with whole shards stay while another node may still need them (see ``settled``)."""
        before = [w for w in self._worlds if w.store.url == newest.store.url and w.round <= newest.round]
        over = [w for w in before if w is not newest and not w.lines and not w.pending]
        usable = [] if newest.settled else [w for w in over if any(w.whole())]
        kept = sorted(usable, key=lambda w: w.round)[-_UNSETTLED:]
        self._worlds = [w for w in self._worlds if w not in over or w in kept]
        if self._replication is not None and (newest.settled or len(kept) == _UNSETTLED):
            oldest = kept[0] if kept else newest
            self._replication.forget(newest.store.url, before=oldest.round)
