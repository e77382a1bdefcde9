"""Keep the processes of a training with another library's loop when the world changes."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from torch import nn

from elasticd import worker
from elasticd.worker.values import randomness
from elasticd.worker.world.group import WorldChanged

P = ParamSpec("P")
T = TypeVar("T")


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
    """The training that this process keeps, in its present world.

    ``state``: keeps the training. ``modules``: what the training continues from.
    """

    def __init__(self, state: worker.State, progress: LoopProgress, modules: Iterable[nn.Module]) -> None:
        self._state, self._progress = state, progress
        self._parameters = {id(parameter) for module in modules for parameter in module.parameters()}
        self._random = randomness.note()

    def commit(self, save: Callable[[], object]) -> None:
        """Commit a step. All ranks call it. Raises WorldChanged if the world ends with this step.

        ``save``: saves a checkpoint; called if the job ends with this step, so that no worker stays.
        """
        try:
            self._state.commit()
        except WorldChanged:
            world = self._state._loop.committed.world
            if world is not None and world.nobody_stays():
                save()
            raise

    def commit_epoch(self) -> None:
        """Commit work that is no step, and counts as the end of an epoch. All ranks call it."""
        self._state._loop.committed.commit_epoch(over=True, stops=False)

    @property
    def committed(self) -> dict[str, Any]:
        """The progress as of the last commit; empty before the first."""
        return self._progress.committed

    def begin(self, read: Callable[[], dict[str, Any]], trained: Iterable[nn.Parameter]) -> dict[str, Any]:
        """Have each commit keep the progress that ``read`` returns. Return the progress as of the last
        commit; empty before the first. Random numbers go on from that commit: the libraries seed them anew.

        ``trained``: the parameters that the loop trains. Raises ValueError if some of them are not kept.
        """
        if any(id(parameter) not in self._parameters for parameter in trained if parameter.requires_grad):
            raise ValueError(
                "the training changes parameters that in_place does not keep: make the whole model before "
                "the decorated function, give it as in_place(model=model), and train that model"
            )
        self._progress.read = read
        self.resume_random()
        return self.committed

    def resume_random(self) -> None:
        """Go on with the random numbers as of the last commit, if this world did not begin the training."""
        if self.committed:
            randomness.resume(self._random)


_present: list[Present] = []


def present() -> Present | None:
    """Return the training that this process keeps; None if its function is not decorated with
    ``in_place``."""
    return _present[-1] if _present else None


def keep_process(
    prepare: Callable[[Iterable[nn.Module]], None], *, undo: bool | None, kept: dict[str, Any]
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator for the function that trains, which is called again in each world.

    ``prepare``: has the library forget the last world; called with the kept modules before the function.
    ``undo``, ``kept``: see ``worker.State``. Without an optimizer in ``kept``, parameters are copied after
    each step.
    """
    modules = [module for module in kept.values() if isinstance(module, nn.Module)]

    def decorate(train: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(train)
        def entered(*args: P.args, **kwargs: P.kwargs) -> T:
            progress = LoopProgress()
            undoes = undo if "optimizer" in kept else True
            state = worker.State(wrap=None, undo=undoes, progress=progress, **kept)

            @worker.run
            def train_in_world(state: worker.State) -> T:
                gc.collect()  # else the last world's DistributedDataParallel would add up gradients, too
                prepare(modules)
                _present.append(Present(state, progress, modules))
                try:
                    return train(*args, **kwargs)
                finally:
                    progress.read = None
                    _present.pop()

            return train_in_world(state)

        return entered

    return decorate
