"""Read states from memory: from this node's saver, and from other nodes' savers."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from elasticd.channel.codec import ChannelClosed
from elasticd.channel.framing import close_all
from elasticd.checkpoint import protocol
from elasticd.checkpoint.format.manifest import BadCheckpoint, Index, decode_index
from elasticd.checkpoint.protocol import (
    AllHeld,
    AskKnown,
    AskOffers,
    AskSavers,
    AskShards,
    Known,
    KnownUnreadable,
    Offers,
    SaverAddresses,
    SaverChannel,
    SaverSilent,
    SaverToWorker,
    ShardHeld,
    WorkerToSaver,
    read_memory_file,
)
from elasticd.checkpoint.replication.peers import PeerSaver
from elasticd.checkpoint.replication.replicas import Offer, WholeState
from elasticd.checkpoint.replication.wire import PeerGone
from elasticd.checkpoint.storage.reading import WantedRange
from elasticd.core.facts import Checkpoint, SaverAddress

_log = logging.getLogger(__name__)


class CommittedUnknown(Exception):
    """The committed checkpoints cannot be found out at present. The message is one sentence."""


class HolderLost(Exception):
    """The shards of a state can no longer be read from the memory of ``node``, or, if empty, of any node."""

    def __init__(self, node: str, why: str) -> None:
        super().__init__(f"{node}: {why}")
        self.node = node


@dataclass(slots=True)
class Recalled:
    """A whole state in memory. ``near``: the shards on this node, as open files by rank. ``holders``: the
    nodes that have the shards, by rank. ``savers`` finds the savers of some nodes: only of those that data is
    read from, since a large job has thousands."""

    path: str
    name: str
    index: Index
    near: Mapping[int, int]
    holders: Sequence[tuple[str, ...]]
    savers: Callable[[Set[str]], Mapping[str, SaverAddress]]
    read: set[str] = field(default_factory=set)  # nodes that data was read from; "" is this node

    def fill(self, ranges: Iterable[WantedRange]) -> None:
        """Fill the ranges. Raises HolderLost; their contents are then undefined."""
        far: dict[str, list[WantedRange]] = {}
        for wanted in ranges:
            if wanted.file in self.near:
                self._read_here(wanted)
            elif len(wanted.into):
                far.setdefault(self.holders[wanted.file][0], []).append(wanted)
        if far:
            savers = self.savers(far.keys())
            with ThreadPoolExecutor(min(8, len(far)), "recall") as pool:
                list(pool.map(self._read_there, (savers[node] for node in far), far.values()))

    def close(self) -> None:
        close_all(self.near.values())

    def _read_here(self, wanted: WantedRange) -> None:
        """Read a shard of this node. Mapping its pages for one read would cost as much as the copy."""
        into, at = wanted.into, wanted.at
        while into:
            read = os.preadv(self.near[wanted.file], [into], at)
            if not read:
                raise HolderLost("", "a shard in this node's memory is too short")
            into, at = into[read:], at + read
        self.read.add("")

    def _read_there(self, saver: SaverAddress, ranges: Sequence[WantedRange]) -> None:
        try:
            with PeerSaver(saver) as peer:
                peer.read(self.path, self.name, ranges)
        except PeerGone as error:
            raise HolderLost(saver.node, str(error)) from error
        self.read.add(saver.node)


class SaverQueries:
    """Asks this node's saver about the states at a path: the states in memory, and the committed ones.

    Without a saver, nothing is in memory. A saver that is stopped counts as none, after one warning.
    """

    def __init__(self, saver: str, path: str) -> None:
        self._saver, self._path = saver, path
        self._line: SaverChannel | None = None
        self._silent = False

    def survey(self) -> list[Offer]:
        """Return the offers of this node and of all other nodes that can be reached."""
        for message, _ in self._ask(AskOffers(self._path)):
            if isinstance(message, Offers):
                return list(message.offers)
        return []

    def index(self, choice: WholeState) -> bytes:
        """Return the encoded index of the chosen state. It is kept with the shard of rank 0. Raises
        HolderLost if the index is lost or not valid."""
        raw, node = b"", choice.holders[0][0]
        with self._near(choice.name) as shards:
            for rank, memory, index_file in shards:
                if rank == 0:
                    raw, node = raw or read_memory_file(index_file), ""
                close_all((memory, index_file))
        try:
            if not raw:
                with PeerSaver(self._savers({node})[node]) as peer:
                    raw = peer.index(self._path, choice.name)
            _decoded(raw, choice)
        except (PeerGone, ValueError) as error:
            raise HolderLost(node, str(error)) from error
        return raw

    def recall(self, choice: WholeState, index: bytes) -> Recalled:
        """Return the chosen state. ``index``: encoded. Raises HolderLost if the state is not as offered."""
        try:
            decoded = _decoded(index, choice)
        except ValueError as error:
            raise HolderLost("", str(error)) from error
        near: dict[int, int] = {}
        try:
            with self._near(choice.name) as shards:
                for rank, memory, index_file in shards:
                    close_all((index_file,) if rank not in near else (index_file, memory))
                    near.setdefault(rank, memory)
        except BaseException:
            close_all(near.values())
            raise
        return Recalled(self._path, choice.name, decoded, near, choice.holders, self._savers)

    @contextlib.contextmanager
    def _near(self, name: str) -> Iterator[Iterator[tuple[int, int, int]]]:
        """Give the shards of the state that this node has: the rank, and the open files of the memory and the
        index. Unread answers are dropped if the block fails."""

        def shards() -> Iterator[tuple[int, int, int]]:
            for message, files in self._ask(AskShards(self._path, name)):
                match message, files:
                    case AllHeld(), _:
                        return
                    case ShardHeld(rank), [memory, index_file]:
                        yield rank, memory, index_file

        try:
            yield shards()
        except BaseException:
            self.close()
            raise

    def committed(self, *, own: bool) -> Checkpoint | None:
        """Return the committed checkpoints. ``own``: only this job's, which only a saver knows.

        Return None if there is no saver, or if the saver does not answer and ``own`` is false. Raises
        CommittedUnknown if the saver cannot read them at present, and BadCheckpoint if it never can.
        """
        for message, _ in self._ask(AskKnown(self._path, own)):
            match message:
                case Known(checkpoint):
                    return checkpoint
                case KnownUnreadable(why, lasting):
                    raise BadCheckpoint(why) if lasting else CommittedUnknown(why)
        if own and self._saver:
            raise CommittedUnknown("the checkpoints of this job are not known: its saver does not answer")
        return None

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = None

    def _savers(self, nodes: Set[str]) -> dict[str, SaverAddress]:
        """Return the savers of the nodes. Raises HolderLost if one is not known."""
        savers: dict[str, SaverAddress] = {}
        for message, _ in self._ask(AskSavers(tuple(sorted(nodes)))):
            if isinstance(message, SaverAddresses):
                savers = {its.node: its for its in message.addresses}
                break
        for node in sorted(nodes):
            if node not in savers:
                raise HolderLost(node, "the address of its saver is not known")
        return savers

    def _ask(self, question: WorkerToSaver) -> Iterator[tuple[SaverToWorker, list[int]]]:
        """Yield the saver's answers, until the saver is lost. The caller stops at the last one."""
        try:
            if not self._saver or self._silent:
                return
            if self._line is None:
                self._line = protocol.connect(self._saver)
            self._line.send(question)
            while True:
                yield protocol.answer(self._line)
        except SaverSilent as error:
            self._silent = True
            self.close()
            said = "the saver of this node is stopped or stuck (%s): states in memory are not used"
            _log.warning(said, error)
        except ChannelClosed:  # the caller notices that answers are missing
            self.close()


def _decoded(raw: bytes, choice: WholeState) -> Index:
    """Return the index of the chosen state. Raises ValueError."""
    try:
        index = decode_index(raw)
    except ValueError as error:
        raise ValueError(f"the index in memory is not valid: {error}") from error
    if len(index.files) != len(choice.holders):
        raise ValueError(f"{choice.name} in memory is not of {len(choice.holders)} ranks")
    return index
