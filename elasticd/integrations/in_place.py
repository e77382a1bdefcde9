"""Keep the processes of a training with Accelerate, or a library on top of it, when the world changes."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import extract_model_from_parallel
from torch import nn

from elasticd import worker

P = ParamSpec("P")
T = TypeVar("T")
_SHARDING: Final = ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin")


class LoopProgress:
    """What a State keeps of a loop that is not the script's own.

    ``read``: returns the progress to commit, as plain data and tensors; None outside of the loop.
    ``committed``: the progress as of the last commit; empty before the first.
    """

    def __init__(self) -> None:
        self.read: Callable[[], dict[str, Any]] | None = None
        self.committed: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        if self.read is not None:
            self.committed = self.read()
        return self.committed

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read, self.committed = None, state


class Present:
    """The training that this process keeps, in its present world. ``commit``: commits a step.
    ``commit_epoch``: commits work that is no step, and counts as the end of an epoch. All ranks call it."""

    def __init__(
        self, commit: Callable[[], None], commit_epoch: Callable[[], None], progress: LoopProgress
    ) -> None:
        self.commit, self.commit_epoch = commit, commit_epoch
        self._progress = progress

    def begin(self, accelerator: Accelerator, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Have each commit keep the progress that ``read`` returns. Return the progress as of the last
        commit; empty before the first. Raises ValueError for a sharded model."""
        if any(getattr(accelerator.state, plugin, None) is not None for plugin in _SHARDING):
            raise ValueError(
                "in_place keeps models that each worker holds as a whole: leave it out with FSDP and "
                "DeepSpeed"
            )
        self._progress.read = read
        return self._progress.committed


_present: list[Present] = []


def present() -> Present | None:
    """Return the training that this process keeps; None if its function is not decorated with
    ``in_place``."""
    return _present[-1] if _present else None


def in_place(*, undo: bool | None = None, **kept: Any) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate the function that trains. Workers keep their process when others die, join or leave: the
    function is called again in each world, and continues after the last step that was made.

    ``kept``: what the training continues from, made before: ``in_place(model=model)``; with a loop of your
    own also the optimizer and the scheduler. See ``worker.State``. Make everything else in the function:
    TrainingArguments, Trainer, Accelerator, the result of ``prepare``.

    ``undo``: see ``worker.State``. Without an optimizer in ``kept``, parameters are copied after each step.
    """

    def decorate(train: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(train)
        def entered(*args: P.args, **kwargs: P.kwargs) -> T:
            progress = LoopProgress()
            undoes = undo if "optimizer" in kept else True
            state = worker.State(wrap=None, undo=undoes, progress=progress, **kept)

            @worker.run
            def train_in_world(state: worker.State) -> T:
                gc.collect()  # else the last world's DistributedDataParallel would add up gradients, too
                # Accelerate has no public function for this; its own tests use these.
                AcceleratorState._reset_state(reset_partial_state=True)
                GradientState._reset_state()
                for module in kept.values():
                    if isinstance(module, nn.Module):  # else `prepare` would wrap its forward once more
                        extract_model_from_parallel(module, keep_fp32_wrapper=False)
                commit_epoch = partial(state._loop.committed.commit_epoch, over=True, stops=False)
                _present.append(Present(state.commit, commit_epoch, progress))
                try:
                    return train(*args, **kwargs)
                finally:
                    progress.read = None
                    _present.pop()

            return train_in_world(state)

        return entered

    return decorate
