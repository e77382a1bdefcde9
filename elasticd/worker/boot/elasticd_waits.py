"""Measures how long a worker waits for other ranks: what makes a slow one differ from those that wait
for it, whose steps take just as long.

* At the end of a backward pass DistributedDataParallel waits for its sums, in C++. The autograd engine
  runs what was queued for its end in turn: what we queue as the first gradient of the pass arrives comes
  before that wait, and what that queues in its turn comes after it.
* Collectives that a script calls itself end in ``Work.wait``.

On GPUs all this only enqueues, and takes no time: nothing is measured there.
"""

from __future__ import annotations

import _thread
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_now = time.monotonic_ns


class Waits:
    """``total_ns`` and ``count`` so far. For the thread that trains."""

    def __init__(self) -> None:
        self.total_ns = 0
        self.count = 0
        self._began = 0
        self._thread = 0
        self._hooked: set[int] = set()
        self._wrapped = False

    def follow(self, optimizer: Any) -> None:
        """Measure in the backward passes that lead to this optimizer's steps."""
        self._thread = _thread.get_ident()
        try:
            self._wrap_collectives()
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad and parameter.is_leaf:
                        if not parameter.is_cuda and id(parameter) not in self._hooked:
                            self._hooked.add(id(parameter))
                            self._watch(parameter)
                        return
        except Exception:  # noqa: BLE001, S110  # a torch we do not know: then it is not measured
            pass

    def _watch(self, parameter: Any) -> None:
        queue = sys.modules["torch"].autograd.Variable._execution_engine.queue_callback

        def after() -> None:
            self._end()

        def before() -> None:
            self._begin()
            queue(after)

        def arrived(_: Any) -> None:
            if not self._began:
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
        waits = self

        def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
            if waits._began or _thread.get_ident() != waits._thread:
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
        self._began = _now()

    def _end(self) -> None:
        if self._began:
            self.total_ns += _now() - self._began
            self.count += 1
            self._began = 0
