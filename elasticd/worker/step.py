"""One step of a training with data: this worker's share of one global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from elasticd.worker.gradients.reduction import Reduction
from elasticd.worker.samples.loading import Fetched, Share


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
    workers have more batches in the step than others. ``calls``: the number of collectives that this worker
    has called, without DistributedDataParallel's own before a forward pass.
    """

    def __init__(
        self,
        number: int,
        turn: int,
        share: Share,
        reduction: Reduction,
        taken: Callable[[int, int, Share, list[tuple[Fetched, torch.Tensor]]], None] | None = None,
        uneven: Callable[[], bool] = lambda: False,
        calls: Callable[[], int] = lambda: 0,
    ) -> None:
        self.number, self._turn = number, turn
        self.batch = share.batch
        self.epoch, self.position, self.samples = share.batch.epoch, share.batch.first, share.batch.samples
        self.done = False
        self._share = share
        self._reduction = reduction
        self._taken = taken
        self._uneven, self._calls, self._called = uneven, calls, 0
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
