"""Have all workers of a world stop after the same step when one of them is asked to end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

_TOLD_S = 60.0  # how long a worker waits for its own SIGTERM, once another worker has got one


class Drain:
    """Notes SIGTERM, which otherwise ends the process at once, between ``begin`` and ``end``."""

    def __init__(self) -> None:
        self._told = False
        self._before: Any = None

    def begin(self) -> None:
        if threading.current_thread() is threading.main_thread() and self._before is None:
            self._before = signal.signal(signal.SIGTERM, self._note)

    def end(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def is_asked(self) -> bool:
        """Whether a worker of this world was asked to end. All ranks call it after the same step, and get the
        same answer. Raises as collectives do."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._told
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        told = torch.tensor(int(self._told), device=device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return bool(told)

    def after_step(self, save: Callable[[], None], *, is_due: bool) -> None:
        """Save a checkpoint if one is due or the workers are asked to end. In that case end the process."""
        is_asked = self.is_asked()
        if is_due or is_asked:
            save()
            if is_asked or self.is_asked():
                self.leave()

    def leave(self) -> None:
        """End this process, which has saved its work. A worker that exits before it is asked counts as
        failed, so this waits for SIGTERM first."""
        deadline = time.monotonic() + _TOLD_S
        while not self._told and time.monotonic() < deadline:
            time.sleep(0.02)
        raise SystemExit(128 + signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._told = True
