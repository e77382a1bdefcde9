"""When gloo connects the workers of a group to each other.

By default gloo connects each worker to each other when a group is made. That takes as many open files in each
worker as the group has workers, and a time that grows with their square. In a very large group gloo connects
two workers when they first talk to each other, and a collective has a worker talk to few others.

Gloo has no means to end the wait for a worker that has yet to connect, which may have died. So where a world
ends meanwhile, the group is left behind until the timeout of its collectives. The training does not wait for
that.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from typing import Final

MOST_AT_ONCE = 1024  # workers of a group that are connected when the group is made
LATE: Final = "TORCH_GLOO_LAZY_INIT"  # torch reads this variable each time that a group is made
_YES = {"1", "t", "true", "y", "yes"}  # as torch reads the variable


def is_late(size: int) -> bool:
    """Whether two workers of a group of this size are connected when they first talk to each other. The
    user's choice counts, else a large group is late."""
    asked = os.environ.get(LATE)
    return size > MOST_AT_ONCE if asked is None else asked.lower() in _YES


@contextlib.contextmanager
def as_suits(size: int) -> Iterator[None]:
    """Have groups that are made in the block, of this size, connect as ``is_late`` says."""
    if LATE in os.environ or not is_late(size):
        yield
        return
    os.environ[LATE] = "1"
    try:
        yield
    finally:
        del os.environ[LATE]


def listening(among: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield those of the sockets that listen: descriptors and ids, as from ``destroying.sockets``."""
    for descriptor, its_id in among:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield descriptor, its_id
