"""The least time that recovery in place can take: waiting processes abort a process group after one of
them was killed, and build the next group. For a sharded model, they also send each other the bytes whose
owner changes, and make a step."""

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
) -> None:
    work = prepare()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    work()  # in a group of its own, which FSDP's objects keep alive
    dist.destroy_process_group()
    stores = [dist.TCPStore("127.0.0.1", port, timeout=_LONG) for _ in range(2)]
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("1", stores[0]), rank=rank, world_size=size, timeout=_LONG
    )
    value = torch.zeros(1)
    rooms = {pair: torch.ones(size, dtype=torch.uint8) for pair, size in moved.items() if rank in pair}
    dist.all_reduce(value)
    line.send(0.0)
    if rank == size - 1:
        signal.pause()
    try:
        dist.all_reduce(value)
        sys.exit("the dead worker took part")
    except RuntimeError:
        pass
    dist.destroy_process_group()
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
    dist.destroy_process_group()


def nothing() -> Work:
    return lambda: None


def floor(
    workers: int,
    kills: int,
    moved: Mapping[tuple[int, int], int] = {},
    prepare: Callable[[], Work] = nothing,
) -> list[float | None]:
    """Return the seconds from ``kill -9`` of one process until the last of the others is in the new group,
    has the bytes that moved, and has done its work there. ``moved``: the bytes to move, by sender and
    receiver. ``prepare``: returns the work, which each process has also done alone, before the kill."""
    took: list[float | None] = []
    context = mp.get_context("spawn")
    for _ in range(kills):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        lines, processes = [], []
        for rank in range(workers):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_worker, args=(rank, workers, store.port, theirs, moved, prepare), daemon=True
            )
            process.start()
            lines.append(ours)
            processes.append(process)
        for line in lines:
            line.recv()
        time.sleep(0.2)  # the collective that is to fail must have begun
        killed_at = time.monotonic()
        os.kill(processes[-1].pid or 0, signal.SIGKILL)
        took.append(max(line.recv() for line in lines[:-1]) - killed_at)
        for process in processes:
            process.join()
    return took
