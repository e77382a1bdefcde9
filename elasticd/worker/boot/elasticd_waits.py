"""Measures how long a worker waits for other ranks: what makes a slow one differ from those that wait
for it, whose steps take just as long.

* At the end of a backward pass DistributedDataParallel waits for its sums, in C++. The autograd engine
  runs what was queued for its end in turn: what we queue as the first gradient of the pass arrives comes
  before that wait, and what that queues in its turn comes after it.
* Collectives that Python code calls end in ``Work.wait``: those of the script itself, and those of FSDP2
  (``fully_shard``), which gathers each layer's parameters in the forward and again in the backward pass, and
  scatters its gradients.

On GPUs all this only enqueues, and takes no time. There it is the GPU that waits: what runs before and after
DistributedDataParallel's wait leaves marks in the stream that the sums are waited for in (which is the one
that ``backward`` was called in: the engine sees to that), and the GPU's clock tells the time between them, a
little later. Collectives that Python code calls are not measured there, and so FSDP2 is not.

A worker whose machine has too few processors is often ready to run and does not: that is no slowness of its
own. The kernel counts that time for each thread; here it is read before and after each wait, so that what
falls into a wait is not counted twice. On GPUs it is not measured: the GPU works on meanwhile.
"""

from __future__ import annotations

import _thread
import os
import sys
import time

from elasticd_gpuclock import GpuClock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_now = time.monotonic_ns


class Waits:
    """``total_ns`` and ``count`` so far; of a GPU's, what it had come by at the last ``catch_up``. For the
    thread that trains."""

    def __init__(self) -> None:
        self.total_ns = 0
        self.count = 0
        self._began = 0
        self._thread = 0
        self._hooked: set[int] = set()
        self._wrapped = False
        self._gpu: GpuClock | None = None
        self._delay: _Delay | None = None
        self._delay_in_waits_ns = 0
        self._delay_began = 0

    def delayed_ns(self) -> int:
        """For how long this thread was ready to run and did not, but for what fell into its waits."""
        return max(0, self._delay.read() - self._delay_in_waits_ns) if self._delay is not None else 0

    def catch_up(self) -> None:
        if self._gpu is not None:
            took = self._gpu.finished()
            self.total_ns += sum(took)
            self.count += len(took)

    def follow(self, optimizer: Any) -> None:
        """Measure in the backward passes that lead to this optimizer's steps."""
        self._thread = _thread.get_ident()
        try:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad and parameter.is_leaf:
                        if parameter.is_cuda:
                            self._watch_on_gpu(parameter)
                        else:
                            if self._delay is None or self._delay.thread != self._thread:
                                self._delay, self._delay_in_waits_ns = _Delay(self._thread), 0
                            self._wrap_collectives()
                            self._watch(parameter, self._begin, self._end)
                        return
        except Exception:  # noqa: BLE001, S110  # a torch we do not know: then it is not measured
            pass

    def _watch_on_gpu(self, parameter: Any) -> None:
        """One GPU alone, as a worker has; and not where CUDA is not in use, whatever a parameter says that
        only stands for one."""
        cuda = sys.modules["torch"].cuda
        if self._gpu is None and cuda.is_initialized():
            self._gpu = GpuClock(cuda, parameter.device)
        if self._gpu is not None and self._gpu.device == parameter.device:
            self._watch(parameter, self._gpu.begin, self._gpu.end)

    def _watch(self, parameter: Any, begin: Callable[[], None], end: Callable[[], None]) -> None:
        if id(parameter) in self._hooked or _is_part(parameter):
            return
        self._hooked.add(id(parameter))
        queue = sys.modules["torch"].autograd.Variable._execution_engine.queue_callback

        def before() -> None:
            begin()
            queue(end)

        def arrived(_: Any) -> None:
            self._began = 0  # left so by a pass whose end has failed, as a peer was lost
            queue(before)

        arrived._torchdynamo_disable = True
        parameter.register_post_accumulate_grad_hook(arrived)

    def _wrap_collectives(self) -> None:
        """Once torch's are there."""
        c10d = sys.modules.get("torch._C._distributed_c10d")
        if self._wrapped or c10d is None:
            return
        self._wrapped = True
        wait = c10d.Work.wait
        waits, thread = self, _thread.get_ident

        def measured(self: Any, *args: Any, **kwargs: Any) -> Any:  # dozens of times a step
            if waits._began or thread() != waits._thread:
                return wait(self, *args, **kwargs)
            waits._begin()
            try:
                return wait(self, *args, **kwargs)
            finally:
                waits._end()

        measured._torchdynamo_disable = True
        measured.__doc__, measured.__name__ = wait.__doc__, "wait"
        c10d.Work.wait = measured

    def _begin(self) -> None:
        if self._delay is not None:
            self._delay_began = self._delay.read()
        self._began = _now()

    def _end(self) -> None:
        if self._began:
            self.total_ns += _now() - self._began
            self.count += 1
            self._began = 0
            if self._delay is not None:
                self._delay_in_waits_ns += self._delay.read() - self._delay_began


class _Delay:
    """Of the thread that makes it."""

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self._ns = 0
        try:
            path = f"/proc/self/task/{_thread.get_native_id()}/schedstat"
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # a kernel that does not tell
            self._fd = -1

    def read(self) -> int:
        if self._fd >= 0:
            try:
                self._ns = int(os.pread(self._fd, 64, 0).split()[1])
            except (OSError, ValueError, IndexError):  # the script has closed it
                self._fd = -1
        return self._ns


def _is_part(parameter: Any) -> bool:
    """Whether it is this rank's part of a sharded one. FSDP2 waits by itself, and copies gradients to the
    host less well where a parameter has a hook."""
    sharded = sys.modules.get("torch.distributed.tensor")
    return sharded is not None and isinstance(parameter, sharded.DTensor)
