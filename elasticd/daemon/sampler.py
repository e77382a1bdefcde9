"""Looks at what workers use, in a thread of its own, as /proc may be slow on a busy machine; and in another
at their GPUs, as a broken one may keep who asks it waiting for ever."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from elasticd.procs.usage import Usage, own_usage, usage
from elasticd.telemetry.gpus import GpuReading, Gpus

EVERY_S = 5.0
GPUS_S = 2.0  # for them to have been asked, one after the other


@dataclass(frozen=True, slots=True)
class Samples:
    """``workers``: by slot, the process that was looked at and what it used. ``gpus``: by slot; readings
    that say nothing while a GPU does not answer."""

    workers: Mapping[int, tuple[int, Usage]] = field(default_factory=dict)
    itself: Usage | None = None
    gpus: Mapping[int, GpuReading] = field(default_factory=dict)


class Sampler:
    """While entered, ``latest`` is renewed every few seconds. ``pids`` (by slot) says whom to look at;
    set it to another mapping, and never change one. ``devices``: the GPUs of the slots in order, as
    CUDA_VISIBLE_DEVICES names them."""

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
        self._ending.set()  # not waited for: it may be stuck in a driver

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
            self._said.put(self._gpus.read(self._devices))  # each is told on once: XID errors are counted
            self._ending.wait(EVERY_S)

    def _heard_of_gpus(self) -> Mapping[int, GpuReading]:
        if self._gpus is None:
            return {}
        try:
            return self._said.get(timeout=GPUS_S)
        except queue.Empty:
            return {slot: GpuReading() for slot in range(len(self._devices))}
