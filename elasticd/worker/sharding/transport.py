"""Send parts of the state from worker to worker, over the world's process group."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from elasticd.worker.sharding.held import HeldShard
from elasticd.worker.sharding.host_shards import HostShard, Kinds, size_of
from elasticd.worker.sharding.moves import Move, Passing
from elasticd.worker.sharding.parts import Part, Shapes

PIECE_BYTES = 8 << 20  # larger tensors are sent in pieces of this size
_COPIES = 0x0C09135  # the tag of copies, which the script's own messages may overtake
UNDER_WAY_MAX = 16  # the most pieces of this worker in flight


class _Message(NamedTuple):
    """Bytes on their way. ``memory``: where they are, in the sender and in the receiver; None elsewhere."""

    sender: int
    receiver: int
    memory: torch.Tensor | None


def carry_out(moves: Iterable[Move], held: Sequence[HostShard], into: HostShard) -> None:
    """Carry out this rank's moves, on all ranks together. ``held``: the shards that this rank holds.
    ``into``: what this rank wants, with the tensors in the same order on all ranks."""
    rank = dist.get_rank()

    def messages() -> Iterator[_Message]:
        for move in moves:
            for number in into.of_parameter[move.parameter]:
                sent = None
                if rank == move.sender:
                    its = held[move.shard]
                    sent = its.tensor(its.numbers[into.kinds[number]], move.span)
                room = into.tensor(number, move.span) if rank == move.receiver else None
                if sent is not None and room is not None:
                    room.copy_(sent)
                else:
                    yield _Message(move.sender, move.receiver, sent if room is None else room)

    _exchange(rank, messages())


class Copies:
    """Copies of shards on their way. ``sent``: the shard that this rank sends, which must not change
    meanwhile. ``sending``: the pieces to be sent. ``arriving``: by rank, the shard that this rank receives,
    with its pieces that are not here."""

    def __init__(
        self, sent: HostShard, sending: deque[Any], arriving: dict[int, tuple[HostShard, deque[Any]]]
    ) -> None:
        self._sending, self._arriving, self._sent = sending, arriving, sent

    def await_arrival(self) -> dict[int, HostShard]:
        """Wait until this rank's copies are sent and the others' are here. Return the shards that this rank
        guards, by rank."""
        for _, pieces in self._arriving.values():
            _await(pieces)
        _await(self._sending)
        return {rank: shard for rank, (shard, _) in self._arriving.items()}

    def arrived(self) -> dict[int, HostShard]:
        """Return the shards that are here, by rank, once the world has ended. The others are lost."""
        return {
            rank: shard
            for rank, (shard, pieces) in self._arriving.items()
            if all(piece.came() for piece in pieces)
        }


def _await(pieces: deque[Any]) -> None:
    """Wait for the pieces, and remove those that are here. Raises RuntimeError."""
    while pieces:
        pieces[0].wait()
        pieces.popleft()


class Guarding(NamedTuple):
    """Which copies a rank sends and receives. ``guardians``: the ranks that receive a copy of its shard.
    ``guarded``: by rank, the part of each shard of which it receives a copy."""

    guardians: Sequence[int] = ()
    guarded: Mapping[int, Part] = {}


def copy_to_guardians(
    own: HostShard, guarding: Guarding, shapes: Shapes, rooms: Mapping[int, HostShard]
) -> Copies:
    """Begin to send this rank's shard to its guardians, and to receive what it guards. All ranks call it
    together. Of a shard, the first tensors are sent. ``rooms``: memory to use again."""
    rank = dist.get_rank()
    sending: deque[Any] = deque()
    arriving: dict[int, tuple[HostShard, deque[Any]]] = {}
    if guarding.guardians:
        copy = own.part._replace(copy=True)
        memory = own.memory[: size_of(own.kinds, shapes.spans(copy))]
        for guardian in guarding.guardians:
            sending += _begun(rank, _Message(rank, guardian, memory))
    for owner, part in guarding.guarded.items():
        room = rooms.get(owner)
        if room is None or not room.suits(own.kinds, part):
            room = HostShard(own.kinds, part, shapes)
        arriving[owner] = room, deque(_begun(rank, _Message(owner, rank, room.memory)))
    return Copies(own, sending, arriving)


def _begun(rank: int, message: _Message) -> Iterator[Any]:
    return (_begin(rank, *piece, tag=_COPIES) for piece in _pieces([message]))


def carry_shards(
    passed: Iterable[Passing],
    has: Sequence[Sequence[HeldShard]],
    kinds: Kinds,
    shapes: Shapes,
    held: Sequence[HostShard],
) -> list[HostShard]:
    """Send whole shards, on all ranks together. Return those that this rank receives. ``has``: what each rank
    holds. ``held``: the shards that this rank holds."""
    rank = dist.get_rank()
    arriving: list[HostShard] = []

    def messages() -> Iterator[_Message]:
        for sender, number, receiver in passed:
            if rank == sender:
                yield _Message(sender, receiver, held[number].memory)
            elif rank == receiver:
                arriving.append(HostShard(kinds, has[sender][number].part, shapes))
                yield _Message(sender, receiver, arriving[-1].memory)

    _exchange(rank, messages())
    return arriving


def _exchange(rank: int, messages: Iterable[_Message]) -> None:
    """Send and receive the messages. All ranks have the same order of messages, and wait for the oldest of
    their own only: so no two ranks wait for each other."""
    under_way: deque[Any] = deque()
    for message in _pieces(messages):
        if len(under_way) == UNDER_WAY_MAX:
            under_way.popleft().wait()
        under_way.append(_begin(rank, *message))
    for work in under_way:
        work.wait()


def _pieces(messages: Iterable[_Message]) -> Iterator[_Message]:
    for sender, receiver, memory in messages:
        assert memory is not None
        for piece in torch.split(memory.view(torch.uint8), PIECE_BYTES):
            if len(piece):
                yield _Message(sender, receiver, piece)


def _begin(rank: int, sender: int, receiver: int, piece: torch.Tensor | None, tag: int = 0) -> Any:
    assert piece is not None
    if rank == sender:
        return dist.isend(piece, receiver, tag=tag)
    return dist.irecv(piece, sender, tag=tag)
