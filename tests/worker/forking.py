"""Jobs that load their data in processes forked from the worker."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from elasticd import worker
from tests.worker.jobs import Accident, Journal, commit, work

held: list[Any] = []
known: list[weakref.ref[Any]] = []


def sample(index: int) -> torch.Tensor:
    return torch.randn(8, generator=torch.Generator().manual_seed(index))


class Collected(Dataset[torch.Tensor]):
    """A dataset that runs the garbage collector in each loading process, as happens sooner or later in a
    large process."""

    collected = False

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.collected:
            self.collected = True
            gc.collect()
        return sample(index)

    def __len__(self) -> int:
        return 48


class Streamed(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        gc.collect()
        return map(sample, range(96))


def train_with_a_loader(state: worker.State, journal: Journal, accident: Accident, steps: int) -> None:
    """Load with a DataLoader of the script's own, made in the run function. The model of the last world is
    garbage, and is not collected yet when the DataLoader forks."""
    journal.write(entered=state.step)
    gc.disable()
    held.clear()
    cycle = [state.model]
    cycle.append(cycle)
    held.append(cycle)
    del cycle
    loader = DataLoader(Collected(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    for step in state.steps(steps):
        accident("start", step)
        loss = state.model(next(batches)).square().mean()
        accident("forward", step)
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        commit(state, journal)


def train_with_data(state: worker.State, journal: Journal, accident: Accident, steps: int) -> None:
    journal.write(entered=state.step)
    last, known[:] = known[:], [weakref.ref(a) for a in (state.model, dist.group.WORLD, dist.new_group())]
    for step in state.steps(steps):
        accident("start", step.number)
        for batch in step:
            if last:  # the loading processes have just been forked
                journal.write(kept=[type(ref()).__name__ for ref in last if ref() is not None])
                last.clear()
            loss = state.model(batch).square().mean()
            accident("forward", step.number)
            step.backward(loss)
        state.optimizer.step()
        state.optimizer.zero_grad()
        commit(state, journal)


def work_with_a_stream(address: str, folder: str, name: str, accident: Accident, **options: Any) -> None:
    data = worker.Data(
        Streamed(), global_batch=8, virtual_ranks=4, num_workers=2, multiprocessing_context="fork"
    )
    work(address, folder, name, accident, body=train_with_data, exact=False, data=data, **options)
