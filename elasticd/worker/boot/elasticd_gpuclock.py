"""Measure the time between two points of the program by the GPU's clock.

The program only records events in the GPU's work, and never waits for the GPU. ROCm's ``torch.cuda`` works
the same way.

Standard library only, and self-contained.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# The most measurements that the GPU has not completed yet. The program can be about a thousand kernels ahead
# of the GPU, which are far fewer backward passes.
_UNDER_WAY_MAX = 256


class GpuClock:
    """The clock of one GPU's work in the current stream. ``cuda``: ``torch.cuda``, which is initialized.

    The clock raises no errors. After the first error it measures nothing more.
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
