"""The messages between workers and the saver of their node, and how a worker reaches the saver."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass, field
from typing import Final

from elasticd.channel import framing
from elasticd.channel.codec import ChannelClosed, Codec
from elasticd.channel.framing import Channel, QueuedChannel
from elasticd.checkpoint.replication.replicas import Offer
from elasticd.core.facts import Checkpoint, SaverAddress

# Seconds; a saver that is silent for longer counts as stuck. A start on a busy machine takes less.
SILENCE_S: Final = 60.0
_LENGTH = struct.Struct("<Q")
_LAYOUT_BYTES_MAX: Final = 1 << 30

# ------------------------------------------------------------ worker to saver


@dataclass(frozen=True, slots=True)
class ProveSecret:
    """The first message to a saver without an agent: the secret that the ranks share."""

    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class OpenWorld:
    """The worker is ``rank`` of a world of ``world`` workers that save at ``path``.

    ``token``: random; identifies the world. ``round``: the round in names of checkpoints. ``fence``: the
    job's round, which must still be live at a commit; 0: no check. ``locals``: the ranks on this node.
    ``holder``: the node that keeps copies of this node's shards, or empty. ``last`` and ``every``: as in
    ``Keep``.
    """

    path: str
    token: str
    rank: int
    world: int
    round: int
    fence: int
    locals: tuple[int, ...]
    holder: str
    last: int
    every: int


@dataclass(frozen=True, slots=True)
class PlanShard:
    """The worker's shard has ``size`` bytes in all saves of the plan with the number ``plan``. The message
    carries a file: the plan's shares (see ``Layout``)."""

    plan: int
    size: int


@dataclass(frozen=True, slots=True)
class ShareBuffer:
    """The message carries a file: shared memory for shards of the plan. ``buffer``: the memory's number."""

    plan: int
    buffer: int


@dataclass(frozen=True, slots=True)
class BufferTorn:
    """The worker is about to overwrite the buffer: the shard in the buffer is no longer whole."""

    buffer: int


@dataclass(frozen=True, slots=True)
class SkipSave:
    """The step was not copied, because both buffers are still being written to disk."""

    step: int


@dataclass(frozen=True, slots=True)
class SaveShard:
    """The buffer holds this rank's whole shard of the checkpoint ``name``. ``at``: the time of the save,
    in seconds since the epoch. ``blocked_s``: how long training waited for the copy."""

    plan: int
    buffer: int
    step: int
    name: str
    at: float
    blocked_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MissSave:
    """This rank will not hand over its shard of the checkpoint ``name``. ``why``: a clause for people."""

    name: str
    step: int
    why: str


@dataclass(frozen=True, slots=True)
class AwaitSaves:
    """``on``: training waits until its saves are durable. Otherwise training no longer waits."""

    on: bool


@dataclass(frozen=True, slots=True)
class AskKnown:
    """Asks for the committed checkpoints at ``path``; ``own``: only those of this job. The answer is
    ``Known`` or ``KnownUnreadable``."""

    path: str
    own: bool = False


@dataclass(frozen=True, slots=True)
class AskOffers:
    """Asks which shards are in the memory of this node and of other nodes: their own shards of ended worlds,
    and replicas. The answer is ``Offers``."""

    path: str


@dataclass(frozen=True, slots=True)
class AskShards:
    """Asks for the shards of the state ``name``. The answer is a ``ShardHeld`` for each shard on this node,
    and then ``AllHeld``."""

    path: str
    name: str


@dataclass(frozen=True, slots=True)
class AskSavers:
    """Asks for the addresses of the savers of ``nodes``. The answer is ``SaverAddresses``."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AskAlive:
    """Asks for a sign of life while an answer takes long. The answer is ``Alive``."""


WorkerToSaver = (
    ProveSecret
    | OpenWorld
    | PlanShard
    | ShareBuffer
    | BufferTorn
    | SkipSave
    | SaveShard
    | MissSave
    | AwaitSaves
    | AskKnown
    | AskOffers
    | AskShards
    | AskSavers
    | AskAlive
)


# ------------------------------------------------------------ saver to worker


@dataclass(frozen=True, slots=True)
class Admitted:
    """The first message of a saver that has an agent: the saver has checked that the process belongs to that
    agent. The check needs a live process, so a worker hands over nothing before this message."""


@dataclass(frozen=True, slots=True)
class BufferFree:
    """The worker may overwrite the buffer: its shard is on disk and copied to the other node, or has
    failed."""

    plan: int
    buffer: int


@dataclass(frozen=True, slots=True)
class BufferCopied:
    """The other node has its copy of the shard in the buffer, or the copy has failed."""

    plan: int
    buffer: int


@dataclass(frozen=True, slots=True)
class SaveCommitted:
    """``took_s``: seconds from the first shard to the commit. ``size``: bytes of all ranks."""

    name: str
    step: int
    took_s: float
    size: int


@dataclass(frozen=True, slots=True)
class SaveWritten:
    """This node's shards are written. The saver of another node commits."""

    name: str


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """``why``: a clause for people."""

    name: str
    step: int
    why: str


@dataclass(frozen=True, slots=True)
class ShardHeld:
    """The message carries two files: the memory of the shard of ``rank``, and the encoded index of
    the state, which only the shard of rank 0 has."""

    rank: int


@dataclass(frozen=True, slots=True)
class AllHeld:
    """The end of the answer to ``AskShards``."""


@dataclass(frozen=True, slots=True)
class Known:
    """The committed checkpoints."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class KnownUnreadable:
    """The committed checkpoints cannot be read. ``lasting``: a later request would fail as well."""

    why: str
    lasting: bool


@dataclass(frozen=True, slots=True)
class Offers:
    offers: tuple[Offer, ...]


@dataclass(frozen=True, slots=True)
class SaverAddresses:
    """The addresses of the savers that are known."""

    addresses: tuple[SaverAddress, ...]


@dataclass(frozen=True, slots=True)
class Alive:
    """The answer to ``AskAlive``."""


SaverToWorker = (
    Admitted
    | BufferFree
    | BufferCopied
    | SaveCommitted
    | SaveWritten
    | SaveFailed
    | ShardHeld
    | AllHeld
    | Known
    | KnownUnreadable
    | Offers
    | SaverAddresses
    | Alive
)

WORKER_TO_SAVER: Codec[WorkerToSaver] = Codec(WorkerToSaver)
SAVER_TO_WORKER: Codec[SaverToWorker] = Codec(SaverToWorker, bytes_max=1 << 28)

SaverChannel = Channel[WorkerToSaver, SaverToWorker]  # the worker's end
WorkerChannel = QueuedChannel[SaverToWorker, WorkerToSaver]  # the saver's end


# ------------------------------------------------------------ reaching the saver


class SaverSilent(ChannelClosed):
    """The saver process exists but does not answer: it is stopped or stuck."""


def listen(name: str = "") -> tuple[socket.socket, str]:
    """Return a listening socket and its name."""
    name = name or f"elasticd-saver-{os.getpid()}-{os.urandom(8).hex()}"
    return framing.listen(name), name


def connect(name: str, secret: str = "", *, patience_s: float | None = None) -> SaverChannel:
    """Connect to the saver ``name``. ``secret``: required by a saver without an agent. A saver with an agent
    checks this process by itself; the call waits until the saver admits it. Raises ChannelClosed if no saver
    listens, if another user runs the saver, or if the saver rejects this process. Raises SaverSilent if the
    saver does not answer within ``patience_s`` seconds, by default ``SILENCE_S``."""
    saver = SaverChannel(framing.connect(name), WORKER_TO_SAVER, SAVER_TO_WORKER)
    try:
        if secret:
            saver.send(ProveSecret(secret))
        else:
            _await_admission(saver, SILENCE_S if patience_s is None else patience_s)
    except BaseException:
        saver.close()
        raise
    return saver


def _await_admission(saver: SaverChannel, patience_s: float) -> None:
    try:
        heard = saver.poll(patience_s)
    except ChannelClosed as error:
        raise ChannelClosed("the saver has rejected this process, or has ended") from error
    if heard is None:
        raise SaverSilent(f"no answer for {patience_s:g} s")


def answer(saver: SaverChannel) -> tuple[SaverToWorker, list[int]]:
    """Return the saver's next answer, however long that takes, as long as the saver answers ``AskAlive``.
    Raises ChannelClosed; SaverSilent after ``SILENCE_S`` of silence."""
    asked = False
    while True:
        heard = saver.poll(SILENCE_S / 2)
        if heard is None:
            if asked:
                raise SaverSilent(f"no answer for {SILENCE_S:g} s")
            saver.send(AskAlive(), wait=False)
            asked = True
        elif isinstance(heard[0], Alive):
            asked = False
        else:
            return heard


def descends_from(sock: socket.socket, agent: int) -> bool:
    """Return whether the process at the other end of the socket is the agent (a pid) or one of its
    descendants: a worker, or a process that a worker started. The kernel reports the pid, so no secret is
    needed. Without psutil, as workers import this module."""
    pid = framing.peer_of(sock)
    while pid > 0 and pid != agent:
        try:
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # the process has ended
            return False
    return pid == agent > 0


def memory_file(content: bytes) -> int:
    """Return a file in memory for ``PlanShard`` or ``ShardHeld``. The caller closes the file."""
    fd = os.memfd_create("elasticd-plan", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(_LENGTH.pack(len(content)) + content)
    return fd


def read_memory_file(fd: int) -> bytes:
    """Return the content of a file that ``memory_file`` made. Raises ValueError if the file is not valid, and
    OSError."""
    there = min(os.fstat(fd).st_size, _LAYOUT_BYTES_MAX)
    if there < _LENGTH.size:
        raise ValueError("the layout is cut off")
    (size,) = _LENGTH.unpack(os.pread(fd, _LENGTH.size, 0))
    if _LENGTH.size + size > there:
        raise ValueError(f"the layout has {there} bytes in place of {_LENGTH.size + size}")
    return os.pread(fd, size, _LENGTH.size)
