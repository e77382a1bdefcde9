"""Pass a state from one worker to others: through memory on the same node, else along a chain of workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from elasticd.checkpoint.client.objects import loaded
from elasticd.worker.joining.peer_memory import PeerMemory, UnreadableMemory, shown
from elasticd.worker.values.plaindata import emptied, outlined, with_tensors
from elasticd.worker.world.group import World

PARCEL_BYTES = 2 << 20  # small tensors are sent together, larger tensors in pieces of this size
ALONE_BYTES = PARCEL_BYTES // 4  # a larger tensor is sent from its own memory
UNDER_WAY_MAX = 8  # the most pieces in flight: enough to keep a link busy, with little memory
CHAIN_MAX = 512  # the most places of one chain; a state of 1 GB has as many pieces
RUN = 8  # the places of a chain in a tree: nodes mostly have 8 workers, with consecutive ranks
_ALIGNED = 16
Parameters = Mapping[str, Mapping[str, torch.Tensor]]  # by the names of the module and of the parameter


@dataclass(frozen=True, slots=True)
class Transfer:
    """The source of the state and the ranks that take it. ``fresh``: no worker has committed anything, so all
    begin with the source's initial state. ``readers``: the takers that can read the source's memory."""

    source: int
    takers: tuple[int, ...]
    fresh: bool
    readers: tuple[int, ...] = ()

    @property
    def chain(self) -> tuple[int, ...]:
        """The source, and the takers that get messages."""
        return (self.source, *(rank for rank in self.takers if rank not in self.readers))


def send_snapshot(snapshot: Any, transfer: Transfer) -> None:
    outline, tensors = outlined(snapshot)
    text = torch.frombuffer(bytearray(outline), dtype=torch.uint8)
    if transfer.readers:
        _show(text, tensors, transfer)
    else:
        _send(text, tensors, transfer.chain)


def receive_snapshot(
    transfer: Transfer, world: World, overwritten: Callable[[], Parameters] | None = None
) -> dict[str, Any]:
    """Receive a snapshot. The snapshot is used only once it is complete, so a source that dies on the way
    does no harm.

    ``overwritten``: return the parameters that each arriving piece is written to at once, so that there is
    never a second copy of them all. They are torn if the source dies on the way. The function is called once
    the source has begun to send.
    """
    if world.rank not in transfer.readers:
        return _receive(transfer.chain, world.rank, overwritten)
    try:
        return _read(transfer.source, world, overwritten)
    except UnreadableMemory:
        dist.send(_answer(whole=False), transfer.source)
    return _receive((transfer.source, world.rank), world.rank, overwritten)


# ---------------------------------------------------------------- through memory


def _show(text: torch.Tensor, tensors: Sequence[torch.Tensor], transfer: Transfer) -> None:
    """Let the readers read the tensors. Then send messages to the other takers, and to the readers that
    cannot read."""
    with shown([_laid_out(tensor.detach().cpu()).contiguous() for tensor in tensors]) as where:
        for reader in transfer.readers:
            for part in (torch.tensor([len(text), len(where)], device="cpu"), text, where):
                dist.send(part, reader)
        refused = [reader for reader in transfer.readers if not _has_read(reader)]
    for reader in transfer.readers:
        if reader not in refused:
            dist.send(_answer(whole=True), reader)
    for order in (transfer.chain, *((transfer.source, reader) for reader in refused)):
        if len(order) > 1:
            _send(text, tensors, order)


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor with its dimensions in the order of its memory: contiguous if the tensor is
    dense, such as weights in ``channels_last``."""
    strides = emptied(tensor).stride()
    order = sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])
    return tensor.resolve_conj().resolve_neg().permute(order)


def _has_read(reader: int) -> bool:
    """Wait until the reader has read everything, or cannot read. Return whether it has."""
    answer = _answer(whole=False)
    dist.recv(answer, reader)
    return bool(answer)


def _read(source: int, world: World, overwritten: Callable[[], Parameters] | None) -> dict[str, Any]:
    """Read the snapshot in the memory of the source. Raises UnreadableMemory."""
    sizes = torch.zeros(2, dtype=torch.int64, device="cpu")
    dist.recv(sizes, source)
    text = torch.empty(int(sizes[0]), dtype=torch.uint8, device="cpu")
    where = torch.empty(int(sizes[1]), dtype=torch.int64, device="cpu")
    for part in (text, where):
        dist.recv(part, source)
    memory = PeerMemory(where, world.check)
    outline, wanted, places = _outlined(text, overwritten)
    got: dict[int, torch.Tensor] = {}
    for number, kind in enumerate(wanted):
        place = places.get(id(kind))
        if place is None or place.device.type != "cpu" or place.stride() != kind.stride():
            place = torch.empty_like(kind, device="cpu")
        memory.read(number, _laid_out(place.detach()))
        got[id(kind)] = place
    # The source answers only if it still waits, and has thus changed nothing meanwhile.
    dist.send(_answer(whole=True), source)
    dist.recv(_answer(whole=False), source)
    snapshot: dict[str, Any] = with_tensors(outline, lambda tensor: got[id(tensor)])
    return snapshot


def _answer(*, whole: bool) -> torch.Tensor:
    return torch.tensor([int(whole)], dtype=torch.uint8, device="cpu")


# ---------------------------------------------------------------- by messages


def neighbours(place: int, places: int) -> tuple[int | None, tuple[int, ...]]:
    """Return the place that sends to ``place``, and the places that ``place`` sends to. Place 0 is the
    source.

    A chain takes hardly longer with more places, unless there are many more places than pieces. Beyond
    ``CHAIN_MAX`` places, each ``RUN`` places form a chain, mostly within one node, and the first places of
    the chains form a binary tree.
    """
    if places <= CHAIN_MAX:
        return (place - 1 if place else None), ((place + 1,) if place + 1 < places else ())
    run, within = divmod(place, RUN)
    if within:
        before: int | None = place - 1
    else:
        before = (run - 1) // 2 * RUN if run else None
    heads = [n * RUN for n in (2 * run + 1, 2 * run + 2)] if not within else []
    beside = [place + 1] if within + 1 < RUN else []
    return before, tuple(one for one in (*heads, *beside) if one < places)


class _Chain:
    """A chain of workers: the source sends bytes to the first taker, which passes them on to the next taker
    while it still receives, and so on. Many takers need little more time than one. Of very many takers, some
    pass the bytes on to several others (``neighbours``)."""

    def __init__(self, order: Sequence[int], rank: int) -> None:
        before, after = neighbours(order.index(rank), len(order))
        self._before = order[before] if before is not None else None
        self._after = [order[place] for place in after]
        self._under_way: deque[Any] = deque()
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def carry(self, parcel: torch.Tensor) -> torch.Tensor:
        """Return the parcel with the source's bytes. The caller must not change the parcel before ``finish``.
        A parcel that the source packed is freed once it has been sent."""
        for piece in torch.split(parcel, PARCEL_BYTES):
            self._carry(piece)
        return parcel

    def carry_to(self, place: torch.Tensor) -> None:
        """Write the source's bytes to the place, a contiguous tensor. The bytes arrive elsewhere, since a
        connection of a world that has ended may still write to the memory that it was given."""
        for part in torch.split(place.detach().view(-1).view(torch.uint8), PARCEL_BYTES):
            if self._after or len(self._buffer) < len(part):
                self._buffer = torch.empty(len(part), dtype=torch.uint8, device="cpu")
            piece = self._buffer[: len(part)]
            self._carry(piece)
            part.copy_(piece)

    def _carry(self, piece: torch.Tensor) -> None:
        if self._before is not None:
            dist.recv(piece, self._before)
        for taker in self._after:
            if len(self._under_way) == UNDER_WAY_MAX:
                self._under_way.popleft().wait()
            self._under_way.append(dist.isend(piece, taker))

    def finish(self) -> None:
        for piece in self._under_way:
            piece.wait()


def _send(text: torch.Tensor, tensors: Sequence[torch.Tensor], order: Sequence[int]) -> None:
    chain = _Chain(order, order[0])
    chain.carry(torch.tensor([len(text)], device="cpu").view(torch.uint8))
    chain.carry(text)
    for together in _parcels(tensors):
        chain.carry(_packed([tensors[i] for i in together]))
    chain.finish()


def _receive(order: Sequence[int], rank: int, overwritten: Callable[[], Parameters] | None) -> dict[str, Any]:
    chain = _Chain(order, rank)
    length = int(chain.carry(torch.zeros(8, dtype=torch.uint8, device="cpu")).view(torch.int64))
    text = chain.carry(torch.empty(length, dtype=torch.uint8, device="cpu"))
    outline, wanted, places = _outlined(text, overwritten)
    got: dict[int, torch.Tensor] = {}  # by the id of the tensor in the outline
    for together in _parcels(wanted):
        kinds = [wanted[i] for i in together]
        place = places.get(id(kinds[0]))
        if len(kinds) == 1 and place is not None and place.is_contiguous() and place.nbytes == _room(place):
            chain.carry_to(place)
            got[id(kinds[0])] = place
            continue
        parcel = chain.carry(torch.empty(sum(map(_room, kinds)), dtype=torch.uint8, device="cpu"))
        for kind, piece in zip(kinds, _unpacked(parcel, kinds), strict=True):
            got[id(kind)] = piece
            if (place := places.get(id(kind))) is not None:
                with torch.no_grad():
                    got[id(kind)] = place.copy_(piece)
    chain.finish()
    snapshot = with_tensors(outline, lambda tensor: got[id(tensor)])
    # Parameters are copied to their place, and need no memory of their own.
    return {
        name: part if name == "parameters" else with_tensors(part, _kept) for name, part in snapshot.items()
    }


def _outlined(
    text: torch.Tensor, overwritten: Callable[[], Parameters] | None
) -> tuple[dict[str, Any], list[torch.Tensor], dict[int, torch.Tensor]]:
    """Return the snapshot with tensors that have no content, the list of these tensors, and by their ids the
    places of those that are parameters."""
    outline = loaded(text.numpy().tobytes())
    wanted: list[torch.Tensor] = []
    with_tensors(outline, lambda tensor: wanted.append(tensor) or tensor)  # type: ignore[func-returns-value]
    places = _places(outline["parameters"], overwritten()) if overwritten is not None else {}
    return outline, wanted, places


def _places(outline: Parameters, own: Parameters) -> dict[int, torch.Tensor]:
    """Return this worker's parameters by the ids of those in the outline, where a parameter can be written to
    as it is."""
    return {
        id(arrives): mine
        for module, parameters in outline.items()
        for name, arrives in parameters.items()
        if (mine := own.get(module, {}).get(name)) is not None
        and not (mine.is_conj() or mine.is_neg())
        and (mine.shape, mine.dtype) == (arrives.shape, arrives.dtype)
    }


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with memory of its own, instead of a piece of a parcel."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED


def _parcels(tensors: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Yield the indices of the tensors that are sent together, in the order of sending."""
    together: list[int] = []
    size = 0
    for i, tensor in enumerate(tensors):
        if tensor.nbytes > ALONE_BYTES:
            yield [i]
            continue
        if together and size + tensor.nbytes > PARCEL_BYTES:
            yield together
            together, size = [], 0
        together.append(i)
        size += _room(tensor)
    if together:
        yield together


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(tensors) == 1 and tensors[0].nbytes == _room(tensors[0]):
        return _bytes(tensors[0])
    parcel = torch.zeros(sum(map(_room, tensors)), dtype=torch.uint8, device="cpu")
    start = 0
    for tensor in tensors:
        parcel[start : start + tensor.nbytes] = _bytes(tensor)
        start += _room(tensor)
    return parcel


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _unpacked(parcel: torch.Tensor, kinds: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors as pieces of the parcel."""
    start = 0
    for kind in kinds:
        yield parcel[start : start + kind.nbytes].view(kind.dtype).view(kind.shape)
        start += _room(kind)
