"""The time to connect the workers of a large world, and to make its first sums: elasticd's world beside
torch's process group. "Late": two workers are connected when they first talk, as in a world of more than
1,024. In elasticd's worlds a worker then dies, and the others form the next world.

The workers are real processes, which share the cores of one machine. On a cluster each has a core. So beside
the time stands the CPU time of a worker.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from statistics import median

import torch
import torch.distributed as dist

from elasticd.channel.worker_messages import Enter
from elasticd.procs.page import BOOT_DIR
from elasticd.worker.world.connecting import LATE, MOST_AT_ONCE
from elasticd.worker.world.destroying import sockets
from elasticd.worker.world.group import World, WorldChanged

PATIENCE = timedelta(seconds=300)
TOLD = 1  # the exit code of a process that has told its error
SHOWN_MAX = 1000  # characters of an error: what is sent through a pipe at once is not mixed with the others'
SUMS = 5
Join = Callable[[int, int, int], World | None]  # rank, size, port of the store
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


def _join_elasticds(rank: int, size: int, port: int) -> World:
    place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world = World(Enter(1, place))
    world.form(0, PATIENCE)
    return world


def _join_late(rank: int, size: int, port: int) -> World:
    os.environ[LATE] = "1"
    return _join_elasticds(rank, size, port)


KINDS: dict[str, tuple[Join, Serve]] = {
    "torch": (_join_torchs, _serve_torchs),
    "elasticd": (_join_elasticds, _serve_elasticds),
    "elasticd, late": (_join_late, _serve_elasticds),
}


def _take_part(rank: int, size: int, ports: Sequence[int], join: Join, tells: Connection) -> None:
    """Join, add up, and tell how many seconds each took, with the sockets and the CPU time. Then survive the
    last worker, and tell how many seconds that took."""
    port, next_port = ports
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=PATIENCE)
    if store.add("come", 1) == size:
        store.set("all have come", "")
    store.wait(["all have come"], PATIENCE)
    cpu, began = sum(os.times()[:2]), time.monotonic()
    world = join(rank, size, port)
    times = [time.monotonic() - began]
    for _ in range(1 + SUMS):
        began = time.monotonic()
        _add_up(size)
        times.append(time.monotonic() - began)
    used = sum(os.times()[:2]) - cpu
    tells.send([times[0], times[1], median(times[2:]), sum(1 for _ in sockets()), used])
    if world is not None and rank < size - 1:
        died: list[float] = []

        def learn_of_the_death() -> None:
            store.wait(["dead"], PATIENCE)
            died.append(time.monotonic())
            world.abort()

        learning = threading.Thread(target=learn_of_the_death)
        learning.start()
        try:
            with world.or_over():
                _add_up(size)
        except WorldChanged as changed:
            if changed.__cause__ is not None:  # its frames hold the group
                traceback.clear_frames(changed.__cause__.__traceback__)
        learning.join()
        world.forget()
        join(rank, size - 1, next_port)
        _add_up(size - 1)
        tells.send([time.monotonic() - died[0]])
    store.wait(["end"], PATIENCE)  # no process ends while others still need it


def _add_up(size: int) -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    if total != size:
        sys.exit(f"the sum of {size} ones is {float(total)}")


@contextlib.contextmanager
def _processes(works: Mapping[str, Callable[[], object]], tells: Connection) -> Iterator[dict[str, int]]:
    """Fork a process for each work, with torch imported, before any thread starts. Yield the processes' ids.
    Kill what is left. A work that raises an error tells the error."""
    pids: dict[str, int] = {}
    try:
        for name, work in works.items():
            if not (pid := os.fork()):
                try:
                    work()
                except BaseException as error:
                    traceback.print_exc()
                    tells.send(f"{name} failed: {error!r}"[:SHOWN_MAX])
                    os._exit(TOLD)
                os._exit(0)
            pids[name] = pid
        yield pids
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid in pids.values():
            os.waitpid(pid, 0)


def _heard(count: int, hears: Connection, pids: Mapping[str, int]) -> list[list[float]]:
    """Return the figures that so many workers tell. Raises RuntimeError if a process fails."""
    found: list[list[float]] = []
    with contextlib.ExitStack() as stack:
        heard_or_ended = stack.enter_context(selectors.DefaultSelector())
        heard_or_ended.register(hears, selectors.EVENT_READ)
        for pid in pids.values():
            end = os.pidfd_open(pid)
            stack.callback(os.close, end)
            heard_or_ended.register(end, selectors.EVENT_READ)
        while len(found) < count:
            heard_or_ended.select()
            said = hears.recv() if hears.poll() else ""
            if not isinstance(said, str):
                found.append(said)
            elif failed := _ended(pids) or said:  # the others fail because of a process that was killed
                raise RuntimeError(failed)
    return found


def _ended(pids: Mapping[str, int]) -> str:
    """Say which process has ended without a word; empty if there is none."""
    for name, pid in pids.items():
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and ended.si_code != os.CLD_EXITED:
            return f"{name} was ended by {signal.Signals(ended.si_status).name}"
        if ended is not None and ended.si_status != TOLD:
            return f"{name} ended with exit code {ended.si_status}"
    return ""


def _measure(size: int, name: str) -> list[float]:
    """Return the seconds until the last worker has joined, of the first sum, and of a later one; the most
    sockets of a worker; the CPU seconds of a worker; and the seconds from a death to the first sum of the
    next world, nan with torch alone. Raises RuntimeError if a worker fails."""
    join, serve = KINDS[name]
    hears, tells = multiprocessing.Pipe(duplex=False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(hears)
        stack.enter_context(tells)
        # one store for the first world, and one for the next
        listeners = [socket.create_server(("127.0.0.1", 0), backlog=4096) for _ in range(2)]
        for listener in listeners:
            stack.enter_context(listener)
        ports = [listener.getsockname()[1] for listener in listeners]

        def serving(listener: socket.socket) -> None:
            _store = serve(listener.getsockname()[1], listener.detach())
            signal.pause()

        works: dict[str, Callable[[], object]] = {
            **{f"store {n}": functools.partial(serving, listener) for n, listener in enumerate(listeners)},
            **{
                f"worker {rank}": functools.partial(_take_part, rank, size, ports, join, tells)
                for rank in range(size)
            },
        }
        pids = stack.enter_context(_processes(works, tells))
        store = dist.TCPStore("127.0.0.1", ports[0], wait_for_workers=False, timeout=PATIENCE)
        joined, first, later, open_sockets, cpu = zip(*_heard(size, hears, pids), strict=True)
        survived = [math.nan]
        if join is not _join_torchs:
            last = pids.pop(f"worker {size - 1}")
            os.kill(last, signal.SIGKILL)
            store.set("dead", "")
            os.waitpid(last, 0)
            (survived,) = zip(*_heard(size - 1, hears, pids), strict=True)
    return [max(joined), max(first), median(later), max(open_sockets), sum(cpu) / size, max(survived)]


def connecting(sizes: Sequence[int], tries: int) -> Iterator[str]:
    """Yield one line for each kind of world of each size. Torch's group is left out where elasticd connects
    workers late by itself: one machine does not hold as many connections."""
    for size in sizes:
        kinds = list(KINDS) if size <= MOST_AT_ONCE else ["elasticd"]
        found: dict[str, list[list[float]]] = {name: [] for name in kinds}
        for _ in range(tries):
            for name in kinds:
                found[name].append(_measure(size, name))
        medians = {
            name: [median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()
        }
        for name, (joined, first, later, most, cpu, survived) in medians.items():
            yield (
                f"{size} workers, {name:<14}: connected {joined:.2f} s, first sum {first:.2f} s, a later one "
                f"{later * 1e3:.0f} ms; {most:.0f} sockets of a worker; CPU {cpu * 1e3:.0f} ms a worker"
                + ("" if math.isnan(survived) else f"; a sum after a death {survived:.2f} s")
            )
        if "torch" not in medians:
            continue
        soon = {name: sum(medians["torch"][:2]) / sum(row[:2]) for name, row in medians.items()}
        said = ", ".join(f"{name} {ratio:.1f} times" for name, ratio in soon.items() if name != "torch")
        yield f"{size} workers: the first sum comes as soon as torch's: {said}"
