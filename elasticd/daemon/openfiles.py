"""The limit of an agent's open files.

An agent opens files for its workers' output, their links and their connections to a round's store. They can
exceed the soft limit that login shells and systemd set.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable

from elasticd.core.agent_messages import ResourceExhausted
from elasticd.daemon.config import CannotStart
from elasticd.telemetry.accepting import files_are_free

RESERVE = 32  # reserved files, enough for an agent to exit in order
MARGIN = 16  # with fewer free files, a round's store, a worker's pipes or gRPC fail; gRPC aborts the process
LOOK_S = 1.0
BASE = 128  # files of the agent itself: the reserve, etcd, HTTP, logs, libraries
OF_A_SLOT = 12  # files per slot: a worker's inherited files, its pipes, copies of its output, its link
BASE_OF_A_WORKER = 512  # files of a worker, besides connections: data, logs, libraries, pipes of its loaders
OF_A_PEER = 2  # files of a worker per worker of the world: a connection, and one of another group
OF_A_WORKER = 2  # files per worker of the job: each connects to the agent that hosts the round's store


def raise_limit(slots: int, workers: int) -> int:
    """Raise this process's soft limit to the hard limit, and return the old soft limit, which workers keep.
    ``slots``: of this node. ``workers``: of the smallest world. Raise CannotStart if the hard limit is too
    low."""
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


def of_a_worker(soft: int, workers: int) -> int:
    """Return the soft limit of the workers: ``soft``, unless a worker's connections may take more than half
    of that. ``workers``: of the largest world. Gloo connects each worker to each other."""
    hard, connections = resource.getrlimit(resource.RLIMIT_NOFILE)[1], OF_A_PEER * workers
    if soft == resource.RLIM_INFINITY or 2 * connections <= soft:
        return soft
    needed = max(soft, BASE_OF_A_WORKER + connections)
    return needed if hard == resource.RLIM_INFINITY else min(needed, hard)


class Reserve:
    """Reserved descriptors, so that an agent that runs out of descriptors can still leave in order.

    If too few other descriptors are free, ``routine`` closes the reserve and posts ``ResourceExhausted``.
    """

    def __init__(self, post: Callable[[ResourceExhausted], None]) -> None:
        self._post = post
        self._held = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(RESERVE)]
        self._due = 0.0

    def routine(self, now: float) -> float:
        if now >= self._due:
            self._due = now + LOOK_S
            if self._held and not files_are_free(MARGIN):
                self.give()
                self._post(ResourceExhausted(self.why))
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
        """Whether the lack of descriptors may have caused this error."""
        seen: BaseException | None = error
        while seen is not None:
            if isinstance(seen, OSError) and seen.errno in (errno.EMFILE, errno.ENFILE):
                return True
            seen = seen.__cause__ or seen.__context__
        return not self._held or not files_are_free(MARGIN)

    def give(self) -> None:
        held, self._held = self._held, []
        for fd in held:
            os.close(fd)

    close = give
