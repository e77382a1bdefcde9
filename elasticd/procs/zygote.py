"""The warden's end of the channel to a zygote, a process that imports the workers' modules and forks workers.
Standard library only. The zygote's code is elasticd/worker/boot/elasticd_zygote.py.

A fork has three stages: it is requested, made, and taken. The forked process waits on its link until the
warden takes it, and ends if the warden closes the link. Until then the warden keeps all it needs to start the
worker without the zygote.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elasticd.channel.codec import ChannelClosed
from elasticd.channel.framing import QueuedChannel, close_all, duplicates
from elasticd.channel.warden_messages import (
    WARDEN_TO_ZYGOTE,
    ZYGOTE_TO_WARDEN,
    ForkStore,
    ForkWorker,
    ImportModules,
    Spawn,
)
from elasticd.procs.linux import steady_now

_PATIENCE_S = 3.0  # about the time of a start without the zygote
_IMPORTING_S_MAX = 30.0
_FIRST_IMPORTING_S_MAX = 300.0  # a fresh process would take longer beside the zygote


@dataclass(frozen=True, slots=True)
class Fork:
    """The request for a forked process. ``link``: the socket on which the forked process waits for ``take``,
    and reports errors. ``until``: when to start the worker without the zygote."""

    request: Spawn
    fds: tuple[int, ...]
    link: int
    until: float

    def take(self) -> None:
        """Let the process go on to its script. The caller then owns the link."""
        close_all(self.fds)
        with contextlib.suppress(OSError):  # the process has exited, which its parent reports
            os.write(self.link, b"g")

    def start_afresh(self) -> list[int]:
        """End the fork, and return its files for a fresh start; the caller owns the files."""
        os.close(self.link)
        return list(self.fds)

    def drop(self) -> None:
        """End the fork, and close its files."""
        close_all((*self.fds, self.link))


class ZygoteProcess:
    """A running zygote. Methods raise ``ChannelClosed`` if the process has exited. ``start_s``: how long a
    worker needed to start without the zygote, imports included; None if none has started so."""

    def __init__(self, id: int, pid: int, sock: socket.socket, start_s: float | None) -> None:
        self.id = id
        patience_s = _FIRST_IMPORTING_S_MAX if start_s is None else min(start_s, _IMPORTING_S_MAX)
        self._should_be_ready = steady_now() + patience_s
        self.pid = pid
        self.channel = QueuedChannel(sock, WARDEN_TO_ZYGOTE, ZYGOTE_TO_WARDEN)
        self._asked = 0
        self._done = 0
        self._late = False
        self._forks: dict[int, Fork] = {}

    @property
    def ready(self) -> bool:
        """Whether all requested imports are done."""
        return 0 < self._asked == self._done

    @property
    def accepts_requests(self) -> bool:
        """Whether to fork workers from the zygote. True while the zygote still imports, since a fresh process
        would need longer for the same imports. False if the zygote's last imports were late."""
        return self._asked > 0 and not self._late

    @property
    def until(self) -> float | None:
        """When to stop waiting for the zygote (``steady_now``); None if no fork is requested."""
        return min((fork.until for fork in self._forks.values()), default=None)

    def preload(self, message: ImportModules) -> None:
        self._asked += 1
        self.channel.post(message)

    def imported(self, asked: int) -> None:
        self._done, self._late = asked, False

    def fork(self, request: Spawn, fds: Sequence[int]) -> None:
        """Request a process. The caller keeps ``fds``. Raises OSError if there are too few descriptors."""
        until = steady_now() + _PATIENCE_S
        if not self.ready:
            until = max(until, self._should_be_ready)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                kept = tuple(duplicates(fds))
            except OSError:
                ours.close()
                raise
            self._forks[request.id] = fork = Fork(request, kept, ours.detach(), until)
            try:
                asked = ForkStore(request.id) if request.service else ForkWorker(request.id, request.program)
                self.channel.post(asked, [*fds, theirs.fileno()])
            except ChannelClosed:
                raise
            except OSError:
                del self._forks[request.id]
                fork.drop()
                raise

    def made(self, id: int) -> Fork | None:
        """Return and forget the request with this id, now that the zygote has forked; None if the request was
        given up."""
        return self._forks.pop(id, None)

    def give_up_late(self) -> list[Fork]:
        """Give up all requests because the imports take too long, and accept none until the imports are
        done."""
        self._late = True
        return self.give_up()

    def give_up(self, ids: Collection[int] | None = None, *, workers_only: bool = False) -> list[Fork]:
        """Return and forget the requests that are not made yet: all, or those with ``ids``."""
        chosen = [
            id
            for id, fork in self._forks.items()
            if (ids is None or id in ids) and not (workers_only and fork.request.service)
        ]
        return [self._forks.pop(id) for id in chosen]
