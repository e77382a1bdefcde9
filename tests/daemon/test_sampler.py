"""The usage of workers is sampled, even if their GPUs do not answer."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from elasticd.daemon import usage_sampler
from elasticd.telemetry.gpus import GpuReading


class Stuck:
    """GPUs that answer once. Every later request waits for ever."""

    def __init__(self) -> None:
        self.asked = 0
        self.holds = threading.Event()
        self.let_go = threading.Event()

    def read(self, devices: object) -> dict[int, GpuReading]:
        self.asked += 1
        if self.asked > 1:
            self.holds.set()
            self.let_go.wait()
        return {0: GpuReading(utilization=0.5, xids=(79,))}


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    gpus = Stuck()
    monkeypatch.setattr(usage_sampler, "EVERY_S", 0.01)
    monkeypatch.setattr(usage_sampler.Gpus, "open", lambda: gpus)
    yield gpus
    gpus.let_go.set()


def test_a_driver_that_does_not_answer_keeps_no_worker_from_being_looked_at(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = usage_sampler.Sampler(["0", "1"])
    made.pids = {0: os.getpid()}
    asks = made._threads[1]
    asks.start()
    made._said.put(made._said.get())  # the first answer has come
    assert made.sample().gpus == {0: GpuReading(utilization=0.5, xids=(79,))}
    monkeypatch.setattr(usage_sampler, "GPUS_S", 0.01)
    later = made.sample()
    assert later.gpus == {0: GpuReading(), 1: GpuReading()}, "rather nothing than what was"
    assert later.workers[0][0] == os.getpid() and later.itself is not None
    stuck.holds.wait()
    made.__exit__()
    stuck.let_go.set()
    made._said.get()  # and the answer was counted once
    asks.join()
