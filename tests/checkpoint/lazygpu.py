"""A GPU that is none, and copies as late as one could."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from elasticd.checkpoint.client.gpu_copy import GpuCopier, GpuEvent
from elasticd.checkpoint.shared_memory import Memory


@dataclass(eq=False)
class Copy:
    """One that was asked for. It is made once training asks for something that waits for it, or ``run``."""

    into: Sequence[torch.Tensor]
    sources: Sequence[torch.Tensor]
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def device(self) -> None:
        """None, as there is none."""

    def run(self) -> None:
        if not self.done.is_set():
            torch._foreach_copy_(self.into, self.sources)
        self.done.set()

    def synchronize(self) -> None:
        assert self.done.wait(60.0)


class Lazy(GpuCopier):
    """Copies nothing before it has to."""

    def __init__(self) -> None:
        self.copies: list[Copy] = []

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0

    def copy(self, into: list[torch.Tensor], sources: list[torch.Tensor]) -> Copy:
        self.copies.append(Copy(into, sources))
        return self.copies[-1]

    def wait_on_gpu(self, event: Copy) -> None:
        for copy in self.copies[: self.copies.index(event) + 1]:
            copy.run()

    def wait(self, event: GpuEvent) -> None:
        event.synchronize()

    def pin(self, memory: Memory) -> None:
        """There is nothing to be helped."""
