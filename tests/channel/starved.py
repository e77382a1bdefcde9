"""A process with few descriptors left."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

from elasticd.channel.framing import close_all


@contextlib.contextmanager
def descriptors(count: int) -> Iterator[None]:
    """As if all descriptors of this process but ``count`` were in use."""
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
