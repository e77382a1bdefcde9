"""When gloo connects the workers of a group to each other.

By default gloo connects each worker to each other when a group is made. That takes as many open files in each
worker as the group has workers, and a time that grows with their square. In a very large group gloo connects
two workers when they first talk to each other, and a collective has a worker talk to few others.

Gloo has no means to end the wait for a worker that has yet to connect, as it may have died. So at the end of
a world this module connects in place of the others (``Listener.knock``), and hangs up. A group whose thread
waits on nevertheless is left behind, until the timeout of its collectives.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final, NamedTuple

from elasticd.worker.world import destroying

MOST_AT_ONCE = 1024  # workers of a group that are connected when the group is made
LATE: Final = "TORCH_GLOO_LAZY_INIT"  # torch reads this variable each time that a group is made
# Before the waits in a group are ended again. Most groups are destroyed within the first pause but one.
PAUSES_S = (0.0, 0.3, 0.5, 1.0, 2.0, 4.0)
_YES = {"1", "t", "true", "y", "yes"}  # as torch reads the variable
_KNOCK_S_MAX = 5.0


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


class Listener(NamedTuple):
    """The socket at which other workers of a late group connect: its descriptor and id. ``rank``: of this
    worker in the group."""

    socket: tuple[int, str]
    address: tuple[str, int]
    size: int
    rank: int

    def knock(self, ranks: Iterable[int]) -> None:
        """Connect as each of these workers, and hang up, until nobody listens. Gloo's threads that wait for
        one of these workers take it for lost."""
        with contextlib.suppress(OSError):
            for rank in ranks:
                with socket.create_connection(self.address, _KNOCK_S_MAX) as one:
                    one.sendall(struct.pack("n", rank))  # as gloo introduces itself

    @property
    def near(self) -> Iterator[int]:
        """The workers with which most collectives have this worker talk."""
        steps = [1 << n for n in range(self.size.bit_length())]
        return ((self.rank + step) % self.size for step in chain(steps, (-step for step in steps)))


def listeners(among: Iterable[tuple[int, str]], size: int, rank: int) -> Iterator[Listener]:
    """Yield those of the sockets that listen. ``size``: of their group, in which this worker has the
    ``rank``."""
    for descriptor, its_id in among:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                yield Listener((descriptor, its_id), one.getsockname()[:2], size, rank)


def end_waits(of: Iterable[Listener]) -> None:
    """Have another thread end all waits in these groups, whose world is over. Until the groups are destroyed,
    gloo may make further connections."""
    left = {listener.socket: listener for listener in of}

    def end() -> None:
        for pause_s in PAUSES_S:
            threading.Event().wait(pause_s)
            for gone in left.keys() - set(destroying.sockets()):
                del left[gone]
            for _, watched in destroying.loops_of(left.keys()):
                for descriptor, _ in watched:
                    destroying.shut(descriptor)
            for listener in left.values():
                listener.knock(range(listener.size) if pause_s else listener.near)
            if not left:
                return
        destroying.forget_connections(left.keys())

    if left:
        threading.Thread(target=end, name="elasticd-knock", daemon=True).start()
