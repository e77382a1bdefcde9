"""The copy of a state into shared memory: the plan and the buffers, which stay the same from save to save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import torch

from elasticd.checkpoint.client.collectives import RankGroup
from elasticd.checkpoint.client.gpu_copy import GpuCopier, offload, stepped
from elasticd.checkpoint.client.save_plan import RankContent, share_out
from elasticd.checkpoint.client.state_dict import Flat, Misfit, buffers_of
from elasticd.checkpoint.client.tensors import local_of, require_dense
from elasticd.checkpoint.format.frames import padded_blob, room_for
from elasticd.checkpoint.format.layout import (
    Box,
    Holding,
    RankShare,
    Shard,
    StateForm,
    TensorForm,
    TensorPart,
    box_of,
    encode_shares,
    lay_out,
)
from elasticd.checkpoint.protocol import BufferTorn, ShareBuffer
from elasticd.checkpoint.shared_memory import Memory

BUFFERS: Final = 2
_GROWS: Final = 768  # spare bytes, so that a slightly longer object still fits


@dataclass(slots=True)
class Buffer:
    """The memory of a shard. ``busy``: it is being written to the disk or sent to another node. ``copying``:
    it is being sent to another node."""

    memory: Memory
    into: list[torch.Tensor]  # the tensors in the memory that the parts are copied into
    busy: bool = False
    copying: bool = False

    @classmethod
    def make(cls, shard: Shard) -> Buffer:
        """Return a buffer for the shard. Raises OSError if there is not enough memory."""
        memory = Memory.make(shard.size)
        for at, fixed in shard.fixed:
            memory.map[at : at + len(fixed)] = fixed
        image = torch.frombuffer(memory.map, dtype=torch.uint8)
        into = []
        for part, at in shard.parts:
            dtype = getattr(torch, part.dtype)
            into.append(image[at : at + part.size].view(dtype).view(part.sizes))
        return cls(memory, into)


@dataclass(slots=True)
class CopyPlan:
    """The plan of this rank's shard, and the two buffers that the shard is copied into in turn.

    ``shape``: the shape of the state that the plan is for (see ``shape_of``). ``rooms``: the bytes reserved
    for each object, by key. ``turn``: the buffer to fill next; the other has the newest save.
    """

    number: int
    shape: tuple[Any, ...]
    shard: Shard
    rooms: Mapping[str, int]
    gpu: GpuCopier
    buffers: list[Buffer] = field(default_factory=list)
    turn: int = 0
    copy_done: Future[str] | None = None  # of a copy from a GPU: why the copy failed, or ""
    _padded: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)

    @classmethod
    def agree(
        cls,
        ranks: RankGroup,
        number: int,
        state: Mapping[str, Any],
        flat: Flat,
        blobs: Mapping[str, bytes],
        gpu: GpuCopier,
    ) -> tuple[CopyPlan, bytes]:
        """Return this rank's plan, and the shares for the saver's ``Layout``. All ranks must call this
        together. Raises Misfit."""
        shard, shares = share_out_together(ranks, state, flat, blobs)
        return cls(number, shape_of(flat), shard, _rooms(blobs), gpu), shares

    @property
    def free(self) -> bool:
        """Whether the next buffer may be overwritten."""
        if self.copying:
            return False  # the buffer may hold the newest state of which all nodes have their shards
        return self.turn >= len(self.buffers) or not self.buffers[self.turn].busy

    @property
    def copying(self) -> bool:
        return any(buffer.copying for buffer in self.buffers)

    def suits(self, shape: tuple[Any, ...], blobs: Mapping[str, bytes]) -> bool:
        """Whether a state of this shape, with these objects, can be saved by this plan."""
        return (
            self.shape == shape
            and self.rooms.keys() == blobs.keys()
            and all(len(raw) + _GROWS <= self.rooms[key] for key, raw in blobs.items())
        )

    def fill(
        self, state: Mapping[str, Any], flat: Flat, blobs: Mapping[str, bytes], say: Callable[..., bool]
    ) -> str:
        """Copy the state into the next buffer, from a GPU while training goes on: see ``copy_done``.

        Return why the copy failed; empty if it did not. ``say``: sends a message and files to the saver,
        and returns whether they were sent.
        """
        number = self.turn
        sources = [box(flat.tensors[part.key], part) for part, _ in self.shard.parts]
        on_gpu = any(map(self.gpu.has, sources))
        try:
            if number == len(self.buffers):
                self.buffers.append(Buffer.make(self.shard))
                memory = self.buffers[number].memory
                if on_gpu:
                    self.gpu.pin(memory)
                say(ShareBuffer(self.number, number), memory.fd)
        except OSError as error:
            return f"there is no memory for {self.shard.size} bytes ({error.strerror})"
        buffer = self.buffers[number]
        if not say(BufferTorn(number)):
            # A saver that still lives would mistake the buffer for its old contents.
            return "the connection to the saver is lost"
        self.copy_done = None
        with torch.no_grad():
            if on_gpu:
                lasting = stepped(state, flat)
                stays = [part.key in lasting for part, _ in self.shard.parts]
                self.copy_done = offload(self.gpu, buffer.into, sources, stays, buffer.memory)
            elif sources:  # a rank may have no tensors
                torch._foreach_copy_(buffer.into, sources)
        for key, at, room in self.shard.blobs:
            buffer.memory.map[at : at + room] = self._in_room(key, blobs[key], room)
        return ""

    def handed_over(self, *, copied: bool) -> int:
        """Note that the filled buffer belongs to the saver now, which may send it to another node. Return its
        number."""
        number = self.turn
        self.turn = (number + 1) % BUFFERS
        self.buffers[number].busy, self.buffers[number].copying = True, copied
        return number

    def _in_room(self, key: str, raw: bytes, room: int) -> bytes:
        known = self._padded.get(key)
        if known is None or known[0] != raw:
            known = self._padded[key] = (raw, padded_blob(raw, room))
        return known[1]


def box(tensor: torch.Tensor, part: TensorPart) -> torch.Tensor:
    """Return the part as a view of the tensor's memory on this rank."""
    local, offsets = local_of(tensor)
    for dim, (at, size, start) in enumerate(zip(part.offsets, part.sizes, offsets, strict=True)):
        if size != local.shape[dim]:
            local = local.narrow(dim, at - start, size)
    return local


def share_out_together(
    ranks: RankGroup, state: Mapping[str, Any], flat: Flat, blobs: Mapping[str, bytes]
) -> tuple[Shard, bytes]:
    """Return this rank's shard, and on rank 0 what all ranks have and write (``encode_shares``). All ranks
    must call this together. If the ranks' states differ, all ranks raise the same Misfit."""
    form = StateForm(tuple(_forms(flat)), tuple(buffers_of(state)))
    objects = {key: (room, flat.paths[key]) for key, room in _rooms(blobs).items()}
    holding = Holding(tuple(_boxes(flat)), objects)
    forms = ranks.collect(msgspec.json.encode(form))
    holdings = ranks.collect(msgspec.json.encode(holding))
    form_of = {raw: msgspec.json.decode(raw, type=StateForm) for raw in set(forms)}
    holding_of = {raw: msgspec.json.decode(raw, type=Holding) for raw in set(holdings)}
    held = [RankContent(form_of[form], holding_of[its]) for form, its in zip(forms, holdings, strict=True)]
    shares: list[RankShare] = []
    why = ""
    if held:
        try:
            shares = share_out(held)
        except ValueError as error:
            why = str(error)
    if why := ranks.from_first(why.encode()).decode():
        raise Misfit(why)
    encoded = [msgspec.json.encode(its) if its else b"" for its in shares]
    given = ranks.hand_out(encoded)
    share = msgspec.json.decode(given, type=RankShare) if given else RankShare()
    shard = lay_out(ranks.rank, form, holding, share)
    return shard, encode_shares(forms, holdings, encoded) if held else b""


def _rooms(blobs: Mapping[str, bytes]) -> dict[str, int]:
    return {key: room_for(raw) for key, raw in blobs.items()}


def _forms(flat: Flat) -> Iterator[TensorForm]:
    for key, tensor in flat.tensors.items():
        require_dense(tensor, key)
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield TensorForm(key, flat.paths[key], dtype, tensor.itemsize, tuple(tensor.shape))


def _boxes(flat: Flat) -> Iterator[Box | None]:
    """Yield this rank's part of each tensor: the whole tensor, its shard, or None if the shard is empty."""
    for tensor in flat.tensors.values():
        local, offsets = local_of(tensor)
        yield box_of(offsets, local.shape) if local.numel() or not tensor.numel() else None


def shape_of(flat: Flat) -> tuple[Any, ...]:
    """Return a shape that is equal for states that one plan can save."""
    tensors = tuple(
        (key, t.shape, t.dtype, getattr(t, "placements", None)) for key, t in flat.tensors.items()
    )
    return tensors, tuple(flat.paths.items())
