"""A training loop with Accelerate under elasticd.

::

    -model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    +model, optimizer = accelerator.prepare(model, optimizer)
    +loader = ElasticLoader(accelerator, loader, "checkpoints", every=100)
    -for epoch in range(3):
    +for epoch in loader.epochs(3):
         for batch in loader:
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from elasticd import worker
from elasticd.core.page_layout import Use
from elasticd.data.order import Sequential, Shuffled
from elasticd.integrations.batches import WORLD_MAX, GlobalBatches, loader_options
from elasticd.integrations.draining import Drain
from elasticd.worker.agent import agentpage

__all__ = ["ElasticLoader"]

_log = logging.getLogger(__name__)
_STEP = "step-"  # begins the name of a checkpoint's folder


class ElasticLoader:
    """The batches of this worker, and checkpoints of the position in them.

    Make it after ``accelerator.prepare`` of everything but the loader, and after
    ``accelerator.register_for_checkpointing``: it loads the newest checkpoint in ``folder`` by
    ``accelerator.load_state``. It saves one by ``accelerator.save_state`` every so many steps, at the end of
    an epoch, and when the workers are asked to end; the process then ends. The newest ``last`` are kept.

    A step uses the loader's ``batch_size`` times ``accelerator.gradient_accumulation_steps`` times the
    largest world (``--max``) samples, in any world: in a smaller world each worker accumulates more batches.
    So use ``with accelerator.accumulate(model)``. A scheduler that is prepared makes as many steps as there
    are workers: leave it out of ``prepare``, register it for checkpointing, and step it if
    ``accelerator.sync_gradients``.

    ``loader``: a DataLoader of a map-style dataset, which shuffles or keeps the dataset's order. ``seed``: of
    the shuffling. ``epoch``, ``step``: the epoch, and the steps made in the epoch.

    Raises TypeError for a loader whose order is not known ahead.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        loader: DataLoader[Any],
        folder: str | os.PathLike[str],
        *,
        every: int,
        seed: int = 0,
        last: int = 2,
    ) -> None:
        if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
            raise TypeError(
                "the loader's order is not known ahead: give a map-style dataset and a batch_size"
            )
        self._accelerator, self._folder, self._every, self._last = accelerator, Path(folder), every, last
        self._drain = Drain()
        self.epoch = self.step = 0
        largest = max(accelerator.num_processes, int(os.environ.get(WORLD_MAX, "0")))
        self._global_batch = loader.batch_size * accelerator.gradient_accumulation_steps * largest
        accelerator.register_for_checkpointing(self)
        newest = self._newest()
        if newest is not None:
            accelerator.load_state(str(newest))
            accelerator.step = 0  # counts batches, of which a step has another number in another world
            if accelerator.is_main_process:
                _log.info("continues from %s", newest)
        length = len(loader.dataset)  # type: ignore[arg-type]
        shuffles = isinstance(loader.sampler, RandomSampler)
        self._batches = GlobalBatches(
            Shuffled(length, seed) if shuffles else Sequential(length),
            global_batch=self._global_batch,
            worker_batch=loader.batch_size,
            rank=accelerator.process_index,
            world=accelerator.num_processes,
            drop_last=loader.drop_last,
        )
        accelerator.gradient_accumulation_steps = self._batches.pieces
        self._loader = DataLoader(loader.dataset, batch_sampler=self._batches, **loader_options(loader))
        agentpage.uses(Use.DATA)
        agentpage.begins_after(self.epoch * self._batches.steps + self.step)

    def __len__(self) -> int:
        """The number of this worker's batches in an epoch."""
        return len(self._batches)

    @property
    def steps(self) -> int:
        """The number of steps in an epoch."""
        return self._batches.steps

    def epochs(self, until: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs. Iterate over the loader once in each."""
        self._drain.begin()
        while self.epoch < until:
            epoch = self.epoch
            yield epoch
            if self.epoch == epoch:
                raise RuntimeError(f"epoch {epoch} was left before its end: iterate over all its batches")
        self._drain.end()

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of the epoch, on the accelerator's device."""
        self._batches.epoch, self._batches.first = self.epoch, self.step
        for number, batch in enumerate(self._loader, start=1):
            yield send_to_device(batch, self._accelerator.device)
            if number % self._batches.pieces == 0:
                self.step += 1
                if self.step < self._batches.steps:
                    self._end_step(is_due=self.step % self._every == 0)
        self.epoch, self.step = self.epoch + 1, 0
        self._end_step(is_due=True)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "step": self.step, "global_batch": self._global_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.step, self._global_batch = state["epoch"], state["step"], state["global_batch"]

    def _end_step(self, *, is_due: bool) -> None:
        """Save a checkpoint if one is due or the workers are asked to end. In that case end the process."""
        is_asked = self._drain.is_asked()
        if not (is_due or is_asked):
            return
        self._save()
        if is_asked or self._drain.is_asked():
            self._drain.leave()

    def _save(self) -> None:
        """Save a checkpoint that is whole or absent."""
        accelerator = self._accelerator
        name = f"{_STEP}{self.epoch * self._batches.steps + self.step}"
        unfinished, folder = self._folder / f"{name}.unfinished", self._folder / name
        if accelerator.is_main_process:
            for old in (unfinished, folder):
                shutil.rmtree(old, ignore_errors=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(unfinished))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            unfinished.rename(folder)
            for old in self._checkpoints()[: -self._last]:
                shutil.rmtree(old)
            worker.checkpointed(folder)
        accelerator.wait_for_everyone()

    def _newest(self) -> Path | None:
        """Return the newest checkpoint. Raises ValueError if only some ranks see it."""
        found = self._checkpoints()
        mine = torch.tensor([_step_of(found[-1]) if found else -1], device=self._accelerator.device)
        steps = self._accelerator.gather(mine).tolist()
        if len(set(steps)) > 1:
            raise ValueError(
                f"the ranks find the checkpoints {sorted(set(steps))} in {self._folder}: give a folder that "
                "all nodes share"
            )
        return found[-1] if found else None

    def _checkpoints(self) -> list[Path]:
        return sorted((f for f in self._folder.glob(f"{_STEP}*") if _step_of(f) >= 0), key=_step_of)


def _step_of(folder: Path) -> int:
    number = folder.name.removeprefix(_STEP)
    return int(number) if number.isdecimal() else -1
