"""Looks at what workers use, in a thread of its own: /proc may be slow on a busy machine, and a broken
GPU may keep who asks it waiting."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from elasticd.procs.usage import Usage, own_usage, usage
from elasticd.telemetry.gpus import GpuReading, Gpus

EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Samples:
    """``workers``: by slot, the process that was looked at and what it used. ``gpus``: by slot."""

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
        self.pids: Mapping[int, int] = {}
        self.latest = Samples()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elasticd-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()  # not waited for: it may be stuck in a driver

    def _run(self) -> None:
        self._gpus = Gpus.open()
        while not self._ending.is_set():
            self.latest = self.sample()
            self._ending.wait(EVERY_S)

    def sample(self) -> Samples:
        workers = {}
        for slot, pid in self.pids.items():
            used = usage(pid)
            if used is not None:
                workers[slot] = (pid, used)
        gpus = self._gpus.read(self._devices) if self._gpus is not None else {}
        return Samples(workers, own_usage(), gpus)
