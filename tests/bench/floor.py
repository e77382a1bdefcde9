"""The least time that recovery in place can take: waiting processes build the next process group after one of
them was killed. For a sharded model, they also send each other the bytes whose owner changes, and make a
step.

With torch alone, a process notices that its collective fails, and destroys the group first. Gloo takes 10 ms
for each connection, and most processes notice a death only once a neighbour has destroyed its group. So this
time grows with the square of the processes. The floor below that: all are told at the moment of the kill, and
leave the old group as it is.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_LONG = timedelta(seconds=60)
Work = Callable[[], None]


def _worker(
    rank: int,
    size: int,
    port: int,
    line: Connection,
    moved: Mapping[tuple[int, int], int],
    prepare: Callable[[], Work],
    told: bool,
) -> None:
    work = prepare()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    work()  # in a group of its own, which FSDP's objects keep alive
    dist.destroy_process_group()
    stores = [dist.TCPStore("127.0.0.1", port, timeout=_LONG) for _ in range(2)]
    group = dist.ProcessGroupGloo(dist.PrefixStore("1", stores[0]), rank, size, _LONG)
    value = torch.zeros(1)
    rooms = {pair: torch.ones(size, dtype=torch.uint8) for pair, size in moved.items() if rank in pair}
    group.allreduce([value]).wait()
    line.send(0.0)
    if rank == size - 1:
        signal.pause()
    begun = group.allreduce([value])
    if told:
        line.recv()
    else:
        try:
            begun.wait()
            sys.exit("the dead worker took part")
        except RuntimeError:
            pass
        del begun, group
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("2", stores[1]), rank=rank, world_size=size - 1, timeout=_LONG
    )
    sent = [
        dist.isend(room, receiver) if rank == sender else dist.irecv(room, sender)
        for (sender, receiver), room in rooms.items()
    ]
    for one in sent:
        assert one is not None
        one.wait()
    work()
    line.send(time.monotonic())
    line.recv()  # all have finished
    os._exit(0)  # a group that was left as it is would not be destroyed


def nothing() -> Work:
    return lambda: None


def floor(
    workers: int,
    kills: int,
    moved: Mapping[tuple[int, int], int] = {},
    prepare: Callable[[], Work] = nothing,
    *,
    told: bool = False,
) -> list[float | None]:
    """Return the seconds from ``kill -9`` of one process until the last of the others is in the new group,
    has the bytes that moved, and has done its work there. ``moved``: the bytes to move, by sender and
    receiver. ``prepare``: returns the work, which each process has also done alone, before the kill.
    ``told``: the others are told of the kill, and do not abort their group."""
    took: list[float | None] = []
    context = mp.get_context("spawn")
    for _ in range(kills):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        lines, processes = [], []
        for rank in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_worker, args=(rank, workers, store.port, theirs, moved, prepare, told), daemon=True
            )
            process.start()
            lines.append(ours)
            processes.append(process)
        for line in lines:
            line.recv()
        time.sleep(0.2)  # the collective that is to fail must have begun
        killed_at = time.monotonic()
        os.kill(processes[-1].pid or 0, signal.SIGKILL)
        for line in lines[:-1] if told else ():
            line.send(None)
        took.append(max(line.recv() for line in lines[:-1]) - killed_at)
        for line in lines[:-1]:
            line.send(None)
        for process in processes:
            process.join()
    return took
