"""Samples the usage of workers and GPUs, each in its own thread. /proc may be slow on a busy machine, and a
broken GPU may never answer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from elasticd.procs.usage import Usage, own_usage, usage
from elasticd.telemetry.gpus import GpuReading, Gpus

EVERY_S = 5.0
GPUS_S = 2.0  # the longest wait for the readings of all GPUs


@dataclass(frozen=True, slots=True)
class Samples:
    """``workers``: pid and usage, by slot. ``itself``: the agent's usage. ``gpus``: readings by slot; a
    reading is empty if the GPUs do not answer."""

    workers: Mapping[int, tuple[int, Usage]] = field(default_factory=dict)
    itself: Usage | None = None
    gpus: Mapping[int, GpuReading] = field(default_factory=dict)


class Sampler:
    """A context manager that renews ``latest`` every few seconds.

    ``pids``: the processes to sample, by slot. To change the mapping, replace it: a thread reads it.
    ``devices``: the slots' GPUs in order, by their names in CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, devices: Sequence[str] = ()) -> None:
        self._devices = devices
        self._gpus: Gpus | None = None
        self._said: queue.Queue[Mapping[int, GpuReading]] = queue.Queue(1)
        self.pids: Mapping[int, int] = {}
        self.latest = Samples()
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._run, "elasticd-sampler"), (self._ask_gpus, "elasticd-gpus"))
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()  # without a join, since a thread may be stuck in a driver

    def _run(self) -> None:
        while not self._ending.is_set():
            self.latest = self.sample()
            self._ending.wait(EVERY_S)

    def sample(self) -> Samples:
        workers = {}
        for slot, pid in self.pids.items():
            used = usage(pid)
            if used is not None:
                workers[slot] = (pid, used)
        return Samples(workers, own_usage(), self._heard_of_gpus())

    def _ask_gpus(self) -> None:
        self._gpus = Gpus.open()
        while self._gpus is not None and not self._ending.is_set():
            # A reading is taken only once, since its XID errors are counted.
            self._said.put(self._gpus.read(self._devices))
            self._ending.wait(EVERY_S)

    def _heard_of_gpus(self) -> Mapping[int, GpuReading]:
        if self._gpus is None:
            return {}
        try:
            return self._said.get(timeout=GPUS_S)
        except queue.Empty:
            return {slot: GpuReading() for slot in range(len(self._devices))}
