"""The warden's end of a zygote, the process that workers are forked from once it has imported
what they import. Standard library only. Its own side is elasticd/worker/boot/elasticd_zygote.py.

A fork is asked for, made, and only then taken: the forked process waits on its link until the warden
knows of it, and ends if the warden does not want it any more. Whatever goes wrong before that, the
warden still has all it needs to start the worker afresh.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elasticd.procs.channel import Channel, Message
from elasticd.procs.linux import steady_now

_PATIENCE_S = 3.0  # about what a fresh start takes
_IMPORTING_S_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Fork:
    """A worker asked for. ``link``: it waits there to be taken, and says why it failed."""

    request: Message
    fds: tuple[int, ...]
    link: int
    until: float

    def take(self) -> None:
        """Let it go on to its script. The link is the caller's from now on."""
        _close(self.fds)
        with contextlib.suppress(OSError):  # it is dead, which is told by its exit
            os.write(self.link, b"g")

    def start_afresh(self) -> list[int]:
        """Have it end; its three files are the caller's."""
        os.close(self.link)
        return list(self.fds)

    def drop(self) -> None:
        """Have it end."""
        _close((*self.fds, self.link))


class ZygoteProcess:
    """Raises ``ChannelClosed`` where the process is gone. ``start_s``: what the start of a worker took
    that had to import all itself."""

    def __init__(self, id: int, pid: int, sock: socket.socket, start_s: float) -> None:
        self.id = id
        self._should_be_ready = steady_now() + min(start_s, _IMPORTING_S_MAX)
        self.pid = pid
        self.channel = Channel(sock)
        self._asked = 0
        self._done = 0
        self._late = False
        self._forks: dict[int, Fork] = {}

    @property
    def ready(self) -> bool:
        """Whether it has imported all it was asked to."""
        return 0 < self._asked == self._done

    @property
    def takes_orders(self) -> bool:
        """Whether a worker may be asked of it: as soon as it imports, since it is done sooner than a
        fresh start, which has to import the same. Unless it was not, last time."""
        return self._asked > 0 and not self._late

    @property
    def until(self) -> float | None:
        """When to stop waiting for it (``steady_now``); None while nothing is asked of it."""
        return min((fork.until for fork in self._forks.values()), default=None)

    def preload(self, message: Message) -> None:
        self._asked += 1
        self.channel.send(message)

    def imported(self, asked: int) -> None:
        self._done, self._late = asked, False

    def fork(self, request: Message, fds: Sequence[int]) -> None:
        """Ask for a worker. ``fds`` stay the caller's."""
        ours, theirs = socket.socketpair()
        until = steady_now() + _PATIENCE_S
        if not self.ready:
            until = max(until, self._should_be_ready)
        fork = Fork(request, tuple(map(os.dup, fds)), ours.detach(), until)
        self._forks[request["id"]] = fork
        message = {"do": "fork", **{key: request[key] for key in ("id", "argv", "env", "cwd")}}
        self.channel.send(message, [*map(os.dup, fds), theirs.detach()])

    def made(self, id: int) -> Fork | None:
        """The one that was asked for under this id, unless it was given up."""
        return self._forks.pop(id, None)

    def is_late(self) -> list[Fork]:
        """It imports for too long, so those asked for are given up, and no more are before it is done."""
        self._late = True
        return self.give_up()

    def give_up(self, ids: Collection[int] | None = None) -> list[Fork]:
        """All that were asked for and not made yet, or those of them."""
        return [self._forks.pop(id) for id in list(self._forks) if ids is None or id in ids]


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
