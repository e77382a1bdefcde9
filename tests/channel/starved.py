"""A process with few descriptors left."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from elasticd.channel.framing import close_all


@contextlib.contextmanager
def descriptors(count: int) -> Iterator[None]:
    """Use up all descriptors of this process except ``count``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + count, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        close_all(held[len(held) - count :])
        del held[len(held) - count :]
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        close_all(held)


class Accepts:
    """The attempts of this process to accept a connection."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._times: list[float] = []
        self._changed = threading.Condition()
        accept = socket.socket.accept

        def noted(sock: socket.socket) -> object:
            with self._changed:
                self._times.append(time.monotonic())
                self._changed.notify_all()
            return accept(sock)

        patch.setattr(socket.socket, "accept", noted)

    def time_of(self, attempts: int) -> float:
        """Wait for this many attempts. Return the seconds from the first to the last."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._times) >= attempts, 60.0)
            return self._times[attempts - 1] - self._times[0]
