"""Buffers of modules, such as the running statistics of batch normalization: each virtual rank begins
a step with those that were committed, and what the last one makes of them is what stays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

LOOKS = (
    3  # steps of a world in which large ones are looked at, too: some change without a trace in their version
)
SMALL = 1 << 16  # elements; batch normalization changes its own without a trace in their version


class Buffers:
    """Of these modules, in the present world. The last virtual rank is the one that always has
    samples; it is the last worker's."""

    def __init__(self, modules: Iterable[nn.Module], rank: int, size: int) -> None:
        found = {id(b): b for module in modules for b in module.buffers()}.values()
        # Wide numbers first: packed one after the other, each then starts at a multiple of its width.
        ordered = sorted(found, key=lambda b: -b.element_size())
        self._small = [b for b in ordered if b.numel() <= SMALL]
        self._large = [b for b in ordered if b.numel() > SMALL]
        self._source, self._size = size - 1, size
        self._is_source = rank == size - 1
        self._versions: list[int] = []
        self._kept: list[torch.Tensor] = []
        self._kept_versions: list[int] = []  # of the large ones
        self._traceless: set[int] = set()  # large ones that change, and their versions do not
        self._looks = LOOKS
        self._seen: list[torch.Tensor] = []  # what large ones were, while they are looked at
        self._packet: torch.Tensor | None = None
        self._sent: dist.Work | None = None

    @property
    def large(self) -> int:
        """How many there are of which it is worth asking whether they have changed."""
        return len(self._large)

    def note(self) -> None:
        """This is what they are when a virtual rank begins."""
        self._versions = [b._version for b in self._large]
        self._seen = [b.detach().clone() for b in self._large] if self._looks > 0 else []

    def changed(self) -> list[bool]:
        """Which of the large ones are not what was noted."""
        for i, (buffer, seen) in enumerate(zip(self._large, self._seen, strict=False)):
            if buffer._version == self._versions[i] and not torch.equal(buffer, seen):
                self._traceless.add(i)
        return [
            b._version != v or i in self._traceless
            for i, (b, v) in enumerate(zip(self._large, self._versions, strict=True))
        ]

    def keep(self) -> None:
        """Have a copy of what was just noted, for another virtual rank to begin with."""
        if not self._kept:
            self._kept = [b.detach().clone() for b in (*self._small, *self._large)]
        else:
            versions = zip(self._versions, self._kept_versions, strict=True)
            stale = [v != kept or i in self._traceless for i, (v, kept) in enumerate(versions)]
            _copy(self._chosen(self._kept, stale), self._chosen([*self._small, *self._large], stale))
        self._kept_versions = self._versions

    def put_back(self) -> None:
        """Another virtual rank begins."""
        stale = self.changed()
        _copy(self._chosen([*self._small, *self._large], stale), self._chosen(self._kept, stale))
        self.note()
        self._kept_versions = self._versions

    def send_round(self) -> None:
        """All virtual ranks are done: begin to send."""
        self._looks -= 1
        if self._size > 1 and self._small:
            self._packet = torch.cat([b.detach().reshape(-1).view(torch.uint8) for b in self._small])
            self._sent = dist.broadcast(self._packet, self._source, async_op=True)

    def arrive(self, changed: Sequence[bool]) -> None:
        """Wait until they are there. ``changed``: the large ones that any virtual rank has changed."""
        if self._sent is not None and self._packet is not None:
            self._sent.wait()
            if not self._is_source:
                ends = torch.tensor([b.nbytes for b in self._small]).cumsum(0).tolist()
                parts = torch.tensor_split(self._packet, ends[:-1])
                _copy(
                    self._small,
                    [p.view(b.dtype).view(b.shape) for p, b in zip(parts, self._small, strict=True)],
                )
            self._sent = self._packet = None
        if self._size > 1:
            for buffer, has_changed in zip(self._large, changed, strict=True):
                if has_changed:
                    arriving = buffer.detach().clone()
                    dist.broadcast(arriving, self._source)
                    _copy([buffer], [arriving])

    def _chosen(self, tensors: Sequence[torch.Tensor], large: Sequence[bool]) -> list[torch.Tensor]:
        few = len(self._small)
        return [*tensors[:few], *(t for t, wanted in zip(tensors[few:], large, strict=True) if wanted)]


@torch.no_grad()
def _copy(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    if into:
        torch._foreach_copy_(list(into), list(values))
