"""Exchange the state at the start of each round, from a worker with the newest state to the other workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from elasticd.channel.worker_messages import Holds, Source
from elasticd.checkpoint.client.objects import loaded
from elasticd.core.age import Age
from elasticd.worker.commit.committed import CommittedState
from elasticd.worker.commit.comparison import Digests
from elasticd.worker.values.plaindata import outlined, with_tensors
from elasticd.worker.world.group import World, gathered

PARCEL_BYTES = 2 << 20  # small tensors are sent together, larger tensors in pieces of this size
ALONE_BYTES = PARCEL_BYTES // 4  # a larger tensor is sent from its own memory
UNDER_WAY_MAX = 8  # the most pieces in flight: enough to keep a link busy, with little memory
CHAIN_MAX = 512  # the most places of one chain; a state of 1 GB has as many pieces
RUN = 8  # the places of a chain in a tree: nodes mostly have 8 workers, with consecutive ranks
_ALIGNED = 16
_HOLDS = tuple(Holds)
_NO_DIGESTS = Digests()
Parameters = Mapping[str, Mapping[str, torch.Tensor]]  # by the names of the module and of the parameter


_NOT_WHOLE = (
    "a part of the script's initial state was overwritten, by a damaged checkpoint or by another worker's "
    "state of which the rest was lost, and nothing else can be loaded: remove the checkpoints if they are "
    "damaged, or have restore= load a state"
)


class StateLost(RuntimeError):
    """No worker has a whole state."""


@dataclass(frozen=True, slots=True)
class HeldState:
    """The state that a worker brings to a round, and its age (see ``Age``). ``marks``: the number of commits
    without a step, such as an epoch's end."""

    holds: Holds
    agreed: int
    step: int
    marks: int = 0
    digests: Digests = _NO_DIGESTS


@dataclass(frozen=True, slots=True)
class Transfer:
    """The source of the state and the ranks that take it. ``fresh``: no worker has committed anything, so all
    begin with the source's initial state."""

    source: int
    takers: tuple[int, ...]
    fresh: bool


def choose(standings: Sequence[HeldState]) -> Transfer:
    """Choose the most advanced state. Of several workers that have it, the lowest rank sends. If none has a
    state, the lowest rank whose initial state is intact sends this one."""
    ages = [(s.agreed, s.step, s.marks) if s.holds is Holds.WHOLE else None for s in standings]
    newest = max((age for age in ages if age is not None), default=None)
    if newest is None:
        source = next((rank for rank, s in enumerate(standings) if s.holds is Holds.NONE), 0)
        return Transfer(source, tuple(r for r in range(len(standings)) if r != source), fresh=True)
    takers = tuple(rank for rank, age in enumerate(ages) if age != newest)
    return Transfer(ages.index(newest), takers, fresh=False)


def agree(state: CommittedState, world: World) -> Source:
    """Give all workers of the world the same state. Return where the state came from.

    Raises StateLost. Raises WorldChanged if the world ends first. This worker then has its old state, or a
    torn one if it was loading a checkpoint.
    """
    state.begin()
    standings = _standings(state, world)
    choice = choose(standings)
    digests = [each.digests for each in standings]
    if not choice.fresh:
        holders = [rank for rank in range(world.size) if rank not in choice.takers]
        state.comparison.compare(world, holders, digests)
    if len({each.began for each in digests}) > 1:
        joins = state.holds is Holds.NONE
        state.comparison.compare_beginnings(world, choice.source, fresh=choice.fresh, joins=joins)
    newest = standings[choice.source]
    age = Age(newest.agreed, newest.step)
    tier = ""
    if choice.fresh:
        tier = state.resume(world)
    elif age.agreed < world.number - 1 and state.has_newer(age, world):
        # A kept state may be of a later world, of which no worker is left.
        tier = state.resume(world, beyond=age)
    if tier:
        state.agree(world.number)
        return Source(tier)
    if choice.fresh:
        torn = [s.step for s in standings if s.holds is Holds.TORN and s.agreed]
        if torn and not state.can_restore:
            raise StateLost(_why_lost(max(torn)))
        if choice.source == world.rank and not state.restore():
            if torn:
                raise StateLost(_why_lost(max(torn)))
            if state.holds is Holds.TORN:
                raise StateLost(_NOT_WHOLE)
    if choice.takers:
        if world.rank == choice.source:
            with world.or_over():
                send_snapshot(state.snapshot(), choice)
        elif world.rank in choice.takers:
            in_place = state.holds is not Holds.WHOLE and not choice.fresh
            with world.or_over():
                snapshot = receive_snapshot(choice, world.rank, state.overwritten if in_place else None)
            state.take(snapshot)
    state.agree(world.number)
    if choice.fresh:
        return Source.SCRIPT
    state.survived()
    return Source.SURVIVOR


def _why_lost(step: int) -> str:
    never = "; state.commit() was never called" if step == 0 else ""
    return (
        f"no worker has a whole state any more: after committed step {step} each was interrupted in an "
        "optimizer's step, in another change of weights or while it read a checkpoint, and could not undo "
        f"that{never}. Call state.commit() right after the optimizer's step, call no collective in between "
        "or while other weights are swapped in, or give State undo=True, which keeps a copy at each commit, "
        "or a restore= that loads a checkpoint"
    )


def _standings(state: CommittedState, world: World) -> list[HeldState]:
    """Return the state that each worker brings, by rank."""
    mine = [_HOLDS.index(state.holds), state.agreed, state.step, state.progress.marks]
    return [
        HeldState(_HOLDS[holds], agreed, step, marks, Digests(*digests))
        for holds, agreed, step, marks, *digests in gathered([*mine, *state.comparison.digests()], world)
    ]


# ---------------------------------------------------------------- sending


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

    def __init__(self, choice: Transfer, rank: int) -> None:
        order = (choice.source, *choice.takers)
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


def send_snapshot(snapshot: Any, choice: Transfer) -> None:
    outline, tensors = outlined(snapshot)
    chain = _Chain(choice, choice.source)
    text = torch.frombuffer(bytearray(outline), dtype=torch.uint8)
    chain.carry(torch.tensor([len(text)], device="cpu").view(torch.uint8))
    chain.carry(text)
    for together in _parcels(tensors):
        chain.carry(_packed([tensors[i] for i in together]))
    chain.finish()


def receive_snapshot(
    choice: Transfer, rank: int, overwritten: Callable[[], Parameters] | None = None
) -> dict[str, Any]:
    """Receive a snapshot. The snapshot is used only once it is complete, so a source that dies on the way
    does no harm.

    ``overwritten``: return the parameters that each arriving piece is written to at once, so that there is
    never a second copy of them all. They are torn if the source dies on the way. The function is called once
    the source has begun to send.
    """
    chain = _Chain(choice, rank)
    length = int(chain.carry(torch.zeros(8, dtype=torch.uint8, device="cpu")).view(torch.int64))
    text = chain.carry(torch.empty(length, dtype=torch.uint8, device="cpu"))
    outline = loaded(text.numpy().tobytes())
    wanted: list[torch.Tensor] = []
    with_tensors(outline, lambda tensor: wanted.append(tensor) or tensor)  # type: ignore[func-returns-value]
    places = _places(outline["parameters"], overwritten()) if overwritten is not None else {}
    got: dict[int, torch.Tensor] = {}  # by the id of the tensor in the outline
    for together in _parcels(wanted):
        kinds = [wanted[i] for i in together]
        place = places.get(id(kinds[0]))
        if len(kinds) == 1 and place is not None and place.nbytes == _room(place):
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


def _places(outline: Parameters, own: Parameters) -> dict[int, torch.Tensor]:
    """Return this worker's parameters by the ids of those in the outline, where a parameter can be written to
    as it is."""
    return {
        id(arrives): mine
        for module, parameters in outline.items()
        for name, arrives in parameters.items()
        if (mine := own.get(module, {}).get(name)) is not None
        and mine.is_contiguous()
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
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _unpacked(parcel: torch.Tensor, kinds: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors as pieces of the parcel."""
    start = 0
    for kind in kinds:
        yield parcel[start : start + kind.nbytes].view(kind.dtype).view(kind.shape)
        start += _room(kind)
