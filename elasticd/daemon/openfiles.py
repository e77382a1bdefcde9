"""How many files an agent may have open: its workers' output and links, and their connections to a
round's store, are more than the soft limit that login shells and systemd set for the sake of select(2)."""

from __future__ import annotations

import resource

from elasticd.daemon.errors import CannotStart

BASE = 128  # etcd, HTTP, logs, libraries
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
