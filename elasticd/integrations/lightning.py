"""PyTorch Lightning under elasticd.

::

    +elastic = ElasticFit("checkpoints", every=100)
    -trainer = Trainer(max_epochs=3)
    +trainer = Trainer(max_epochs=3, callbacks=[elastic], **elastic.world)
    -trainer.fit(model, loader)
    +trainer.fit(model, elastic.loader(loader), ckpt_path=elastic.newest)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch.utils.data import DataLoader

from elasticd import worker
from elasticd.core.page_layout import Use
from elasticd.integrations.batches import GlobalBatches, cut, largest_world, order_of_loader
from elasticd.integrations.checkpoint_folder import CheckpointFolder
from elasticd.integrations.draining import Drain
from elasticd.worker.agent_link import agentpage

__all__ = ["ElasticFit"]

_PROGRESS = "epoch_loop.batch_progress"  # counts batches, in the state of a fit loop


class ElasticFit(Callback):  # type: ignore[misc]
    """Keeps the place of a training in the data, and saves and finds its checkpoints.

    A checkpoint is saved in ``folder``, which all nodes share, every so many steps, at the end of an epoch,
    and when the workers are asked to end; the process then ends. The newest ``last`` are kept.

    A step uses the loader's ``batch_size`` times the trainer's ``accumulate_grad_batches`` times the largest
    world (``--max``) samples, in any world: in a smaller world each worker accumulates more batches.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int, last: int = 2) -> None:
        self._checkpoints, self._every = CheckpointFolder(folder, last=last, suffix=".ckpt"), every
        self._drain = Drain()
        self._loader: _ResumableLoader | None = None

    @property
    def world(self) -> dict[str, Any]:
        """The arguments of Trainer that name the present world; none without a launcher such as elasticd."""
        if "LOCAL_WORLD_SIZE" not in os.environ:
            return {}
        devices, nodes = (int(os.environ[n]) for n in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
        return {"devices": devices, "num_nodes": nodes, "plugins": [_Environment()]}

    @property
    def newest(self) -> str | None:
        """The newest whole checkpoint, for ``Trainer.fit(ckpt_path=...)``; None if there is none."""
        found = self._checkpoints.newest()
        return None if found is None else str(found)

    def loader(self, loader: DataLoader[Any], seed: int = 0) -> Any:
        """Return this worker's part of a loader, which shuffles or keeps the dataset's order.

        Raises TypeError for a loader whose order is not known ahead.
        """
        self._loader = _ResumableLoader(loader, seed)
        return self._loader

    # ------------------------------------------------------------ what Lightning calls

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if self._loader is None:
            raise RuntimeError("ElasticFit was given no loader: fit with elastic.loader(loader)")

        def gather(number: int) -> list[int]:
            mine = torch.tensor(number, device=trainer.strategy.root_device)
            return [int(found) for found in trainer.strategy.all_gather(mine).flatten()]

        self._checkpoints.newest_on_all_ranks(gather)
        self._loader.cut(trainer.accumulate_grad_batches)
        trainer.accumulate_grad_batches = self._loader.pieces

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Count the batches of the checkpoint as batches of this world, in which a step has another number of
        them."""
        assert self._loader is not None
        known = checkpoint["callbacks"][self.state_key]
        self._loader.cut(trainer.accumulate_grad_batches, known["global_batch"])
        trainer.accumulate_grad_batches = pieces = self._loader.pieces
        progress = checkpoint["loops"]["fit_loop"][_PROGRESS]
        for counts in (progress["total"], progress["current"]):
            steps = counts["ready"] // known["pieces"]
            later = {name: counts["ready"] - count for name, count in counts.items()}
            counts.update({name: steps * pieces - behind for name, behind in later.items()})

    def state_dict(self) -> dict[str, Any]:
        assert self._loader is not None
        return {"global_batch": self._loader.global_batch, "pieces": self._loader.pieces}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        agentpage.uses(Use.PLACE)
        agentpage.begins_after(trainer.global_step)
        self._drain.begin()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert self._loader is not None
        if self._loader.is_at_step and not self._loader.is_at_end:  # at the end, the epoch's hooks come first
            self._end_step(trainer, is_due=trainer.global_step % self._every == 0)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_step(trainer, is_due=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._drain.end()

    def _end_step(self, trainer: Trainer, *, is_due: bool) -> None:
        def save() -> None:
            self._checkpoints.save(
                trainer.global_step,
                trainer.save_checkpoint,
                is_main=trainer.is_global_zero,
                barrier=trainer.strategy.barrier,
            )

        self._drain.after_step(save, is_due=is_due)


class _Environment(TorchElasticEnvironment):  # type: ignore[misc]
    """torchelastic's environment, whose nodes may have different numbers of workers."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        pass


class _ResumableLoader:
    """The batches of this worker, from the place that Lightning keeps in its checkpoints. Not a DataLoader:
    Lightning would give it a sampler of its own."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._given, self._order = loader, order_of_loader(loader, seed)
        self._batches: GlobalBatches | None = None
        self.global_batch = 0
        self._epoch = self._step = 0
        self._yielded = 0  # batches of this epoch

    def cut(self, accumulate: int, global_batch: int = 0) -> None:
        """Cut the batches for the present world. ``global_batch``: by default, of the largest world."""
        given, world = self._given, worker.world_size()
        self.global_batch = global_batch or self.global_batch
        if not self.global_batch:
            self.global_batch = given.batch_size * accumulate * largest_world(world)  # type: ignore[operator]
        self._batches, self._loader = cut(
            given, self._order, global_batch=self.global_batch, rank=worker.rank(), world=world
        )

    @property
    def pieces(self) -> int:
        """The number of batches in a step."""
        assert self._batches is not None
        return self._batches.pieces

    @property
    def is_at_step(self) -> bool:
        """Whether the last batch was the last of a step."""
        return self._yielded % self.pieces == 0

    @property
    def is_at_end(self) -> bool:
        """Whether the last batch was the last of an epoch."""
        return self._yielded == len(self)

    def __len__(self) -> int:
        """The number of this worker's batches in an epoch."""
        assert self._batches is not None
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        assert self._batches is not None
        if self.is_at_end:
            self._epoch, self._yielded = self._epoch + 1, 0
        self._batches.epoch, self._batches.first = self._epoch, self._yielded // self.pieces
        for batch in self._loader:
            self._yielded += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "step": self._yielded // self.pieces}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._yielded = state["epoch"], state["step"] * self.pieces
