"""The gradients of parameters that a sharded model keeps whole in each worker.

``fully_shard`` averages the gradients of the parameters that it shards, in each backward pass. This module
averages those of the other parameters, at the end of each backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from elasticd.worker.gradients.buckets import Gradients, cut, fill
from elasticd.worker.gradients.consistent import add_earlier

_engine: Any = torch.autograd.Variable._execution_engine


class ReplicatedGradients:
    """Averages the gradients of these parameters over all workers, in each backward pass. Call ``close`` at
    the world's end.

    In a pass, either all workers use some of the parameters, or none does.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._earlier: dict[int, Gradients] = {}  # by pass under way: the gradients of earlier passes
        self._hooks = [
            _hooked(p, self._before_gradient) for p in parameters if p.is_floating_point() or p.is_complex()
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._earlier = [], {}

    def _before_gradient(self, _: torch.Tensor) -> None:
        """Before a pass adds its first gradient, keep the gradients of earlier passes apart."""
        under_way = torch._C._current_graph_task_id()
        if under_way in self._earlier:
            return
        self._earlier[under_way] = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        end = partial(self._end_pass, under_way)
        weakref.finalize(end, self._give_back, under_way)  # torch drops the call if the pass fails
        _engine.queue_callback(end)

    def _give_back(self, under_way: int) -> None:
        """Add the gradients of earlier passes, if the pass has failed."""
        if (earlier := self._earlier.pop(under_way, None)) is not None:
            add_earlier(self._parameters, earlier)

    @torch.no_grad()
    def _end_pass(self, under_way: int) -> None:
        """Replace the gradients of the pass by averages, and add those of earlier passes."""
        if (earlier := self._earlier.pop(under_way, None)) is not None:
            average([p for p in self._parameters if p.requires_grad])
            add_earlier(self._parameters, earlier)


def _hooked(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Have ``hook`` called before the parameter gets a gradient, also if it is frozen and trains later."""
    trains = parameter.requires_grad
    parameter.requires_grad_(True)  # torch refuses a hook of a frozen parameter, and keeps one
    handle: RemovableHandle = parameter.register_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trains)
    return handle


def average(parameters: Sequence[torch.Tensor]) -> None:
    """Replace the gradients of the parameters by their averages over all workers, which call the function
    together. A parameter of which no worker has a gradient gets none. Raises TypeError for a sparse one."""
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        raise TypeError(
            "a parameter that shard= leaves whole has a sparse gradient, which State does not average: make "
            "the module without sparse=True"
        )
    size = dist.get_world_size()
    if size == 1 or not parameters:
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    used = gradients[0].new_tensor([p.grad is not None for p in parameters], dtype=torch.float32)
    works = [dist.all_reduce(used, async_op=True)]
    buckets = []
    for members in fill(gradients, range(len(gradients))):
        likes = [parameters[n] for n in members]
        flat = gradients[members[0]].new_empty(sum(p.numel() for p in likes))
        parts = cut(flat, likes)
        torch._foreach_copy_(parts, [gradients[n] for n in members])
        works.append(dist.all_reduce(flat, async_op=True))
        buckets.append((members, flat, parts))
    for work in works:
        work.wait()
    is_used = used.tolist()
    for members, flat, parts in buckets:
        flat.div_(size)
        for number, part in zip(members, parts, strict=True):
            parameters[number].grad = part if is_used[number] else None
