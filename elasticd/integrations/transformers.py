"""Transformers' Trainer under elasticd.

::

    -from transformers import Trainer
    +from elasticd.integrations.transformers import Trainer

The trainer continues from the newest whole checkpoint in ``output_dir``. When workers are asked to end, all
save a checkpoint after the same step.

Each sample of an epoch is used once, in any sequence of worlds. The samples of a step are
``per_device_train_batch_size`` times ``gradient_accumulation_steps`` times the largest world (``--max``). In
a smaller world each worker accumulates more batches.

Three kinds of training may lose or repeat samples when the world changes: with an iterable dataset; with a
sampler that neither shuffles nor keeps the dataset's order; with tensor, context or sequence parallelism. The
trainer then warns, and uses transformers' own data loader.
"""

from __future__ import annotations

import json
import logging
import tempfile
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.data_loader import get_sampler
from safetensors import SafetensorError, safe_open
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from elasticd import worker
from elasticd.core.page_layout import Use
from elasticd.data.order import Order
from elasticd.integrations.accelerate import in_place, refuse_sharded
from elasticd.integrations.batches import GlobalBatches, largest_world, order_of
from elasticd.integrations.draining import Drain
from elasticd.integrations.in_place import present
from elasticd.worker.agent_link import agentpage
from elasticd.worker.samples.loading import loader_options

__all__ = ["Elastic", "ElasticCallback", "Trainer", "in_place", "newest_whole_checkpoint"]

_log = logging.getLogger(__name__)
_REPORTED = ("loss", "learning_rate", "grad_norm", "eval_loss")
_STATE = "trainer_state.json"
_OWN = ("is_local_process_zero", "is_world_process_zero", "log_history")  # each worker's, of a TrainerState
# By what they hold: patterns of the files and folders that a checkpoint has, of which one is enough.
_NEEDED = {
    "the model": (
        "*model*.safetensors",
        "*model*.bin",
        "*model*.index.json",
        "pytorch_model_fsdp*",
        "global_step*",
    ),
    "the optimizer": ("optimizer*", "global_step*"),
    "the scheduler": ("scheduler.pt",),
}


class ElasticCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Saves a checkpoint and ends the process when the workers are asked to end, and tells the agent of
    checkpoints, steps and losses. ``Elastic`` adds it to its trainer.

    ``global_batch``: the samples of a step, which checkpoints keep.
    """

    def __init__(self, global_batch: int = 0) -> None:
        self.global_batch = global_batch
        self._drain = Drain()
        self._is_leaving = False
        self._is_over = False  # whether no hook of the epoch's end follows the present step

    def state(self) -> dict[str, Any]:
        return {"args": {"global_batch": self.global_batch}, "attributes": {}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())  # not in others' checkpoints
        if present() is None:
            agentpage.begins_after(state.global_step)
            self._drain.begin()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if present() is None:
            self._is_over = not _ends_epoch(state)
            self._is_leaving = self._drain.is_asked() or self._is_leaving
            if self._is_leaving:
                control.should_save = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._is_over = True
        if self._is_leaving:
            control.should_save = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._drain.is_asked()  # once this returns, all ranks have written their files
        if state.is_world_process_zero:
            worker.checkpointed(Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"))
        if present() is None:
            self._is_leaving = self._drain.is_asked() or self._is_leaving
            if self._is_leaving and self._is_over:
                self._drain.leave()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        worker.report(**{name: value for name, value in (logs or {}).items() if name in _REPORTED})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._drain.end()


if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class Elastic(_Base):  # type: ignore[misc]
    """Makes a subclass of Trainer elastic: ``class MyTrainer(Elastic, SFTTrainer)``. Outside ``elasticd run``
    it changes nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batches: GlobalBatches | None = None
        self._elastic: ElasticCallback | None = None
        self._kept: dict[str, Any] | None = None
        self._accumulated: int = self.args.gradient_accumulation_steps
        # The last step that was committed in place, that what is due was done for, and that was saved.
        self._made = self._looked = self._saved = -1
        if largest_world():
            asked = self.args
            largest = largest_world(asked.world_size)
            step = asked.train_batch_size * asked.gradient_accumulation_steps * largest
            self._elastic = ElasticCallback(step)
            self.add_callback(self._elastic)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does, but from the newest whole checkpoint in ``output_dir`` if there is one,
        unless ``resume_from_checkpoint`` is False."""
        self._made = self._looked = self._saved = -1
        if self._elastic is not None and (kept := present()) is not None:
            refuse_sharded(self.accelerator)
            if not hasattr(super(), "_maybe_log_save_evaluate"):
                raise RuntimeError(
                    f"in_place does not know transformers {transformers.__version__}, which has changed its "
                    "loop: use 5.23 or an earlier release"
                )
            committed = kept.begin(self._progress, self.model.parameters())
            if committed:
                return self._train_on(committed, *args, **kwargs)
        if self._elastic is not None and resume_from_checkpoint is not False:
            newest = self._newest_on_all_ranks()
            if newest is not None:
                self._keep_global_batch(newest)
                resume_from_checkpoint = str(newest)
            elif resume_from_checkpoint is True:
                resume_from_checkpoint = None
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        self._batches = None
        if self._elastic is None:
            return loader
        args = self.args
        order = _order_of(loader, args)
        each = args.train_batch_size * args.gradient_accumulation_steps
        if order is None or self.get_total_train_batch_size(args) != each * args.world_size:
            _log.warning(
                "samples may be lost or repeated when the world changes: their order is not known ahead, or "
                "several workers use the same samples"
            )
            return loader
        self._batches = batches = GlobalBatches(
            order,
            global_batch=self._elastic.global_batch,
            worker_batch=args.train_batch_size,
            rank=args.process_index,
            world=args.world_size,
            drop_last=args.dataloader_drop_last,
        )
        args.gradient_accumulation_steps = batches.pieces
        agentpage.uses(Use.PLACE)
        return _Loader(loader.dataset, batch_sampler=batches, **loader_options(loader))

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Weight the loss by the batch's share of the step's samples, where transformers does not already
        divide by the step's number of tokens."""
        mine = find_batch_size(inputs)
        computed = super().compute_loss(model, inputs, return_outputs, num_items_in_batch, **kwargs)
        by_tokens = num_items_in_batch is not None and (
            self.model_accepts_loss_kwargs or self.compute_loss_func
        )
        batches = self._batches
        if batches is None or by_tokens or not model.training or mine is None:
            return computed
        parts = batches.pieces * self.args.world_size
        weight = mine * parts / batches.samples(self.state.global_step % batches.steps)
        if self.compute_loss_func and getattr(self, "loss_is_scaled_for_ga", None) is None:
            # Transformers adds such losses up, and does not divide them by the number of batches.
            weight *= self._accumulated / batches.pieces
        if return_outputs:
            return computed[0] * weight, computed[1]
        return computed * weight

    # ------------------------------------------------------------ in place

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Commit a step once all that is due after the step is done: an evaluation in which a worker dies
        comes again, with the step. After the last step of an epoch, Trainer calls this function twice."""
        super()._maybe_log_save_evaluate(*args, **kwargs)
        kept, step = present(), self.state.global_step
        comes_again = self._looked != step and (
            _ends_epoch(self.state) or self.control.should_training_stop or self.control.should_epoch_stop
        )
        self._looked = step
        if self._elastic is not None and kept is not None and step > self._made and not comes_again:
            self._made = step
            kept.commit(self._save_unless_saved)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        self._saved = self.state.global_step

    def _save_unless_saved(self) -> None:
        if self._saved != self.state.global_step:
            self._save_checkpoint(self.model, None)
            # Trainer keeps what its callbacks return.
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)  # type: ignore[has-type]

    def _progress(self) -> dict[str, Any]:
        """Return the progress that is the same in all workers."""
        names = {field.name for field in fields(self.state)}.difference(_OWN)
        known = {name: getattr(self.state, name) for name in names}
        callbacks = [*self.callback_handler.callbacks, self.control]
        known["stateful_callbacks"] = {
            type(callback).__name__: callback.state()
            for callback in callbacks
            if isinstance(callback, ExportableState)
        }
        return {
            "trainer": json.dumps(known),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.lr_scheduler.state_dict(),
        }

    def _train_on(self, committed: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Continue after the last step that this process committed in an earlier world. The model has kept
        its weights."""
        with tempfile.TemporaryDirectory() as folder:  # the way in which Trainer takes its progress
            Path(folder, _STATE).write_text(committed["trainer"])
            self._keep_global_batch(Path(folder))
            self._kept = committed
            return super().train(folder, *args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self._kept is None:
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._kept is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            self.optimizer.load_state_dict(self._kept["optimizer"])
            self.lr_scheduler.load_state_dict(self._kept["scheduler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._kept is None:
            super()._load_rng_state(checkpoint)
        elif (kept := present()) is not None:
            kept.resume_random()

    # ------------------------------------------------------------ from a checkpoint

    def _newest_on_all_ranks(self) -> Path | None:
        """Return the newest checkpoint that is whole for all ranks. Raises ValueError if some ranks see
        none."""
        output = Path(self.args.output_dir)
        mine = newest_whole_checkpoint(output)
        step = torch.tensor([_step_of(mine) if mine is not None else -1], device=self.args.device)
        steps = self.accelerator.gather(step).tolist()
        if min(steps) < 0 <= max(steps):
            raise ValueError(
                f"rank {steps.index(min(steps))} finds no checkpoint in {output}, and other ranks do: give "
                "output_dir a folder that all nodes share"
            )
        if min(steps) < 0:
            return None
        newest = output / f"{PREFIX_CHECKPOINT_DIR}-{min(steps)}"
        if self.is_world_process_zero():
            _log.info("continues from %s", newest)
        return newest

    def _keep_global_batch(self, checkpoint: Path) -> None:
        """Go on with the samples of a step that the checkpoint was trained with."""
        assert self._elastic is not None
        known = TrainerState.load_from_json(str(checkpoint / _STATE)).stateful_callbacks or {}
        kept = known.get(ElasticCallback.__name__, {}).get("args", {}).get("global_batch")
        if not kept:
            _log.warning(
                "%s was not saved under elasticd: the samples that it was trained with are counted as %d a "
                "step",
                checkpoint,
                self._elastic.global_batch,
            )
        elif kept != self._elastic.global_batch:
            _log.warning(
                "a step keeps the %d samples that %s was trained with, in place of %d",
                kept,
                checkpoint,
                self._elastic.global_batch,
            )
            self._elastic.global_batch = kept


class Trainer(Elastic, transformers.Trainer):  # type: ignore[misc]
    """transformers' Trainer, made elastic."""


class _Loader(DataLoader[Any]):
    """A loader that Trainer tells the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def _ends_epoch(state: TrainerState) -> bool:
    """Whether the step is the last of its epoch."""
    return state.epoch is not None and state.epoch % 1 == 0


def _order_of(loader: Any, args: TrainingArguments) -> Order | None:
    """Return the order of the samples that a trainer asks for; None if it is not known ahead."""
    seed = args.data_seed if args.data_seed is not None else args.seed
    is_stream = isinstance(loader.dataset, IterableDataset)
    return None if is_stream else order_of(loader.dataset, get_sampler(loader), seed)


# ---------------------------------------------------------------- checkpoints


def newest_whole_checkpoint(output: Path) -> Path | None:
    """Return the newest checkpoint in a trainer's ``output_dir`` that is whole. Others are logged."""
    folders = [f for f in output.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if f.is_dir() and _step_of(f) >= 0]
    for folder in sorted(folders, key=_step_of, reverse=True):
        lacks = lacking(folder)
        if not lacks:
            return folder
        _log.warning("skipped %s: %s", folder, lacks)
    return None


def lacking(folder: Path) -> str:
    """Return what a checkpoint lacks to continue from it; empty if it is whole."""
    if (folder / "checkpoint-is-incomplete.txt").exists():
        return "it was not finished"
    try:
        step = json.loads((folder / _STATE).read_text())["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{_STATE} is missing or damaged"
    if step != _step_of(folder):
        return f"{_STATE} is of step {step}"
    for what, names in _NEEDED.items():
        found = [path for name in names for path in folder.glob(name)]
        if not found:
            return f"{what} is missing"
        for path in found:
            if not _is_readable(path):
                return f"{path.name} is damaged"
    return ""


def _is_readable(path: Path) -> bool:
    """Return whether a file is complete: an index is, if all files that it lists are."""
    if path.is_dir():
        return True
    try:
        if path.suffix == ".json":
            return all(_is_readable(path.with_name(name)) for name in {*_files_of(path)})
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                return True
    except (OSError, ValueError, KeyError, SafetensorError):
        return False
    return zipfile.is_zipfile(path)


def _files_of(index: Path) -> list[str]:
    return [*json.loads(index.read_text())["weight_map"].values()]


def _step_of(folder: Path) -> int:
    number = folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(number) if number.isdecimal() else -1
