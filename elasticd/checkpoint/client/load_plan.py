"""Plan which bytes of a checkpoint are read into which tensors. The tensors' sharding may have changed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import gt
from typing import Any, Final

import torch
from torch import nn

from elasticd.checkpoint.client.objects import loaded
from elasticd.checkpoint.client.state_dict import Flat, Path, flatten, prepare_optimizers
from elasticd.checkpoint.client.tensors import local_of
from elasticd.checkpoint.format.manifest import BadCheckpoint, Chunk, Index, Tensor
from elasticd.checkpoint.storage.reading import WantedRange

_FEW: Final = 8  # chunks that are looked at one after another


@dataclass(slots=True)
class Target:
    """A state to be filled from ``index``, of the checkpoint ``name``. Fill the ``ranges``, then call
    ``finish``."""

    name: str
    state: dict[str, Any]
    index: Index
    ranges: list[WantedRange] = field(default_factory=list)
    flat: Flat = field(default_factory=Flat)
    _copies: list[Callable[[], object]] = field(default_factory=list)
    _blobs: dict[str, bytearray] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, state: dict[str, Any], index: Index, *, whole: bool = True) -> Target:
        """Return a target for the state. Raises ValueError if the checkpoint does not fit the state.
        ``whole``: modules and optimizers must have all that the checkpoint has of them."""
        target = cls(name, state, index)
        shapes = {key: (_dtype(t), t.shape) for key, t in index.tensors.items()}
        prepare_optimizers(state, shapes, index.paths)
        have = flatten(state)
        there = {path[:n] for path in index.paths.values() for n in (1, 3)}
        tensors = {
            key: tensor
            for key, tensor in have.tensors.items()
            if not _is_left_out(have.paths[key], state, there) or key in index.tensors
        }
        missing = [key for key in tensors if key not in index.tensors]
        if missing:
            raise ValueError(f"the checkpoint has no {_some(missing)}, which the state to be loaded has")
        for key, tensor in tensors.items():
            target._want(key, tensor, index.tensors[key])
        extra = [k for k in index.tensors if k not in have.tensors and index.paths[k][0] in state]
        odd = [
            k for k in extra if isinstance(state[str(index.paths[k][0])], nn.Module | torch.optim.Optimizer)
        ]
        if odd and whole:
            raise ValueError(f"the checkpoint has {_some(odd)}, which the state to be loaded has not")
        for key in extra:
            saved = index.tensors[key]
            fresh = torch.empty(saved.shape, dtype=_dtype(saved), device="cpu")
            target.flat.tensors[key] = fresh
            target.flat.paths[key] = index.paths[key]
            target._want(key, fresh, saved)
        for key, blob in index.blobs.items():
            if index.paths[key][0] in state:
                room = target._blobs[key] = bytearray(blob.length)
                target.ranges.append(WantedRange(blob.file, blob.at, memoryview(room)))
                target.flat.paths[key] = index.paths[key]
        # Tensors that are filled in place are listed too: nests are rebuilt from all their parts.
        for key, tensor in tensors.items():
            target.flat.tensors[key] = tensor
            target.flat.paths[key] = index.paths[key]
        return target

    def finish(self) -> Flat:
        """Return the data for ``restore``, after all ranges are filled. Raises BadCheckpoint."""
        with torch.no_grad():
            for copy in self._copies:
                copy()
        for key, raw in self._blobs.items():
            try:
                self.flat.objects[key] = loaded(bytes(raw))
            except Exception as error:
                what = f"{key} of {self.name} cannot be loaded by torch.load(weights_only=True)"
                raise BadCheckpoint(what) from error
        return self.flat

    def _want(self, key: str, tensor: torch.Tensor, saved: Tensor) -> None:
        if tuple(tensor.shape) != tuple(saved.shape):
            raise ValueError(
                f"{key} has the shape {list(saved.shape)} in the checkpoint, "
                f"and {list(tensor.shape)} in the state to be loaded"
            )
        local, offsets = local_of(tensor)
        found = 0
        for chunk in _near(saved.chunks, offsets, local.shape):
            found += self._want_of(local, offsets, chunk, _dtype(saved))
        if found != local.numel():
            raise BadCheckpoint(f"{self.name} does not hold all of {key}")

    def _want_of(
        self, local: torch.Tensor, offsets: tuple[int, ...], chunk: Chunk, dtype: torch.dtype
    ) -> int:
        """Plan to read the part of ``local`` that is in the chunk. Return the number of its elements."""
        first = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
        ends = zip(offsets, local.shape, chunk.offsets, chunk.sizes, strict=True)
        count = [min(a + n, b + m) - f for (a, n, b, m), f in zip(ends, first, strict=True)]
        if any(n <= 0 for n in count):
            return 0
        total = 1
        for n in count:
            total *= n
        row = dtype.itemsize
        for n in chunk.sizes[1:]:
            row *= n
        skip = first[0] - chunk.offsets[0] if count else 0
        at = chunk.at + skip * row
        whole_rows = tuple(count[1:]) == tuple(chunk.sizes[1:]) == tuple(local.shape[1:])
        place = local
        for dim, (f, n) in enumerate(zip(first, count, strict=True)):
            place = place.narrow(dim, f - offsets[dim], n)
        if whole_rows and place.is_contiguous() and place.device.type == "cpu" and place.dtype == dtype:
            self.ranges.append(WantedRange(chunk.file, at, as_bytes(place)))
            return total
        rows = torch.empty((*count[:1], *chunk.sizes[1:]), dtype=dtype, device="cpu")
        self.ranges.append(WantedRange(chunk.file, at, as_bytes(rows)))
        piece = rows
        for dim in range(1, len(count)):
            piece = piece.narrow(dim, first[dim] - chunk.offsets[dim], count[dim])
        self._copies.append(lambda: place.copy_(piece))
        return total


def _near(chunks: Sequence[Chunk], offsets: Sequence[int], shape: Sequence[int]) -> Sequence[Chunk]:
    """Return the chunks that may have rows of a box, and perhaps others. Of a tensor in many shards, a rank
    needs few."""
    if len(chunks) < _FEW or not shape:
        return chunks
    firsts = [chunk.offsets[0] for chunk in chunks]
    if any(map(gt, firsts, islice(firsts, 1, None))):
        chunks = sorted(chunks, key=lambda chunk: chunk.offsets[0])
        firsts.sort()
    most = max(chunk.sizes[0] for chunk in chunks)
    return chunks[bisect_right(firsts, offsets[0] - most) : bisect_left(firsts, offsets[0] + shape[0])]


def _is_left_out(path: Path, state: Mapping[str, Any], there: Collection[Path]) -> bool:
    """Whether a path may be missing in the checkpoint. An optimizer may have had no state of a parameter yet.
    A nest of plain data may have had another form."""
    value = state[str(path[0])]
    if path[:1] not in there or isinstance(value, nn.Module):
        return False
    return path[:3] not in there if isinstance(value, torch.optim.Optimizer) else len(path) > 1


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    if not tensor.numel():
        return memoryview(b"")
    array = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)  # type: ignore[arg-type]


def _dtype(saved: Tensor) -> torch.dtype:
    found = getattr(torch, saved.dtype, None)
    if not isinstance(found, torch.dtype):
        raise BadCheckpoint(
            f"this torch has no dtype {saved.dtype}: use the version of torch that saved the checkpoint"
        )
    return found


def _some(keys: Iterable[str]) -> str:
    names = list(keys)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
