"""Worlds of plain processes that train together, without an agent."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elasticd import worker
from elasticd.worker.world.group import World
from tests.worker.crew import forkserver

PATIENCE_S = 100.0


def entered(state: worker.State, world: World | None = None) -> worker.State:
    """Enter a world whose workers all have the state. Return the state."""
    if not state._committed.last.kept:
        state._committed.begin()
        state._committed.agree(1)
    state._committed.enter(world)
    return state


def in_world(size: int, folder: Path, job: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``job(*args)`` in each process of a process group. Return the results by rank."""
    context = forkserver()
    store = folder / f"store-{size}"
    ends = []
    for rank in range(size):
        mine, theirs = context.Pipe()
        process = context.Process(target=_take_part, args=(theirs, str(store), rank, size, job, args))
        process.start()
        theirs.close()
        ends.append((process, mine))
    try:
        answers = []
        for _, mine in ends:
            assert mine.poll(PATIENCE_S), "no answer"
            answers.append(mine.recv())
        return answers
    finally:
        store.unlink(missing_ok=True)
        for process, mine in ends:
            process.kill()
            process.join()
            mine.close()


def _take_part(
    answer: Connection, store: str, rank: int, size: int, job: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    answer.send(job(*args))
    answer.close()
    dist.barrier()  # no process ends while others still need it


def take_steps(state: worker.State) -> None:
    """Take all steps of a State with data. The loss is the mean square of what the model returns."""
    for step in state.steps():
        for batch in step:
            step.backward(state.model(batch).square().mean())
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.commit()
