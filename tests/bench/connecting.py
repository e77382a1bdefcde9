"""The time to connect the workers of a large world, and to make its first sums: elasticd's world beside
torch's process group. "Late": two workers are connected when they first talk, as in a world of more than
1,024.

The workers are real processes, which share the cores of one machine. On a cluster each has a core. So beside
the time stands the CPU time of a worker.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from elasticd.channel.worker_messages import Enter
from elasticd.procs.page import BOOT_DIR
from elasticd.worker.world.connecting import LATE
from elasticd.worker.world.destroying import sockets
from elasticd.worker.world.group import World

PATIENCE = timedelta(seconds=300)
SUMS = 5
Join = Callable[[int, int, int], None]  # rank, size, port of the store
Serve = Callable[[int, int], object]  # port, descriptor of the socket that listens there; returns the store


def _serve_torchs(port: int, listener: int) -> object:
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener)


def _serve_elasticds(port: int, listener: int) -> object:
    sys.path.insert(0, BOOT_DIR)
    import elasticd_store

    where = {"host": "127.0.0.1", "port": port, "timeout_s": PATIENCE.total_seconds()}
    return elasticd_store._open(where, listener)


def _join_torchs(rank: int, size: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=PATIENCE)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=size)


def _join_elasticds(rank: int, size: int, port: int) -> None:
    place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    World(Enter(1, place)).form(0, PATIENCE)


def _join_late(rank: int, size: int, port: int) -> None:
    os.environ[LATE] = "1"
    _join_elasticds(rank, size, port)


KINDS: dict[str, tuple[Join, Serve]] = {
    "torch": (_join_torchs, _serve_torchs),
    "elasticd": (_join_elasticds, _serve_elasticds),
    "elasticd, late": (_join_late, _serve_elasticds),
}


def _take_part(rank: int, size: int, port: int, join: Join) -> None:
    """Join, add up, and write to the store how many seconds each took, with the sockets and the CPU time."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=PATIENCE)
    if store.add("come", 1) == size:
        store.set("all have come", "")
    store.wait(["all have come"], PATIENCE)
    cpu, began = sum(os.times()[:2]), time.monotonic()
    join(rank, size, port)
    times = [time.monotonic() - began]
    total = torch.ones(1)
    for _ in range(1 + SUMS):
        began = time.monotonic()
        dist.all_reduce(total)
        times.append(time.monotonic() - began)
        if total != size:
            sys.exit(f"the sum of {size} ones is {float(total)}")
        total.fill_(1.0)
    used = sum(os.times()[:2]) - cpu
    figures = [times[0], times[1], median(times[2:]), float(sum(1 for _ in sockets())), used]
    store.set(f"figures {rank}", " ".join(map(str, figures)))
    store.wait(["end"], PATIENCE)  # no process ends while others still need it


@contextlib.contextmanager
def _processes(works: Sequence[Callable[[], object]]) -> Iterator[None]:
    """Fork a process for each work, with torch imported, before any thread starts. Kill what is left."""
    pids = []
    try:
        for work in works:
            if not (pid := os.fork()):
                with contextlib.suppress(BaseException):
                    work()
                    os._exit(0)
                os._exit(1)
            pids.append(pid)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def _measure(size: int, join: Join, serve: Serve) -> list[float]:
    """Return the seconds until the last worker has joined, of the first sum, and of a later one; the most
    sockets of a worker; and the CPU seconds of a worker. Raises RuntimeError if a worker fails."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]

    def serving() -> None:
        _store = serve(port, listener.detach())
        signal.pause()

    workers = [functools.partial(_take_part, rank, size, port, join) for rank in range(size)]
    with listener, _processes([serving, *workers]):
        store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=PATIENCE)
        keys = [f"figures {rank}" for rank in range(size)]
        store.wait(keys, PATIENCE)
        found = [[float(word) for word in raw.split()] for raw in store.multi_get(keys)]
    joined, first, later, open_sockets, cpu = zip(*found, strict=True)
    return [max(joined), max(first), median(later), max(open_sockets), sum(cpu) / size]


def connecting(sizes: Sequence[int], tries: int) -> Iterator[str]:
    """Yield one line for each kind of world of each size."""
    for size in sizes:
        found: dict[str, list[list[float]]] = {name: [] for name in KINDS}
        for _ in range(tries):
            for name, (join, serve) in KINDS.items():
                found[name].append(_measure(size, join, serve))
        medians = {
            name: [median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()
        }
        for name, (joined, first, later, most, cpu) in medians.items():
            yield (
                f"{size} workers, {name:<14}: connected {joined:.2f} s, first sum {first:.2f} s, a later one "
                f"{later * 1e3:.0f} ms; {most:.0f} sockets of a worker; CPU {cpu * 1e3:.0f} ms a worker"
            )
        soon = {name: sum(medians["torch"][:2]) / sum(row[:2]) for name, row in medians.items()}
        said = ", ".join(f"{name} {ratio:.1f} times" for name, ratio in soon.items() if name != "torch")
        yield f"{size} workers: the first sum comes as soon as torch's: {said}"
