"""How many files an agent may have open: its workers' output and links, and their connections to a
round's store, are more than the soft limit that login shells and systemd set for the sake of select(2)."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from contextlib import suppress

from elasticd.core.messages import Exhausted
from elasticd.daemon.errors import CannotStart

RESERVE = 32  # what it takes to leave in order
MARGIN = (
    16  # fewer than these, and the next thing fails: a round's store, a worker's pipes, gRPC (which aborts)
)
LOOK_S = 1.0
BASE = 128  # the reserve, etcd, HTTP, logs, libraries
OF_A_SLOT = 12  # what a worker is handed as it starts, pipes, copies of its output, its link
OF_A_WORKER = 2  # of any node: whichever agent hosts the round's store is connected to all of them


def raise_limit(slots: int, workers: int) -> int:
    """Let this process have as many files open as it ever may; returns what its limit was, which is the
    workers' still. Raises CannotStart where even that does not suffice for so many slots here and so many
    workers in the smallest world."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = BASE + OF_A_SLOT * slots + OF_A_WORKER * max(slots, workers)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise CannotStart(
            f"a process may have {hard} files open here, and an agent of {slots} slots in a world of at "
            f"least {workers} workers needs {needed}: raise the hard limit (`ulimit -Hn`; in systemd "
            "LimitNOFILE=; docker run --ulimit nofile=) or give fewer --slots"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


class Reserve:
    """Descriptors kept back, so that an agent that runs out of them can still leave in order.

    ``routine`` looks from time to time whether there are any left besides; if not, it gives the reserve up,
    and posts ``Exhausted``.
    """

    def __init__(self, post: Callable[[Exhausted], None]) -> None:
        self._post = post
        self._held = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(RESERVE)]
        self._due = 0.0

    def routine(self, now: float) -> float:
        if now >= self._due:
            self._due = now + LOOK_S
            if self._held and not _some_left():
                self.give()
                self._post(Exhausted(self.why))
        return self._due

    @property
    def why(self) -> str:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"the agent has run out of file descriptors (a process may have {most} open here): raise the "
            "hard limit (`ulimit -Hn`; in systemd LimitNOFILE=; docker run --ulimit nofile=) and start this "
            "node again"
        )

    def explains(self, error: BaseException) -> bool:
        """Whether that is what somebody met who could not go on."""
        seen: BaseException | None = error
        while seen is not None:
            if isinstance(seen, OSError) and seen.errno in (errno.EMFILE, errno.ENFILE):
                return True
            seen = seen.__cause__ or seen.__context__
        return not self._held or not _some_left()

    def give(self) -> None:
        held, self._held = self._held, []
        for fd in held:
            os.close(fd)

    close = give


def _some_left() -> bool:
    tried: list[int] = []
    with suppress(OSError):
        while len(tried) < MARGIN:
            tried.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    for fd in tried:
        os.close(fd)
    return len(tried) == MARGIN
