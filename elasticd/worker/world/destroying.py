"""Destroy the groups of a world that is over.

Gloo's destructor waits for the group's threads, and a thread may wait in vain. If a collective fails while
one of its messages is partly received on another connection, Gloo no longer reads that connection, and never
notices that it was closed. A later collective of the group, if one is queued, waits for that connection until
its timeout, which is half an hour. Meanwhile Gloo's event loop spins, since the connection stays readable. So
another thread runs the destructor, and if it takes long, the event loop is told only of what changes on the
connections. A connection must stay in the loop: Gloo removes it at last, and calls std::terminate if it is
gone.

Even otherwise the destructor takes up to 10 ms, since Gloo's event loop looks only so often whether it is to
end. The next world does not wait for that. A fork waits, since the child would have the group but none of the
group's threads. The end of the process waits too, for a while: a destructor that ends while Python is taken
down calls std::terminate.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import platform
import re
import select
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Set

import torch
import torch.distributed as dist

SOON_S = 0.2  # many times as long as the destructor usually takes
SLOW_S = 5.0  # a destructor that takes longer waits in vain
_MODIFY = 3  # EPOLL_CTL_MOD
# struct epoll_event: see <sys/epoll.h>, packed on x86
_EVENT = struct.Struct("=IQ" if platform.machine() in ("x86_64", "i686") else "@IQ")
_under_way: list[threading.Thread] = []
# threads in a destructor, each with its latest end, and the connections of the groups
_dropping: list[tuple[threading.Thread, float, Set[tuple[int, str]]]] = []


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


@atexit.register
def _wait_for_slow_destructors() -> None:
    for thread, until, _ in tuple(_dropping):
        thread.join(max(0.0, until - time.monotonic()))


def _destroy(groups: list[dist.ProcessGroup], connections: Set[tuple[int, str]]) -> None:
    destroyed = threading.Event()

    def drop() -> None:
        groups.clear()
        destroyed.set()

    dropping = threading.Thread(target=drop, name="elasticd-drop", daemon=True)
    _dropping[:] = [
        (dropping, time.monotonic() + SLOW_S, connections),
        *(each for each in _dropping if each[0].is_alive()),
    ]
    dropping.start()
    if not destroyed.wait(SOON_S):
        _watch_changes(connections)


def is_held(groups: list[dist.ProcessGroup]) -> bool:
    """Whether anything besides the list holds a reference to one of its groups."""
    return any(sys.getrefcount(groups[number]) > 2 for number in range(len(groups)))


def left_behind() -> set[tuple[int, str]]:
    """Return the connections of groups whose destructor has not ended."""
    return {one for _, _, connections in tuple(_dropping) for one in connections}


def let_go(connections: Set[tuple[int, str]]) -> None:
    """Put the null device in the place of these sockets. Their descriptors stay in use, since gloo's objects
    still have the numbers."""
    there = connections & set(sockets())
    if there:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor, _ in there:
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)


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


# what a loop watches, by socket: the events, and what the loop knows the socket by
Watched = Mapping[tuple[int, str], tuple[int, int]]


def loops_of(connections: Set[tuple[int, str]]) -> Iterator[tuple[int, Watched]]:
    """Yield a descriptor of each event loop that watches one of these sockets, with all sockets that the loop
    watches. A loop of gloo also watches connections that were made later than the group. The descriptor is a
    copy, open until the next is asked for: the loop's own may be that of a loop of the next world soon.

    The next world may already have sockets with the descriptors of closed ones, so ids are compared, too.
    """
    for number, target in _descriptors() if connections else ():
        if target == "anon_inode:[eventpoll]":
            with contextlib.suppress(OSError), _copy_of(number) as loop:  # closed meanwhile
                watched = _watched(loop)
                if not connections.isdisjoint(watched):
                    yield loop, watched


def _watch_changes(connections: Set[tuple[int, str]]) -> None:
    """Have event loops report the state of each connection once more, and then only when it changes."""
    modify = ctypes.CDLL(None).epoll_ctl
    for loop, watched in loops_of(connections):
        for descriptor, its_id in watched.keys() & connections:
            events, known_by = watched[descriptor, its_id]
            # it fails if gloo has removed the connection meanwhile
            modify(loop, _MODIFY, descriptor, _EVENT.pack(events | select.EPOLLET, known_by))


@contextlib.contextmanager
def _copy_of(descriptor: int) -> Iterator[int]:
    """Another descriptor of the same file."""
    copy = os.dup(descriptor)
    try:
        yield copy
    finally:
        os.close(copy)


def _watched(poll: int) -> Watched:
    """Return the sockets that an event loop watches: descriptors and ids, as from ``sockets``."""
    with open(f"/proc/self/fdinfo/{poll}") as file:
        found = re.findall(
            r"^tfd: *(\d+) events: *([0-9a-f]+) data: *([0-9a-f]+) .* ino:([0-9a-f]+)",
            file.read(),
            re.MULTILINE,
        )
    return {
        (int(number), f"socket:[{int(its_id, 16)}]"): (int(events, 16), int(known_by, 16))
        for number, events, known_by, its_id in found
    }
