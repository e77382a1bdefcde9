"""Measures how long a GPU takes from one point of the program to another, by its own clock: the program only
leaves marks in the GPU's work, and nobody ever waits for the GPU. ROCm's ``torch.cuda`` is alike.

Standard library only, and self-contained.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# What the GPU has yet to come by. A program is ahead of it by about a thousand kernels at most, which are
# fewer backward passes than this by far.
_UNDER_WAY_MAX = 256


class GpuClock:
    """Of what is asked of one GPU in the current stream. ``cuda``: the module of that name. What it does
    not know how to do it leaves, for good: no error gets out, and CUDA is used by then."""

    def __init__(self, cuda: Any, device: Any) -> None:
        self.device = device
        self._cuda: Any = cuda
        self._spare: list[Any] = []
        self._begun: Any = None
        self._under_way: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """What was begun and not ended is forgotten."""
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
        """How long it took, in nanoseconds, of all that the GPU has come by since the last call."""
        took: list[int] = []
        if not self._under_way:
            return took
        try:
            if self._cuda.is_current_stream_capturing():  # which a question would spoil
                return took
            while self._under_way and self._under_way[0][1].query():
                begun, ended = self._under_way.pop(0)
                took.append(int(begun.elapsed_time(ended) * 1e6))
                self._spare += begun, ended
        except Exception:  # noqa: BLE001
            self._leave()
        return took

    def _mark(self) -> Any:
        """Leave one, if that can be. In a graph that is being captured it would stand for nothing."""
        cuda = self._cuda
        try:
            if cuda is None or cuda.is_current_stream_capturing():
                return None
            if len(self._under_way) >= _UNDER_WAY_MAX:  # a sum that lacks some would be worse than none
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
