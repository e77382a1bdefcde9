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
from elasticd.core.facts import Checkpoint, Holder

SILENCE_S: Final = 60.0  # the longest silence of a live saver: it may be starting on a busy machine
_LENGTHS = struct.Struct("<QQ")
_PAPER_BYTES_MAX: Final = 1 << 30

# ------------------------------------------------------------ worker to saver


@dataclass(frozen=True, slots=True)
class ProveSecret:
    """The first message to a saver without an agent: the secret that the ranks share."""

    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class OpenWorld:
    """The worker is ``rank`` of a world of ``world`` workers that save at ``path``.

    ``locals``: the ranks on this node. ``round``: in names of checkpoints; ``fence``: the job's round, which
    must still be live at a commit; 0: any. ``holder``: the node that holds copies of this node's shards, if
    any. ``last`` and ``every``: what to keep, as in ``Keep``.
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
    """The worker's shard has ``size`` bytes. The file is what all saves of the plan have in common
    (``Paper``)."""

    plan: int
    size: int


@dataclass(frozen=True, slots=True)
class ShareBuffer:
    """The file is memory that will hold shards of the plan."""

    plan: int
    buffer: int


@dataclass(frozen=True, slots=True)
class BufferTorn:
    """The worker is about to write into the buffer."""

    buffer: int


@dataclass(frozen=True, slots=True)
class SkipSave:
    """The step was not copied, because both buffers are still being written to disk."""

    step: int


@dataclass(frozen=True, slots=True)
class SaveShard:
    """The buffer holds this rank's whole shard of the checkpoint ``name``. ``at``: seconds since the epoch.
    ``blocked_s``: how long training waited for the copy."""

    plan: int
    buffer: int
    step: int
    name: str
    at: float
    blocked_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MissSave:
    """This rank will not hand over its shard of that checkpoint. ``why``: a clause for people."""

    name: str
    step: int
    why: str


@dataclass(frozen=True, slots=True)
class AwaitSaves:
    """Training waits until its saves are durable (``on``), or no longer waits."""

    on: bool


@dataclass(frozen=True, slots=True)
class AskKnown:
    """Asks for the committed checkpoints at ``path``; ``own``: only those of this job. The answer is
    ``Known`` or ``KnownUnreadable``."""

    path: str
    own: bool = False


@dataclass(frozen=True, slots=True)
class AskOffers:
    """Asks for the shards of ended worlds that are in the memory of this node, and of nodes that hold
    replicas. The answer is ``Offers``."""

    path: str


@dataclass(frozen=True, slots=True)
class AskShards:
    """Asks for the shards of the state ``name``. The answer is a ``ShardHeld`` for each shard on this node,
    and then ``Places``, the addresses of the savers of ``nodes``."""

    path: str
    name: str
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
    | AskAlive
)


# ------------------------------------------------------------ saver to worker


@dataclass(frozen=True, slots=True)
class Admitted:
    """The first message of a saver that has an agent: the saver has seen that the process is a worker of that
    agent, and could not see that once the process has ended. Workers hand over nothing before."""


@dataclass(frozen=True, slots=True)
class BufferFree:
    """The buffer is written, and copied to its holder, or never will be."""

    plan: int
    buffer: int


@dataclass(frozen=True, slots=True)
class BufferCopied:
    """The holder has its replica of the buffer, or never will have it."""

    plan: int
    buffer: int


@dataclass(frozen=True, slots=True)
class SaveCommitted:
    """``took_s``: from the first shard to the commit. ``size``: bytes in all."""

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
    """The two files are the memory of a shard, and its paper."""

    rank: int


@dataclass(frozen=True, slots=True)
class Known:
    """The committed checkpoints."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class KnownUnreadable:
    """What is committed cannot be told. ``lasting``: a later question gets the same answer."""

    why: str
    lasting: bool


@dataclass(frozen=True, slots=True)
class Offers:
    offers: tuple[Offer, ...]


@dataclass(frozen=True, slots=True)
class Places:
    holders: tuple[Holder, ...]


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
    | Known
    | KnownUnreadable
    | Offers
    | Places
    | Alive
)

WORKER_TO_SAVER: Codec[WorkerToSaver] = Codec(WorkerToSaver)
SAVER_TO_WORKER: Codec[SaverToWorker] = Codec(SaverToWorker, bytes_max=1 << 28)

SaverChannel = Channel[WorkerToSaver, SaverToWorker]  # the worker's end
WorkerChannel = QueuedChannel[SaverToWorker, WorkerToSaver]  # the saver's end


# ------------------------------------------------------------ reaching the saver


class SaverSilent(ChannelClosed):
    """The process at the other end exists and gives no sign of life: it is stopped or stuck."""


def listen(name: str = "") -> tuple[socket.socket, str]:
    """Return a listening socket and its name."""
    name = name or f"elasticd-saver-{os.getpid()}-{os.urandom(8).hex()}"
    return framing.listen(name), name


def connect(name: str, secret: str = "", *, patience_s: float | None = None) -> SaverChannel:
    """Connect to the saver ``name``. ``secret``: what a saver without an agent asks for. A saver with an
    agent admits its workers by itself, and this waits for that. Raises ChannelClosed if no saver listens
    there, if the process belongs to another user, or if the saver turns this process away; SaverSilent if the
    saver says nothing for ``patience_s``, or ``SILENCE_S`` by default."""
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
        raise ChannelClosed("the saver has turned this process away, or has ended") from error
    if heard is None:
        raise SaverSilent(f"it has said nothing for {patience_s:g} s")


def answer(saver: SaverChannel) -> tuple[SaverToWorker, list[int]]:
    """Return the saver's next answer, however long that takes, as long as the saver gives signs of life.
    Raises ChannelClosed; SaverSilent after ``SILENCE_S`` of silence."""
    asked = False
    while True:
        heard = saver.poll(SILENCE_S / 2)
        if heard is None:
            if asked:
                raise SaverSilent(f"it has said nothing for {SILENCE_S:g} s")
            saver.send(AskAlive(), wait=False)
            asked = True
        elif isinstance(heard[0], Alive):
            asked = False
        else:
            return heard


def is_of(sock: socket.socket, agent: int) -> bool:
    """Return whether the process at the other end is the agent with this pid or one of its descendants: a
    worker, or a process that a worker started. The kernel reports the pid, so no secret is needed."""
    pid = framing.peer_of(sock)
    while pid > 0 and pid != agent:
        try:
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # the process has ended
            return False
    return pid == agent > 0


@dataclass(frozen=True, slots=True)
class Paper:
    """What all saves of a plan have in common. ``metadata`` is empty except on the rank that writes it."""

    index: bytes
    metadata: bytes

    def file(self) -> int:
        """Return a file in memory for ``PlanShard`` and ``ShardHeld``. The caller closes the file."""
        fd = os.memfd_create("elasticd-plan", os.MFD_CLOEXEC)
        with open(fd, "wb", closefd=False) as file:
            file.write(_LENGTHS.pack(len(self.index), len(self.metadata)) + self.index + self.metadata)
        return fd

    @classmethod
    def of(cls, fd: int) -> Paper:
        """Read the file in memory. Raises ValueError if the file is no paper, and OSError."""
        there = min(os.fstat(fd).st_size, _PAPER_BYTES_MAX)
        if there < _LENGTHS.size:
            raise ValueError("the paper is cut off")
        index, metadata = _LENGTHS.unpack(os.pread(fd, _LENGTHS.size, 0))
        if _LENGTHS.size + index + metadata > there:
            raise ValueError(f"the paper has {there} bytes, and says {index} and {metadata} follow")
        rest = os.pread(fd, index + metadata, _LENGTHS.size)
        return cls(rest[:index], rest[index:])
