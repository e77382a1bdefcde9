"""Destroy the groups of a world that is over.

Gloo's destructor waits for the group's threads, and a thread may wait in vain. If a collective fails while
one of its messages is partly received on another connection, Gloo no longer reads that connection, and never
notices that it was closed. A later collective of the group, if one is queued, waits for that connection until
its timeout, which is half an hour. Meanwhile Gloo's event loop spins, since the connection stays readable. So
another thread runs the destructor, and the connections are removed from the event loop if it takes long.

Even otherwise the destructor takes up to 10 ms, since Gloo's event loop looks only so often whether it is to
end. The next world does not wait for that. A fork waits, since the child would have the group but none of the
group's threads. Python waits at the end of the process.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import threading
from collections.abc import Iterator, Set

import torch
import torch.distributed as dist

SOON_S = 0.2  # many times as long as the destructor usually takes
_under_way: list[threading.Thread] = []


def begin(groups: list[dist.ProcessGroup], connections: Set[tuple[int, str]]) -> None:
    """Have another thread destroy the groups of the list, which holds the last references to them.

    ``connections``: the groups' sockets, which are shut down: descriptors and ids, as from ``sockets``. With
    CUDA, return once the groups are destroyed: NCCL's communicators should be gone before the next are made.
    """
    settle()
    _under_way[:] = [threading.Thread(target=_destroy, args=(groups, connections), name="elasticd-destroy")]
    _under_way[0].start()
    if torch.cuda.is_available():
        settle()


def settle() -> None:
    """Wait until the groups are destroyed, or their destructor waits in vain."""
    for thread in tuple(_under_way):
        thread.join()


os.register_at_fork(before=settle)


def _destroy(groups: list[dist.ProcessGroup], connections: Set[tuple[int, str]]) -> None:
    destroyed = threading.Event()

    def drop() -> None:
        groups.clear()
        destroyed.set()

    threading.Thread(target=drop, name="elasticd-drop", daemon=True).start()
    if not destroyed.wait(SOON_S):
        _forget_connections(connections)


def is_held(groups: list[dist.ProcessGroup]) -> bool:
    """Whether anything besides the list holds a reference to one of its groups."""
    return any(sys.getrefcount(groups[number]) > 2 for number in range(len(groups)))


def sockets() -> Iterator[tuple[int, str]]:
    """Yield the descriptor and the id of each socket of this process. The kernel uses descriptors again; the
    id tells a new socket from an earlier one with the same descriptor. psutil does not report the id."""
    for number, target in _descriptors():
        if target.startswith("socket:"):
            yield number, target


def _descriptors() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield int(name), os.readlink(f"/proc/self/fd/{name}")


def loops_of(connections: Set[tuple[int, str]]) -> Iterator[tuple[int, set[tuple[int, str]]]]:
    """Yield the descriptor of each event loop that watches one of these sockets, with all sockets that the
    loop watches. A loop of gloo also watches connections that were made later than the group.

    The next world may already have sockets with the descriptors of closed ones, so ids are compared, too.
    """
    for number, target in _descriptors() if connections else ():
        if target == "anon_inode:[eventpoll]":
            with contextlib.suppress(OSError):  # closed meanwhile
                watched = _watched(number)
                if not watched.isdisjoint(connections):
                    yield number, watched


def _forget_connections(connections: Set[tuple[int, str]]) -> None:
    """Remove the connections from event loops."""
    for number, watched in loops_of(connections):
        with contextlib.suppress(OSError), contextlib.closing(select.epoll.fromfd(os.dup(number))) as poll:
            for descriptor, _ in watched & connections:
                with contextlib.suppress(OSError):  # closed meanwhile
                    poll.unregister(descriptor)


def _watched(poll: int) -> set[tuple[int, str]]:
    """Return the sockets that an event loop watches: descriptors and ids, as from ``sockets``."""
    with open(f"/proc/self/fdinfo/{poll}") as file:
        found = re.findall(r"^tfd: *(\d+) .* ino:([0-9a-f]+)", file.read(), re.MULTILINE)
    return {(int(number), f"socket:[{int(its_id, 16)}]") for number, its_id in found}
