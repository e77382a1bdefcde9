"""Buffers of modules in consistent mode, such as the running statistics of batch normalization.

Each virtual rank begins a step with the committed buffers. At the end of the step, all workers get the
buffers of the last virtual rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

LOOKS = 3  # in this many first steps of a world, large buffers are compared: .data changes no version
SMALL = 1 << 16  # buffers of at most this many elements are always copied: BatchNorm changes no version


class Buffers:
    """The buffers of these modules in the present world. The worker ``source``, which has the last virtual
    rank, sends its buffers to the others. The last virtual rank always has samples."""

    def __init__(self, modules: Iterable[nn.Module], rank: int, size: int, source: int) -> None:
        found = {id(b): b for module in modules for b in module.buffers()}.values()
        # Buffers with wide elements come first, so that all are aligned when they are packed into one tensor.
        ordered = sorted(found, key=lambda b: -b.element_size())
        self._small = [b for b in ordered if b.numel() <= SMALL]
        self._large = [b for b in ordered if b.numel() > SMALL]
        self._source, self._size = source, size
        self._is_source = rank == source
        self._versions: list[int] = []
        self._kept: list[torch.Tensor] = []
        self._kept_versions: list[int] = []  # the versions of the large buffers when they were copied
        self._unversioned: set[int] = set()  # large buffers whose version does not change with their content
        self._looks = LOOKS
        self._seen: list[torch.Tensor] = []  # copies of large buffers in the first steps
        self._packet: torch.Tensor | None = None
        self._sent: dist.Work | None = None

    @property
    def large(self) -> int:
        """The number of large buffers. A large buffer is copied only if it has changed."""
        return len(self._large)

    def note(self) -> None:
        """Note the versions of the buffers when a virtual rank begins."""
        self._versions = [b._version for b in self._large]
        self._seen = [b.detach().clone() for b in self._large] if self._looks > 0 else []

    def changed(self) -> list[bool]:
        """Return for each large buffer whether it has changed since ``note``."""
        for i, (buffer, seen) in enumerate(zip(self._large, self._seen, strict=False)):
            if buffer._version == self._versions[i] and not torch.equal(buffer, seen):
                self._unversioned.add(i)
        return [
            b._version != v or i in self._unversioned
            for i, (b, v) in enumerate(zip(self._large, self._versions, strict=True))
        ]

    def keep(self) -> None:
        """Copy the buffers, so that the next virtual rank can begin with the same buffers."""
        if not self._kept:
            self._kept = [b.detach().clone() for b in (*self._small, *self._large)]
        else:
            versions = zip(self._versions, self._kept_versions, strict=True)
            stale = [v != kept or i in self._unversioned for i, (v, kept) in enumerate(versions)]
            _copy(self._chosen(self._kept, stale), self._chosen([*self._small, *self._large], stale))
        self._kept_versions = self._versions

    def put_back(self) -> None:
        """Restore the copied buffers before the next virtual rank."""
        stale = self.changed()
        _copy(self._chosen([*self._small, *self._large], stale), self._chosen(self._kept, stale))
        self.note()
        self._kept_versions = self._versions

    def send_round(self) -> None:
        """Begin to send the last virtual rank's small buffers to all workers."""
        self._looks -= 1
        if self._size > 1 and self._small:
            self._packet = torch.cat([b.detach().reshape(-1).view(torch.uint8) for b in self._small])
            self._sent = dist.broadcast(self._packet, self._source, async_op=True)

    def arrive(self, changed: Sequence[bool]) -> None:
        """Wait until the buffers have arrived. ``changed``: for each large buffer, whether any virtual rank
        has changed it."""
        if self._sent is not None and self._packet is not None:
            self._sent.wait()
            if not self._is_source:
                ends = torch.tensor([b.nbytes for b in self._small], device="cpu").cumsum(0).tolist()
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
