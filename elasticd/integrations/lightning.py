"""PyTorch Lightning under elasticd.

::

    +elastic = ElasticFit("checkpoints", every=100)
    -trainer = Trainer(max_epochs=3)
    +trainer = Trainer(max_epochs=3, callbacks=[elastic], **elastic.world)
    -trainer.fit(model, loader)
    +trainer.fit(model, elastic.loader(loader), ckpt_path=elastic.newest)
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

from elasticd import worker
from elasticd.core.page_layout import Use
from elasticd.integrations.batches import GlobalBatches, begun, cut, largest_world, order_of_loader
from elasticd.integrations.checkpoint_folder import CheckpointFolder
from elasticd.integrations.draining import Drain
from elasticd.integrations.in_place import keep_process, present
from elasticd.worker.agent_link import agentpage

__all__ = ["ElasticFit", "in_place"]

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)
_IN_MEMORY: Final = "memory of this process"  # a path, for Trainer.fit(ckpt_path=...)
_LOOP: Final = "epoch_loop.batch_progress"  # counts batches, in the state of a fit loop
_LOGGED: Final = "epoch_loop.state_dict"  # counts the steps that loggers are told
_NO_LOADER: Final = "ElasticFit knows the place in one loader alone: fit with elastic.loader(loader)"
# Of a checkpoint, what the process keeps anyway, beside the module's state.
_KEPT_ANYWAY: Final = ("hparams_name", "hparams_type", "hyper_parameters")


def in_place(*, undo: bool | None = None, **kept: Any) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate the function that trains. Workers keep their process when others die, join or leave. The
    function is called again in each world, and ``Trainer.fit`` continues after the last step that was made.

    ``kept``: the LightningModule, made before with all its layers: ``in_place(model=model)``. Make everything
    else in the function: ElasticFit, callbacks, Trainer.

    ``undo``: see ``worker.State``. By default parameters are copied after each step.
    """
    return keep_process(_forget_nothing, undo=undo, kept=kept)


def _forget_nothing(modules: Iterable[nn.Module]) -> None:
    """A Trainer knows its world from its arguments."""


class ElasticFit(Callback):  # type: ignore[misc]
    """Keeps the place of a training in the data, and saves and finds its checkpoints.

    A checkpoint is saved in ``folder``, which all nodes share: every ``every`` steps, after an epoch, and
    when the workers are asked to end. The process then ends. The newest ``last`` are kept. In a function that
    is decorated with ``in_place`` each step is committed, and the process goes on while the job does.

    A step is over when the trainer asks for the next batch. Work after an optimizer's step, such as a
    validation, belongs to the step, and is repeated with the step.

    The samples of a step are the loader's ``batch_size`` times the trainer's ``accumulate_grad_batches``
    times the largest world (``--max``). In a smaller world each worker accumulates more batches.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int, last: int = 2) -> None:
        self._checkpoints, self._every = CheckpointFolder(folder, last=last, suffix=".ckpt"), every
        self._drain = Drain()
        self._kept = present()
        self._loader: _ResumableLoader | None = None
        self._trainer: Trainer | None = None
        self._is_between_steps = False
        self._on_sigterm: Any = None  # what was done before Lightning's handler

    @property
    def world(self) -> dict[str, Any]:
        """The arguments of Trainer that name the present world; none without a launcher such as elasticd."""
        if "LOCAL_WORLD_SIZE" not in os.environ:
            return {}
        devices, nodes = (int(os.environ[n]) for n in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
        plugins = [_Environment(), *([_Memory(self._checkpoint)] if self._kept is not None else [])]
        return {"devices": devices, "num_nodes": nodes, "plugins": plugins}

    @property
    def newest(self) -> str | None:
        """The newest whole checkpoint, for ``Trainer.fit(ckpt_path=...)``; None if there is none."""
        if self._kept is not None and self._kept.committed:
            return _IN_MEMORY
        found = self._checkpoints.newest()
        return None if found is None else str(found)

    def loader(self, loader: DataLoader[Any], seed: int = 0) -> Any:
        """Return this worker's part of a loader, which shuffles or keeps the dataset's order.

        Raises TypeError for a loader whose order is not known ahead.
        """
        self._loader = _ResumableLoader(loader, seed, self._before_step)
        return self._loader

    # ------------------------------------------------------------ what Lightning calls

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if self._loader is None:
            raise RuntimeError(_NO_LOADER)
        if self._kept is not None and not isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy):
            raise ValueError(
                "in_place keeps models that each worker holds as a whole: leave it out with "
                f"{type(trainer.strategy).__name__}"
            )

        def gather(number: int) -> list[int]:
            mine = torch.tensor(number, device=trainer.strategy.root_device)
            return [int(found) for found in trainer.strategy.all_gather(mine).flatten()]

        if self.newest != _IN_MEMORY:
            self._checkpoints.newest_on_all_ranks(gather)
        self._trainer, self._on_sigterm = trainer, signal.getsignal(signal.SIGTERM)
        self._loader.cut(trainer.accumulate_grad_batches)
        trainer.accumulate_grad_batches = self._loader.pieces

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Have a checkpoint between two steps say that the hooks after the last batch are under way. From
        there Lightning goes on with the next batch, and repeats no validation."""
        if self._is_between_steps:
            loop = checkpoint["loops"]["fit_loop"]
            for counts in (loop[_LOOP]["total"], loop[_LOOP]["current"]):
                counts["completed"] -= 1
            loop[_LOGGED]["_batches_that_stepped"] -= 1

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Count the batches of the checkpoint as batches of this world, in which a step has another number of
        them."""
        assert self._loader is not None
        known = checkpoint["callbacks"].get(self.state_key)
        if known is None:
            raise ValueError(
                "the checkpoint was saved without ElasticFit, so its place in the data is not known: load "
                "its weights into the model, and fit with ckpt_path=elastic.newest"
            )
        self._loader.cut(trainer.accumulate_grad_batches, known["global_batch"])
        self._loader.load_state_dict(known["place"])  # Lightning does so only in the middle of an epoch
        trainer.accumulate_grad_batches = pieces = self._loader.pieces
        progress = checkpoint["loops"]["fit_loop"][_LOOP]
        for counts in (progress["total"], progress["current"]):
            steps = counts["ready"] // known["pieces"]
            later = {name: counts["ready"] - count for name, count in counts.items()}
            counts.update({name: steps * pieces - behind for name, behind in later.items()})

    def state_dict(self) -> dict[str, Any]:
        assert self._loader is not None
        return {
            "global_batch": self._loader.global_batch,
            "pieces": self._loader.pieces,
            "place": self._loader.state_dict(),
        }

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._loader is not None
        if trainer.train_dataloader is not self._loader:
            raise RuntimeError(_NO_LOADER)
        self._loader.require_whole_steps(trainer.num_training_batches)
        if self._loader.pieces > 1 and not pl_module.automatic_optimization and trainer.is_global_zero:
            _log.warning(
                "a step's samples are used in %d batches, since the world is smaller than --max, and the "
                "module steps its optimizers itself: see that it does so after the last of them",
                self._loader.pieces,
            )
        agentpage.uses(Use.PLACE)
        if self._kept is not None:
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and self._on_sigterm is not None:  # Lightning's handler waits for all workers
                signal.signal(signal.SIGTERM, self._on_sigterm)
            self._kept.begin(self._progress, pl_module.parameters())
        else:
            agentpage.begins_after(trainer.global_step)
            self._drain.begin()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        assert self._loader is not None
        if trainer.accumulate_grad_batches != self._loader.pieces:
            raise RuntimeError(
                f"accumulate_grad_batches was changed to {trainer.accumulate_grad_batches}, and a step has "
                f"{self._loader.pieces} batches in this world: give accumulate_grad_batches to Trainer, and "
                "leave GradientAccumulationScheduler out"
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have schedulers that follow a metric step after this epoch, too. Lightning leaves them out at the
        end of an epoch that was begun before a restart, since it may not know the metric. Here it does: the
        last step of the epoch was made in this world, and the validation belongs to the step."""
        assert self._loader is not None
        if self._loader.has_begun:
            trainer.fit_loop._restarting = False

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save_if_due(trainer, is_due=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self._kept is not None and self._loader is not None and self._loader.has_begun:
            self._kept.commit(lambda: None)  # the last step, which was saved at the end of the training
        self._drain.end()

    # ------------------------------------------------------------ steps

    def _before_step(self, *, is_first: bool, begins_epoch: bool) -> None:
        """End the step before, if there was one in this world."""
        trainer, kept = self._trainer, self._kept
        assert trainer is not None
        if is_first:
            if kept is not None:
                kept.resume_random()  # a validation that was not finished has drawn some
            return
        self._is_between_steps = True
        if kept is not None:
            kept.commit(partial(self._save_if_due, trainer, is_due=True))
        self._save_if_due(trainer, is_due=begins_epoch or trainer.global_step % self._every == 0)
        self._is_between_steps = False

    def _save_if_due(self, trainer: Trainer, *, is_due: bool) -> None:
        def save() -> None:
            self._checkpoints.save(
                trainer.global_step,
                partial(trainer.save_checkpoint, weights_only=False),
                is_main=trainer.is_global_zero,
                barrier=trainer.strategy.barrier,
            )

        if self._kept is None:
            self._drain.after_step(save, is_due=is_due)
        elif is_due:
            save()

    def _progress(self) -> dict[str, Any]:
        """Return the progress that is the same in all workers."""
        trainer = self._trainer
        assert trainer is not None
        # Lightning has no public function that returns a checkpoint and writes none.
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        del checkpoint["state_dict"]
        progress = {name: value for name, value in checkpoint.items() if not name.endswith(_KEPT_ANYWAY)}
        return {**progress, "should_stop": trainer.should_stop}

    def _checkpoint(self) -> dict[str, Any]:
        """Return the progress as of the last commit, as a checkpoint of Lightning's. The model has kept its
        weights."""
        trainer, kept = self._trainer, self._kept
        assert trainer is not None
        assert kept is not None
        trainer.should_stop = kept.committed["should_stop"]
        return {**kept.committed, "state_dict": trainer.strategy.lightning_module_state_dict()}


class _Environment(TorchElasticEnvironment):  # type: ignore[misc]
    """torchelastic's environment, whose nodes may have different numbers of workers."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        pass


class _Memory(TorchCheckpointIO):  # type: ignore[misc]
    """Loads Lightning's checkpoints from files, or from the state that ``in_place`` keeps in memory."""

    def __init__(self, kept: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self._kept = kept

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        return self._kept() if path == _IN_MEMORY else super().load_checkpoint(path, *args, **kwargs)


class _ResumableLoader:
    """The batches of this worker, from the place that ElasticFit keeps. Not a DataLoader: Lightning would
    give it a sampler of its own.

    ``before_step``: called when the first batch of a step is asked for. ``has_begun``: whether a batch was
    asked for in this world.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, before_step: Callable[..., None]) -> None:
        self._given, self._order, self._before_step = loader, order_of_loader(loader, seed), before_step
        self._batches: GlobalBatches | None = None
        self.has_begun = False
        self.global_batch = 0
        self._epoch = 0
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

    def require_whole_steps(self, batches: float) -> None:
        """Raise ValueError if an epoch of ``batches`` batches ends in the middle of a step."""
        if batches % self.pieces:
            raise ValueError(
                f"an epoch of {batches} batches is no whole number of steps, which have {self.pieces} "
                "batches in this world: leave limit_train_batches and overfit_batches out"
            )

    def __len__(self) -> int:
        """The number of this worker's batches in an epoch."""
        assert self._batches is not None
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        assert self._batches is not None
        if self._yielded % self.pieces:
            raise RuntimeError("an epoch was left in the middle of a step: leave it after whole steps")
        if self._yielded == len(self):
            self._epoch, self._yielded = self._epoch + 1, 0
        for batch in begun(self._loader, self._batches, self._epoch, self._yielded // self.pieces):
            if self._yielded % self.pieces == 0:
                self._before_step(is_first=not self.has_begun, begins_epoch=self._yielded == 0)
                self.has_begun = True
            self._yielded += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "step": self._yielded // self.pieces}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._yielded = state["epoch"], state["step"] * self.pieces
