"""The steps and the epochs of a training, as a script iterates them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from elasticd.worker.gradients.reduction import Reduction
from elasticd.worker.samples.loading import Fetched, Share

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Micro:
    """One of the k micro-batches of a step, from ``state.steps(N, accumulate=k)``. ``step``: the step's
    number. ``turn``: the number of the micro-batch. After the ``last`` one the optimizer steps and the script
    commits."""

    step: int
    turn: int
    last: bool


class Step:
    """One step, from ``state.steps()``. Iterate it once for this worker's batches, and call ``backward`` with
    the loss of each.

    ``number``: the number of steps before it. ``samples``: the size of the global batch, which begins at
    ``position`` in its epoch.

    ``turn``: the number of uncommitted steps before it. ``taken``: called with the used samples and losses
    before the last gradient is added up; the arguments are ``Recorder.took``'s. ``uneven``: whether some
    workers have more batches in the step than others. ``left_out``: how many have none. ``calls``: the
    number of collectives that this worker has called, without DistributedDataParallel's own before a forward
    pass.
    """

    def __init__(
        self,
        number: int,
        turn: int,
        share: Share,
        reduction: Reduction,
        taken: Callable[[int, int, Share, list[tuple[Fetched, torch.Tensor]]], None] | None = None,
        uneven: Callable[[], bool] = lambda: False,
        left_out: Callable[[], int] = lambda: 0,
        calls: Callable[[], int] = lambda: 0,
    ) -> None:
        self.number, self._turn = number, turn
        self.batch = share.batch
        self.epoch, self.position, self.samples = share.batch.epoch, share.batch.first, share.batch.samples
        self.done = False
        self._share = share
        self._reduction = reduction
        self._taken = taken
        self._uneven, self._left_out = uneven, left_out
        self._calls, self._called = calls, 0
        self._begun = False
        self._fetched: Fetched | None = None
        self._lost: list[tuple[Fetched, torch.Tensor]] = []

    @property
    def used(self) -> int:
        """The number of this worker's samples in the step."""
        return sum(len(part.samples) for part in self._share.parts)

    def __repr__(self) -> str:
        return f"<step {self.number}: {self.samples} samples from {self.position} of epoch {self.epoch}>"

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            raise RuntimeError(f"the batches of step {self.number} can be gone through once only")
        self._begun = True
        self._reduction.begin(self._left_out)
        for fetched in self._share.fetch():
            part = fetched.part
            assert part is not None
            self._fetched = fetched
            with self._reduction.part(part):
                self._called = self._calls()
                yield fetched.values
                if self._fetched is not None:
                    raise RuntimeError(
                        f"step.backward(loss) was not called for a batch of step {self.number}: call it for "
                        "each"
                    )
        if not self._share.parts:
            self._note_taken()
        self._reduction.finish(self._share.parts)
        self.done = True

    @property
    def loss(self) -> torch.Tensor | None:
        """The mean loss over the global batch, the same in all workers, once the batches are used up. None
        unless the data is consistent: otherwise it is not summed."""
        return self._reduction.loss if self.done else None

    def backward(self, loss: torch.Tensor) -> None:
        """Call it in place of ``loss.backward()``. ``loss``: the mean over the batch's samples.

        After the last batch, each worker's gradients are those of the mean over the global batch.
        """
        fetched = self._fetched
        if fetched is None:
            raise RuntimeError("step.backward(loss) belongs into `for batch in step`, once for each batch")
        if loss.numel() != 1:
            raise ValueError(
                "step.backward wants one number, the mean over the batch's samples, and was given a tensor "
                f"of shape {tuple(loss.shape)}"
            )
        assert fetched.part is not None
        if self._calls() != self._called and self._uneven():
            raise RuntimeError(
                "the model or its loss talks to the other workers for each batch (SyncBatchNorm, a "
                f"contrastive loss), and not all of them have as many in step {self.number}: give Data "
                "virtual_ranks that any world divides (12), and drop_last=True, or leave out what talks"
            )
        self._fetched = None
        if self._taken is not None:
            self._lost.append((fetched._replace(values=None), loss.detach()))
            if fetched.part.last:
                self._note_taken()
        self._reduction.backward(loss, fetched.part)

    def _note_taken(self) -> None:
        if self._taken is not None:
            self._taken(self.number - self._turn + 1, self._turn, self._share, self._lost)


class Epoch:
    """One epoch, from ``state.epochs()``.

    Iterate it for its remaining steps, in the form that ``state.steps()`` yields. Work after the steps, until
    the script asks for the next epoch, belongs to the epoch as well. ``number``: counts from 0. ``over``: all
    its steps are made. ``under_way``: the script iterates its steps.
    """

    def __init__(self, number: int, steps: Iterator[Any]) -> None:
        self.number = number
        self.over = self.under_way = self.stops = False
        self._steps = steps
        self._was_left = False

    def __repr__(self) -> str:
        return f"<epoch {self.number}>"

    def __iter__(self) -> Iterator[Any]:
        self.under_way = True
        try:
            yield from self._steps
            self.over = not self._was_left
        except GeneratorExit:  # its steps cannot be gone on with
            self._was_left = True
            raise
        finally:
            self.under_way = False

    def stop(self) -> None:
        """Let no further epoch follow, even after a restart of the job.

        Rank 0 decides for all. If the epoch has steps left, leave its loop as well, on all ranks.
        """
        self.stops = True


class EpochProgress:
    """The progress of a training's epochs. ``ended``: the number of complete epochs, with the work after
    their steps. ``began``: the step after which the present epoch began, if any. ``stopped``: no epoch
    follows."""

    def __init__(self) -> None:
        self.ended = 0
        self.began: int | None = None
        self.stopped = False

    @property
    def marks(self) -> int:
        """The number of commits without a step."""
        return self.ended + self.stopped

    def state_dict(self) -> dict[str, Any]:
        return {"at": (self.ended, self.began, self.stopped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ended, self.began, self.stopped = state["at"]


class Ahead(Generic[T]):
    """An iterator whose next item can be looked at before it is taken."""

    def __init__(self, iterator: Iterator[T]) -> None:
        self._iterator = iterator
        self._looked = False
        self._next: T | None = None

    @property
    def next(self) -> T | None:
        """The next item; None at the end."""
        if not self._looked:
            self._next, self._looked = next(self._iterator, None), True
        return self._next

    def take(self) -> None:
        self._next, self._looked = None, self.next is None
