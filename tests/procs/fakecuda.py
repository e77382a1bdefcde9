"""Stands in for ``torch.cuda``, as far as its clocks go: streams whose work is done in order, when a test
says so.

As in CUDA, an event counts once its stream has reached it. A question about a time raises an error before
that. While a stream is captured no question is answered, and a question spoils the capture.
"""

from __future__ import annotations

import torch


class Stream:
    """``wait``: delay everything that is asked of the stream from then on. ``run``: let the stream reach so
    many of its events, or all."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.capturing = False
        self.spoilt = False
        self._asked_ms = 0.0
        self._marks: list[Event] = []

    def wait(self, ms: float) -> None:
        self._asked_ms += ms

    def mark(self, event: Event) -> None:
        assert not self.capturing
        event.done, event.at_ms = False, self._asked_ms
        self._marks.append(event)

    def run(self, marks: int | None = None) -> None:
        for event in self._marks[:marks]:
            event.done = True
        del self._marks[:marks]


class Event:
    def __init__(self, cuda: Cuda, enable_timing: bool) -> None:
        self.cuda, self.timing = cuda, enable_timing
        self.stream: Stream | None = None
        self.done, self.at_ms = True, 0.0

    def record(self, stream: Stream) -> None:
        self.cuda.called("record")
        assert self.stream is None or self.stream.device == stream.device
        self.stream = stream
        stream.mark(self)

    def query(self) -> bool:
        self.cuda.called("query")
        if self.cuda.stream.capturing:
            self.cuda.stream.spoilt = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return self.done

    def elapsed_time(self, end: Event) -> float:
        self.cuda.called("elapsed_time")
        if not (self.timing and end.timing and self.stream and end.stream):
            raise ValueError(
                "both events should be recorded, and with timing, before calculating elapsed time"
            )
        if not (self.done and end.done):
            raise RuntimeError("CUDA error: device not ready")
        return end.at_ms - self.at_ms


class Cuda:
    """One GPU. ``made``: the events so far. ``breaks``: the name of the call that fails."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, Stream(device)
        self.made = 0
        self.breaks = ""
        self.calls = 0
        self.in_use = True

    def called(self, name: str) -> None:
        self.calls += 1
        if name == self.breaks:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def is_initialized(self) -> bool:
        return self.in_use

    def is_current_stream_capturing(self) -> bool:
        self.called("is_current_stream_capturing")
        return self.stream.capturing

    def current_stream(self, device: torch.device) -> Stream:
        self.called("current_stream")
        assert device == self.device
        return self.stream

    def Event(self, *, enable_timing: bool = False) -> Event:  # noqa: N802
        self.called("Event")
        self.made += 1
        return Event(self, enable_timing)


class OnGpu(torch.nn.Parameter):
    """A parameter that claims to be on the GPU."""

    is_cuda = True  # type: ignore[assignment]
