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
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, ParamSpec, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import extract_model_from_parallel, send_to_device
from torch import nn
from torch.utils.data import DataLoader

from elasticd.core.page_layout import Use
from elasticd.integrations.batches import begun, cut, largest_world, order_of_loader
from elasticd.integrations.checkpoint_folder import CheckpointFolder
from elasticd.integrations.draining import Drain
from elasticd.integrations.in_place import keep_process, present
from elasticd.worker.agent_link import agentpage

__all__ = ["ElasticLoader", "in_place", "refuse_sharded"]

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)
_SHARDING: Final = ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin")


def in_place(*, undo: bool | None = None, **kept: Any) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate the function that trains. Workers keep their process when others die, join or leave. The
    function is called again in each world, and continues after the last step that was made.

    ``kept``: what the training continues from, made before: ``in_place(model=model)``; with a loop of your
    own also the optimizer and the scheduler. See ``worker.State``. Make everything else in the function:
    TrainingArguments, Trainer, Accelerator, the result of ``prepare``.

    ``undo``: see ``worker.State``. Without an optimizer in ``kept``, parameters are copied after each step.
    """
    return keep_process(_forget_the_world, undo=undo, kept=kept)


def _forget_the_world(modules: Iterable[nn.Module]) -> None:
    # Accelerate has no public function for this; its own tests use these.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for module in modules:  # else `prepare` would wrap its forward once more
        extract_model_from_parallel(module, keep_fp32_wrapper=False)


def refuse_sharded(accelerator: Accelerator) -> None:
    """Raise ValueError for a model that cannot be kept in place, since each worker holds a part of it."""
    if any(getattr(accelerator.state, plugin, None) is not None for plugin in _SHARDING):
        raise ValueError(
            "in_place keeps models that each worker holds as a whole: leave it out with FSDP and DeepSpeed"
        )


class ElasticLoader:
    """The batches of this worker, and checkpoints of the position in them.

    Make it after ``accelerator.prepare`` of everything but the loader, and after
    ``accelerator.register_for_checkpointing``: it loads the newest checkpoint in ``folder`` by
    ``accelerator.load_state``. It saves a checkpoint by ``accelerator.save_state`` every ``every`` steps, at
    the end of an epoch, and when the workers are asked to end. The process then ends. The newest ``last`` are
    kept. In a function that is decorated with ``in_place`` each step is committed, and the process goes on
    while the job does.

    A step uses the loader's ``batch_size`` times ``accelerator.gradient_accumulation_steps`` times the
    largest world (``--max``) samples, in any world: in a smaller world each worker accumulates more batches.
    So use ``with accelerator.accumulate(model)``. A scheduler that is prepared makes as many steps as there
    are workers: leave it out of ``prepare``, register it for checkpointing, and step it if
    ``accelerator.sync_gradients``.

    ``loader``: a DataLoader of a map-style dataset, which shuffles or keeps the dataset's order. ``seed``: of
    the shuffling. ``epoch``, ``step``: the epoch, and the steps made in the epoch; all of them while work
    follows an epoch's batches.

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
        order = order_of_loader(loader, seed)
        self._accelerator, self._every = accelerator, every
        self._checkpoints = CheckpointFolder(folder, last=last)
        self._drain = Drain()
        self._kept = present()
        self.epoch = self.step = 0
        largest = largest_world(accelerator.num_processes)
        self._global_batch = loader.batch_size * accelerator.gradient_accumulation_steps * largest
        accelerator.register_for_checkpointing(self)
        committed = {}
        if self._kept is not None:
            refuse_sharded(accelerator)
            trained = (parameter for model in accelerator._models for parameter in model.parameters())
            committed = self._kept.begin(self.state_dict, trained)
        if committed:
            self.load_state_dict(committed)
        elif (newest := self._checkpoints.newest_on_all_ranks(self._gather)) is not None:
            accelerator.load_state(str(newest))
            accelerator.step = 0  # counts batches, and a step has more or fewer batches in another world
            if accelerator.is_main_process:
                _log.info("continues from %s", newest)
        self._batches, self._loader = cut(
            loader,
            order,
            global_batch=self._global_batch,
            rank=accelerator.process_index,
            world=accelerator.num_processes,
        )
        accelerator.gradient_accumulation_steps = self._batches.pieces
        agentpage.uses(Use.PLACE)
        if self._kept is None:
            agentpage.begins_after(self.epoch * self._batches.steps + self.step)
        else:
            self._kept.commit_epoch()  # loading, and `prepare`, which sends rank 0's weights, are no step

    def __len__(self) -> int:
        """The number of this worker's batches in an epoch."""
        return len(self._batches)

    @property
    def steps(self) -> int:
        """The number of steps in an epoch."""
        return self._batches.steps

    def epochs(self, until: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs. Iterate over the loader once in each.

        Work after an epoch's batches, such as an evaluation, comes again if a worker fails in it.
        """
        if self._kept is None:
            self._drain.begin()
        while self.epoch < until:
            epoch = self.epoch
            yield epoch
            if self.step < self._batches.steps:
                raise RuntimeError(f"epoch {epoch} was left before its end: iterate over all its batches")
            self.epoch, self.step = epoch + 1, 0
            if self._kept is not None:
                self._kept.commit_epoch()
        self._drain.end()

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of the epoch, on the accelerator's device."""
        batches = begun(self._loader, self._batches, self.epoch, self.step)
        for number, batch in enumerate(batches, start=1):
            yield send_to_device(batch, self._accelerator.device)
            if number % self._batches.pieces == 0:
                self.step += 1
                self._end_step(is_due=self.step % self._every == 0 or self.step == self._batches.steps)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "step": self.step, "global_batch": self._global_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.step, self._global_batch = state["epoch"], state["step"], state["global_batch"]

    def _end_step(self, *, is_due: bool) -> None:
        if self._kept is None:
            self._drain.after_step(self._save, is_due=is_due)
            return
        self._kept.commit(self._save)
        if is_due:
            self._save()

    def _save(self) -> None:
        accelerator = self._accelerator
        self._checkpoints.save(
            self.epoch * self._batches.steps + self.step,
            lambda folder: accelerator.save_state(str(folder)),
            is_main=accelerator.is_main_process,
            barrier=accelerator.wait_for_everyone,
        )

    def _gather(self, number: int) -> list[int]:
        accelerator = self._accelerator
        mine = torch.tensor([number], device=accelerator.device)
        return [int(found) for found in accelerator.gather(mine)]
