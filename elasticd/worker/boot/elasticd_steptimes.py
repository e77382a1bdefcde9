"""Send the times of each step to ``elasticd bench scaling``, which has made a FIFO for them.

A record has the sums since this process began, which the reader subtracts from each other. The time in
torch's DataLoader is measured here, and only for such a reader; waits and delays are those of the heartbeat.

Standard library only, and self-contained. The reader is elasticd/cli/bench/scaling_runs.py.
"""

from __future__ import annotations

import atexit
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elasticd_waits import Waits

_VARIABLE = "ELASTICD_STEP_TIMES"  # the path of the FIFO
_SAMPLES = 8  # the word of the page with the samples that the script has reported
_FLUSH_NS = 200_000_000  # the reader wakes up seldom, as it takes a CPU from the workers
_FLUSH_RECORDS = 60  # 3,840 bytes, below PIPE_BUF, so that records of several workers do not mix

_now = time.monotonic_ns


def step_times(fields: memoryview[int], waits: Waits) -> StepTimes | None:
    """Return what sends this worker's times; None if no process reads them."""
    path = os.environ.get(_VARIABLE)
    if not path:
        return None
    try:
        # Without a reader, an open that may block would wait for ever.
        fifo = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(fifo, True)
        times = StepTimes(fifo, fields, waits)
        atexit.register(times.send)
        return times
    except Exception:  # noqa: BLE001  # the script must run in any case
        return None


class StepTimes:
    """The times of this worker's steps. ``fields``: its page."""

    def __init__(self, fifo: int, fields: memoryview[int], waits: Waits) -> None:
        self._fifo = fifo
        self._fields = fields
        self._rank = int(os.environ["RANK"])
        self._pid = os.getpid()
        self._waits = waits
        self._loads = Loads(waits)
        self._bytes = 0
        self._unsent: list[bytes] = []
        self._sent_at = 0

    def follow(self, optimizer: Any) -> None:
        """Count the bytes of this optimizer's parameters: its gradients are as large."""
        try:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad:
                        self._bytes += parameter.numel() * parameter.element_size()
        except Exception:  # noqa: BLE001, S110  # an unknown kind of optimizer
            pass

    def note(self, step: int, at_ns: int) -> None:
        """Send a record of this step, now or with a later one.

        A record has eight words of 8 bytes. They are the rank; the step, and its time in ns of
        CLOCK_MONOTONIC; the ns spent waiting for other ranks, loading data, and without a CPU; the samples so
        far; the bytes of the parameters.
        """
        if self._fifo < 0:
            return
        self._loads.wrap()
        waits, loads = self._waits, self._loads
        samples = self._fields[_SAMPLES] or loads.samples
        delayed_ns = max(0, waits.delayed_ns() - loads.delayed_ns)
        spent = waits.total_ns, loads.total_ns, delayed_ns
        words = self._rank, step, at_ns, *spent, samples, self._bytes
        self._unsent.append(b"".join(word.to_bytes(8, sys.byteorder) for word in words))
        if at_ns - self._sent_at >= _FLUSH_NS or len(self._unsent) == _FLUSH_RECORDS:
            self._sent_at = at_ns
            self.send()

    def send(self) -> None:
        """Send the records that were kept; none in a forked child, which ends with a copy of them."""
        if self._fifo < 0 or os.getpid() != self._pid:
            return
        try:
            os.write(self._fifo, b"".join(self._unsent))
        except OSError:  # the reader has gone, or the script has closed the file
            self._fifo = -1
        self._unsent.clear()


class Loads:
    """The time that the training thread spends in torch's DataLoader. ``delayed_ns``: how long the thread
    meanwhile had no CPU, which ``total_ns`` leaves out. ``samples``: the samples that were loaded for
    training, where gradients are computed."""

    def __init__(self, waits: Waits) -> None:
        self.total_ns = self.delayed_ns = self.samples = 0
        self._waits = waits
        self._wrapped = False
        self._inside = False

    def wrap(self) -> None:
        """Wrap the loader once torch has imported it."""
        module = sys.modules.get("torch.utils.data.dataloader")
        if self._wrapped or module is None:
            return
        self._wrapped = True
        try:
            iterator, loader = module._BaseDataLoaderIter, module.DataLoader
            iterator.__next__ = self._measured(iterator.__next__, counts=True)
            loader.__iter__ = self._measured(loader.__iter__)  # starts the loader's processes
        except AttributeError:  # an unknown torch: loading counts as computing
            pass

    def _measured(self, method: Callable[[Any], Any], *, counts: bool = False) -> Callable[[Any], Any]:
        grad_enabled = sys.modules["torch"].is_grad_enabled

        def measured(its_self: Any) -> Any:
            if self._inside or not self._waits.is_own_thread():
                return method(its_self)
            self._inside = True
            began, delayed = _now(), self._waits.delayed_ns()
            try:
                batch = method(its_self)
                if counts and grad_enabled():
                    self.samples += _length(batch)
                return batch
            finally:
                delayed = self._waits.delayed_ns() - delayed
                self.delayed_ns += delayed
                self.total_ns += max(0, _now() - began - delayed)
                self._inside = False

        measured.__doc__, measured.__name__ = method.__doc__, method.__name__
        return measured


def _length(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor."""
    while isinstance(batch, (tuple, list, dict)) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    shape = getattr(batch, "shape", ())
    return int(shape[0]) if shape else 0
