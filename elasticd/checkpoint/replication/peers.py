"""The protocol of a job's savers, for callers on other nodes: other savers, and workers that read shards.
A caller lists the shards in memory, stores a replica, or reads shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol, Self, TypeVar

import msgspec

from elasticd.checkpoint.format.layout import Layout
from elasticd.checkpoint.format.manifest import BadCheckpoint
from elasticd.checkpoint.replication.replicas import Label, Offer, Replica
from elasticd.checkpoint.replication.wire import SILENCE_S, Message, PeerGone, Wire
from elasticd.checkpoint.shared_memory import Memory
from elasticd.checkpoint.storage.reading import WantedRange, by_file
from elasticd.core.checkpoint_names import require_name
from elasticd.core.facts import SaverAddress

WAIT: Final[Message] = {"wait": True}  # sent from time to time to a caller that must wait for its turn
_RANGES_MAX: Final = 4096  # the most byte ranges of a shard in one request
_T = TypeVar("_T")


class Peers(Protocol):
    """Looks up the savers of the job's other nodes. Both methods raise PeerGone if the lookup fails."""

    def find(self, node: str) -> SaverAddress: ...

    def others(self) -> Sequence[SaverAddress]: ...


@dataclass(frozen=True, slots=True)
class Host:
    """The functions of the saver that ``serve`` calls, in the thread of each caller. ``room`` allocates
    memory for a replica, or raises OSError; a call of ``keep`` or ``give_up`` follows."""

    offers: Callable[[str], list[Offer]]
    find: Callable[[str, str, int], Replica | None]  # path, name, and rank
    room: Callable[[Label, int], Memory]
    keep: Callable[[Replica], None]
    give_up: Callable[[int], None]


# ------------------------------------------------------------ the server


def serve(wire: Wire, host: Host) -> None:
    """Answer the requests of one caller until the caller disconnects."""
    try:
        while True:
            message = wire.receive_message()
            match message:
                case {"do": "offers", "path": str(path)}:
                    wire.send_message({"offers": msgspec.to_builtins(host.offers(path))})
                case {"do": "hold", "label": dict(label), "size": int(size)} if size >= 0:
                    _hold(wire, host, _as(label, Label), size)
                case {"do": "index", "path": str(path), "name": str(name)}:
                    replica = host.find(path, name, 0)
                    try:
                        index = replica.layout.index if replica is not None else b""
                    except BadCheckpoint:
                        replica = None
                    if _found(wire, replica) is not None:
                        wire.send_raw_message(index)
                case {"do": "read", "path": str(path), "name": str(name), "rank": int(rank), **more}:
                    replica = _found(wire, host.find(path, name, rank))
                    if replica is not None:
                        ranges = _as(more.get("ranges"), list[tuple[int, int]])
                        if any(
                            min(at, length) < 0 or at + length > replica.memory.size for at, length in ranges
                        ):
                            raise PeerGone("a request for bytes that a shard does not have")
                        for at, length in ranges:
                            wire.send_data(replica.memory.view[at : at + length])
                case _:
                    raise PeerGone("an unknown request")
    except PeerGone:
        pass
    finally:
        wire.close()


def _found(wire: Wire, replica: Replica | None) -> Replica | None:
    wire.send_message({"why": "the shard is not there"} if replica is None else {"ok": True})
    return replica


def _hold(wire: Wire, host: Host, label: Label, size: int) -> None:
    try:
        memory = _room(wire, host, label, size)
    except PeerGone:
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no thread
        why = getattr(error, "strerror", None) or error
        wire.send_message({"why": f"there is no memory for {size} bytes ({why})"})
        return
    try:
        wire.send_message({"ok": True})
        index = wire.receive_raw_message()
        wire.receive_data(memory.view)
    except BaseException:
        host.give_up(size)
        raise
    host.keep(Replica(label, Layout.of_index(index), memory))
    wire.send_message({"ok": True})


def _room(wire: Wire, host: Host, label: Label, size: int) -> Memory:
    """Return memory for a replica. The kernel clears the memory first, which takes a second for a gigabyte:
    the caller hears meanwhile that it must wait. Raises OSError."""
    with ThreadPoolExecutor(1, "room") as pool:
        made = pool.submit(host.room, label, size)
        try:
            while futures.wait([made], SILENCE_S / 4).not_done:
                wire.send_message(WAIT)
        except PeerGone:
            if made.exception() is None:
                host.give_up(size)
            raise
        return made.result()


# ------------------------------------------------------------ the client


class PeerSaver:
    """A connection to another node's saver. All methods raise PeerGone, also when the saver refuses."""

    def __init__(self, address: SaverAddress) -> None:
        self.node = address.node
        try:
            self._wire = Wire.connect(address.host, address.port, address.secret)
        except PeerGone as error:
            raise PeerGone(f"the saver of {address.node}: {error}") from error

    def offers(self, path: str) -> list[Offer]:
        answer = self._request({"do": "offers", "path": path})
        offered = _as(answer.get("offers"), list[Offer])
        try:
            for its in offered:
                require_name(its.name, its.step, its.round, its.world)
        except ValueError as error:
            raise PeerGone(
                f"the saver of {self.node} offers a state that is not possible: {error}"
            ) from error
        return offered

    def store_replica(self, label: Label, index: bytes, content: memoryview) -> None:
        """Store a replica on the other node. Returns once the node has the whole replica."""
        self._request({"do": "hold", "label": msgspec.to_builtins(label), "size": len(content)})
        self._wire.send_raw_message(index)
        self._wire.send_data(content)
        self._answer()

    def index(self, path: str, name: str) -> bytes:
        self._request({"do": "index", "path": path, "name": name})
        return self._wire.receive_raw_message()

    def read(self, path: str, name: str, ranges: Iterable[WantedRange]) -> None:
        """Read the ranges from one or more shards."""
        for rank, these in by_file(ranges).items():
            for first in range(0, len(these), _RANGES_MAX):
                some = these[first : first + _RANGES_MAX]
                places = [(wanted.at, len(wanted.into)) for wanted in some]
                self._request({"do": "read", "path": path, "name": name, "rank": rank, "ranges": places})
                for wanted in some:
                    self._wire.receive_data(wanted.into)

    def close(self) -> None:
        self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, message: Message) -> Message:
        self._wire.send_message(message)
        return self._answer()

    def _answer(self) -> Message:
        while (answer := self._wire.receive_message()) == WAIT:
            pass
        if "why" in answer:
            raise PeerGone(f"the saver of {self.node}: {answer['why']}")
        return answer


for _kind in (Label, Offer):  # make the decoders before any thread starts: see ``format.manifest``
    msgspec.json.Decoder(_kind)


def _as(value: object, kind: type[_T]) -> _T:
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise PeerGone(f"an invalid message: {error}") from error
