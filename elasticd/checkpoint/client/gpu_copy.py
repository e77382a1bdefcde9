"""Copies from a GPU that training does not wait for: on a separate stream, into pinned memory, during the
next forward and backward pass.

Tensors that only an optimizer's step changes are copied meanwhile, and the next optimizer step waits for the
copy, on the GPU. For all other tensors (buffers of modules, the script's own changes), all later work on the
GPU waits. A tensor that was changed otherwise before its copy makes the save fail; its version counter shows
the change. This module was written without a GPU and has not run on one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elasticd.checkpoint.client.state_dict import Flat
from elasticd.checkpoint.client.tensors import local_of
from elasticd.checkpoint.shared_memory import Memory


class GpuEvent(Protocol):
    @property
    def device(self) -> torch.device | None: ...
    def synchronize(self) -> None: ...


class GpuCopier:
    """The parts of ``torch.cuda`` that copying needs."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def pin(self, memory: Memory) -> None:
        """Pin the memory, so that copies into it are asynchronous. If pinning is refused, copies are slower,
        but correct."""
        at = torch.frombuffer(memory.map, dtype=torch.uint8).data_ptr()
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(cuda.cudaHostRegister(at, memory.size, 0)) == 0:
            weakref.finalize(memory, cuda.cudaHostUnregister, at)
            return
        # Take the error of cudaHostRegister, which CUDA would report to the next call.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")

    def copy(self, into: list[torch.Tensor], sources: list[torch.Tensor]) -> GpuEvent:
        """Begin to copy, after all earlier work on this GPU. All sources are on one GPU."""
        device = sources[0].device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            torch._foreach_copy_(into, sources, non_blocking=True)
        for source in sources:
            source.record_stream(stream)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait_on_gpu(self, event: GpuEvent) -> None:
        """Let later work on the GPU wait for the event."""
        torch.cuda.current_stream(event.device).wait_event(event)  # type: ignore[arg-type]

    def wait(self, event: GpuEvent) -> None:
        """Wait for the event. A new thread has no device yet, and must not initialise GPU 0."""
        with torch.cuda.device(event.device):
            event.synchronize()


@dataclass(slots=True, eq=False, weakref_slot=True)
class PendingCopy:
    """Unfinished copies of ``tensors``, which only an optimizer's step may change meanwhile. ``memory`` is
    their destination, which is kept until the copies are done."""

    gpu: GpuCopier
    event: GpuEvent
    tensors: Sequence[torch.Tensor]
    memory: Memory | None
    _versions: list[int] = field(default_factory=list)
    _intact: bool | None = None  # whether no tensor was changed before its copy; None: not known yet
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._versions = self._count()

    def protect(self) -> None:
        """Protect the copies from an optimizer's step that is about to begin."""
        with self._lock:
            if self._intact is None:
                self._intact = self._count() == self._versions
                self.gpu.wait_on_gpu(self.event)

    def finish(self) -> str:
        """Wait until all is copied. Return the error if a tensor was changed before its copy; else an empty
        string."""
        self.gpu.wait(self.event)
        with self._lock:
            if self._intact is None:
                self._intact = self._count() == self._versions
        return (
            "" if self._intact else "parameters were changed before they were copied, and not by an optimizer"
        )

    def _count(self) -> list[int]:
        return [tensor._version for tensor in self.tensors]


_pending: weakref.WeakSet[PendingCopy] = weakref.WeakSet()
# One thread, so that copies are finished in the order of the saves. The interpreter waits for it at exit.
_finisher = ThreadPoolExecutor(1, "offload")


def offload(
    gpu: GpuCopier,
    into: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    lasting: Iterable[bool],
    memory: Memory | None = None,
) -> Future[str] | None:
    """Copy all sources. Return None if the copies are done, else a future of ``PendingCopy.finish``.

    ``lasting``: for each source, whether only an optimizer's step changes it. ``memory``: the memory that
    holds ``into``.
    """
    pairs = list(zip(into, sources, lasting, strict=True))
    by_gpu = {b.device for _, b, _ in pairs if gpu.has(b)}
    here = [(a, b) for a, b, _ in pairs if not gpu.has(b) or len(by_gpu) > 1]
    there = [(a, b) for a, b, stays in pairs if gpu.has(b) and len(by_gpu) == 1 and not stays]
    later = [(a, b) for a, b, stays in pairs if gpu.has(b) and len(by_gpu) == 1 and stays]
    event = None
    if there:
        event = gpu.copy(*_apart(there))
        gpu.wait_on_gpu(event)
    if later:  # on the same stream, after the copies above
        event = gpu.copy(*_apart(later))
    copy_done = None
    if event is not None:
        _watch_optimizers()
        pending = PendingCopy(gpu, event, [b for _, b in later], memory)
        _pending.add(pending)
        copy_done = _finisher.submit(pending.finish)
    if here:
        torch._foreach_copy_(*_apart(here))
    return copy_done


def stepped(state: Mapping[str, Any], flat: Flat) -> set[str]:
    """Return the keys of tensors that only an optimizer's step changes. Optimizers whose steps may be part of
    a CUDA graph are left out, since such steps are not noticed."""
    optimizers = {
        name: value
        for name, value in state.items()
        if isinstance(value, Optimizer) and not any(g.get("capturable") for g in value.param_groups)
    }
    held = {
        local_of(parameter.detach())[0].data_ptr()
        for optimizer in optimizers.values()
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {
        key
        for key, tensor in flat.tensors.items()
        if flat.paths[key][0] in optimizers or local_of(tensor)[0].data_ptr() in held
    }


def _apart(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [a for a, _ in pairs], [b for _, b in pairs]


@functools.cache
def _watch_optimizers() -> None:
    def before_step(*_: Any) -> None:
        for pending in list(_pending):
            pending.protect()

    register_optimizer_step_pre_hook(before_step)
