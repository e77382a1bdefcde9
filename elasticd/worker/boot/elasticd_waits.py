"""Measure how long a worker waits for other ranks. All workers' steps take equally long, but a slow worker
waits less than the others.

* At the end of a backward pass DistributedDataParallel waits for its sums, in C++. The autograd engine runs
  the callbacks queued for the pass's end in turn. A callback that is queued when the pass's first gradient
  arrives runs before the wait. A callback that the first callback queues runs after the wait.
* Collectives called from Python end in ``Work.wait``: the script's own, and FSDP2's (``fully_shard``). FSDP2
  gathers each layer's parameters in the forward and the backward pass, and scatters the layer's gradients.

On GPUs these calls only enqueue work and return at once; the GPU waits. So the callbacks record events in the
stream of the ``backward`` call, in which the GPU waits for the sums. The GPU's clock gives the time between
the events a little later. Collectives called from Python, such as FSDP2's, are not measured on GPUs.

A worker whose machine has too few CPUs is often ready to run but does not run. That delay does not make the
worker slow. The kernel counts it for each thread. Here the count is read before and after each wait, so that
a delay during a wait is not counted twice. On GPUs the delay is not measured: the GPU works on meanwhile.

Where all CPUs are busy, the reads lengthen a step by about a tenth of a millisecond. So of many short steps
only some are measured. All sums are of the measured steps.
"""

from __future__ import annotations

import _thread
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_now = time.monotonic_ns
# The most measurements that the GPU has not completed yet. The program can be about a thousand kernels ahead
# of the GPU, which are far fewer backward passes.
_UNDER_WAY_MAX = 256
# Steps as long as this are all measured; of shorter steps, about 20 a second.
_ALL_FROM_NS = 50_000_000
_PACE_STEPS = 64  # the pace is a mean over about this many last steps
_GOLDEN = 0.6180339887498949


class Waits:
    """The waits of the training thread in the measured steps: ``total_ns`` and ``count`` so far.

    ``steps``, ``steps_ns``: the measured steps, and their time. ``delay_ns``: how long the thread was ready
    to run but did not, outside its waits. ``always``: measure all steps. ``measures``: whether the present
    step is measured.
    """

    def __init__(self) -> None:
        self.total_ns = 0
        self.count = 0
        self.steps = 0
        self.steps_ns = 0
        self.delay_ns = 0
        self.always = False
        self.measures = True
        self._ended_at = 0  # of the last step
        self._delayed_before = 0  # before the present step
        self._pace_ns = 0.0
        self._place = 0.0
        self._began = 0
        self._thread = 0
        self._hooked: set[int] = set()
        self._wrapped = False
        self._gpu: GpuClock | None = None
        self._delay: _Delay | None = None
        self._delay_in_waits_ns = 0
        self._delay_began = 0

    def step_ended(self, at_ns: int) -> bool:
        """End a step, and choose whether the next one is measured. Return whether this one was."""
        began, self._ended_at = self._ended_at, at_ns
        if not began:
            return False  # when it began is not known
        took_ns, measured = at_ns - began, self.measures
        self._pace_ns += (took_ns - self._pace_ns) / _PACE_STEPS if self._pace_ns else took_ns
        # Multiples of the golden ratio are even, and meet every step of any pattern equally often. Workers of
        # one pace choose the same steps.
        self._place = (self._place + _GOLDEN) % 1.0
        self.measures = self._place * _ALL_FROM_NS < self._pace_ns or self.always or self._gpu is not None
        if measured:
            self.catch_up()
            self.steps += 1
            self.steps_ns += took_ns
        if measured or self.measures:
            delayed_ns = self.delayed_ns()
            if measured:
                self.delay_ns += max(0, delayed_ns - self._delayed_before)
            self._delayed_before = delayed_ns
        return measured

    def delayed_ns(self) -> int:
        """Return how long this thread was ready to run but did not, outside its measured waits."""
        return max(0, self._delay.read() - self._delay_in_waits_ns) if self._delay is not None else 0

    def is_own_thread(self) -> bool:
        """Whether the caller is the training thread."""
        return _thread.get_ident() == self._thread

    def catch_up(self) -> None:
        """Add the waits that the GPU has completed."""
        if self._gpu is not None:
            took = self._gpu.finished()
            self.total_ns += sum(took)
            self.count += len(took)

    def follow(self, optimizer: Any) -> None:
        """Measure the backward passes before this optimizer's steps."""
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
                                self._delayed_before = self._delay.read()
                            self._wrap_collectives()
                            self._watch(parameter, self._begin, self._end)
                        return
        except Exception:  # noqa: BLE001, S110  # an unknown torch: nothing is measured
            pass

    def _watch_on_gpu(self, parameter: Any) -> None:
        """Watch a parameter on a GPU. A worker has one GPU. CUDA must be initialized: a fake tensor may
        claim to be on a GPU."""
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
            self._began = 0  # still set if the last backward pass failed, because a peer was lost
            if self.measures:
                queue(before)

        arrived._torchdynamo_disable = True
        parameter.register_post_accumulate_grad_hook(arrived)

    def _wrap_collectives(self) -> None:
        """Wrap ``Work.wait`` once torch has imported it."""
        c10d = sys.modules.get("torch._C._distributed_c10d")
        if self._wrapped or c10d is None:
            return
        self._wrapped = True
        wait = c10d.Work.wait
        waits, thread = self, _thread.get_ident

        # Called dozens of times in each step, so it must be fast.
        def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not waits.measures or waits._began or thread() != waits._thread:
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


class GpuClock:
    """Measures the time between two points of the program by the GPU's clock, in the current stream.
    ``cuda``: ``torch.cuda``, which is initialized; ROCm's works the same way.

    The program only records events in the GPU's work, and never waits for the GPU. The clock raises no
    errors. After the first error it measures nothing more.
    """

    def __init__(self, cuda: Any, device: Any) -> None:
        self.device = device
        self._cuda: Any = cuda
        self._spare: list[Any] = []
        self._begun: Any = None
        self._under_way: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Begin a measurement. An earlier measurement that has not ended is dropped."""
        if self._begun is not None:
            self._spare.append(self._begun)
        self._begun = self._mark()

    def end(self) -> None:
        if self._begun is None:
            return
        ended = self._mark()
        if ended is not None:
            self._under_way.append((self._begun, ended))
            self._begun = None

    def finished(self) -> list[int]:
        """Return the nanoseconds of each measurement that the GPU has completed since the last call."""
        took: list[int] = []
        if not self._under_way:
            return took
        try:
            if self._cuda.is_current_stream_capturing():  # a query would break the capture
                return took
            while self._under_way and self._under_way[0][1].query():
                begun, ended = self._under_way.pop(0)
                took.append(int(begun.elapsed_time(ended) * 1e6))
                self._spare += begun, ended
        except Exception:  # noqa: BLE001
            self._leave()
        return took

    def _mark(self) -> Any:
        """Record an event and return it; None if that is not possible. In a captured CUDA graph, an event
        would have no time."""
        cuda = self._cuda
        try:
            if cuda is None or cuda.is_current_stream_capturing():
                return None
            if len(self._under_way) >= _UNDER_WAY_MAX:  # measure nothing, as the sum would be incomplete
                self._leave()
                return None
            event = self._spare.pop() if self._spare else cuda.Event(enable_timing=True)
            event.record(cuda.current_stream(self.device))
        except Exception:  # noqa: BLE001
            self._leave()
            return None
        return event

    def _leave(self) -> None:
        self._cuda = self._begun = None
        self._spare, self._under_way = [], []


class _Delay:
    """How long the thread that makes this object was ready to run but did not run."""

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self._ns = 0
        try:
            path = f"/proc/self/task/{_thread.get_native_id()}/schedstat"
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # the kernel does not count the delay
            self._fd = -1

    def read(self) -> int:
        if self._fd >= 0:
            try:
                self._ns = int(os.pread(self._fd, 64, 0).split()[1])
            except (OSError, ValueError, IndexError):  # the script has closed the file
                self._fd = -1
        return self._ns


def _is_part(parameter: Any) -> bool:
    """Whether the parameter is this rank's shard. FSDP2 waits by itself, and copies gradients to the host
    more slowly if a parameter has a hook."""
    sharded = sys.modules.get("torch.distributed.tensor")
    return sharded is not None and isinstance(parameter, sharded.DTensor)
