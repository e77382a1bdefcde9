"""The steps and the epochs of a training, as a script iterates them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from elasticd.data.dealing import Portion
from elasticd.worker.commit.committed import CommittedState
from elasticd.worker.data import Data
from elasticd.worker.gradients.reduction import Reduction
from elasticd.worker.report import report
from elasticd.worker.samples.loading import Fetched, Share
from elasticd.worker.splitting.split_state import SplitState
from elasticd.worker.values.numbers import whole_number
from elasticd.worker.world.group import WorldChanged, gathered, rank, world_size

_log = logging.getLogger(__name__)
LOOKS_DEEP = 3  # after each of this many first commits, all values are checked for late changes
_CHANGED_LATE = (
    "%s was changed between state.commit() and the next step, and the change is lost whenever the world "
    "changes: change it before the commit (for example by scheduler.step())"
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One of the k micro-batches of a step, from ``state.steps(N, accumulate=k)``. ``step``: the step's
    number. ``turn``: the micro-batch's number in the step. After the ``last`` micro-batch, the script calls
    the optimizer's step and commits."""

    step: int
    turn: int
    last: bool


class Step:
    """One step, from ``state.steps()``. Iterate it once for this worker's batches, and call ``backward`` with
    the loss of each.

    ``number``: the number of steps before it. ``samples``: the size of the global batch, which begins at
    ``position`` in its epoch.

    ``turn``: the number of uncommitted steps before it. ``taken``: called with the used samples and losses
    before the last gradient is added up, with the arguments of ``Recorder.took``. ``portions``: returns the
    number of batches that each worker has in the step. ``calls``: returns the number of collectives that the
    script has called, see ``WrappedModels.calls``. ``splits``: the workers of a unit have parts of the model.
    """

    def __init__(
        self,
        number: int,
        turn: int,
        share: Share,
        reduction: Reduction,
        taken: Callable[[int, int, Share, list[tuple[Fetched, torch.Tensor]]], None] | None,
        portions: Callable[[], tuple[int, ...]],
        calls: Callable[[], int],
        *,
        splits: bool = False,
    ) -> None:
        self.number, self._turn = number, turn
        self.batch = share.batch
        self.epoch, self.position, self.samples = share.batch.epoch, share.batch.first, share.batch.samples
        self.done = False
        self._share = share
        self._reduction = reduction
        self._taken = taken
        self._portions = portions
        self._calls, self._called = calls, 0
        self._splits = splits
        self._begun = False
        self._fetched: Fetched | None = None
        self._losses: list[tuple[Fetched, torch.Tensor]] = []

    @property
    def used(self) -> int:
        """The number of this worker's samples in the step."""
        return sum(len(part.samples) for part in self._share.parts if part.counts)

    @property
    def weight(self) -> float:
        """The weight of the present batch's mean loss in the mean over the global batch."""
        return self._present().weight

    def __repr__(self) -> str:
        return f"<step {self.number}: {self.samples} samples from {self.position} of epoch {self.epoch}>"

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            raise RuntimeError(f"the batches of step {self.number} can be iterated only once")
        self._begun = True
        self._reduction.begin(lambda: self._portions().count(0))
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
        """The mean loss over the global batch, the same in all workers; None before all batches are used.
        Always None unless the data is consistent, since only consistent mode adds the losses up."""
        return self._reduction.loss if self.done else None

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients; call this in place of ``loss.backward()``. ``loss``: the mean over the batch's
        samples.

        After the last batch, each worker's gradients are those of the mean over the global batch.
        """
        part = self._present()
        if loss.numel() != 1:
            raise ValueError(
                "step.backward wants one number, the mean over the batch's samples, and was given a tensor "
                f"of shape {tuple(loss.shape)}"
            )
        if self._calls() != self._called and len(set(self._portions())) > 1:
            raise RuntimeError(
                "the model or its loss calls collectives for each batch (SyncBatchNorm, a contrastive loss), "
                f"and not all workers have as many batches in step {self.number}: give Data virtual_ranks "
                "that any world divides (12), and drop_last=True, or remove the collectives"
            )
        self._take(part, loss)
        self._reduction.backward(loss, part)

    def computed(self, loss: torch.Tensor | None = None) -> None:
        """Call this in place of ``backward`` where the script itself has computed the gradients of
        ``step.weight`` times the loss, as the schedule of a pipeline does. ``loss``: the mean over the
        batch's samples, without the weight, in a unit's last worker.

        With ``State(split=...)`` only: otherwise ``backward`` does more.
        """
        if not self._splits:
            raise RuntimeError("step.computed() is for State(split=...): call step.backward(loss)")
        self._take(self._present(), torch.tensor(float("nan"), device="cpu") if loss is None else loss)

    def _present(self) -> Portion:
        """Return the batch that the script has not called ``backward`` for. Raises RuntimeError."""
        if self._fetched is None or self._fetched.part is None:
            raise RuntimeError("step.backward(loss) belongs into `for batch in step`, once for each batch")
        return self._fetched.part

    def _take(self, part: Portion, loss: torch.Tensor) -> None:
        """Note the use of the present batch."""
        assert self._fetched is not None
        if self._taken is not None:
            if part.counts:
                self._losses.append((self._fetched._replace(values=None), loss.detach()))
            if part.last:
                self._note_taken()
        self._fetched = None

    def _note_taken(self) -> None:
        if self._taken is not None:
            self._taken(self.number - self._turn + 1, self._turn, self._share, self._losses)


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
        except GeneratorExit:  # the script has left the loop
            self._was_left = True
            raise
        finally:
            self.under_way = False

    def stop(self) -> None:
        """Let no further epoch follow, even after a restart of the job.

        Rank 0 decides for all. If the epoch has steps left, leave its loop as well, on all ranks.
        """
        self.stops = True


class Peekable(Generic[T]):
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


class StepLoop:
    """Yields the steps and epochs of a State, and keeps track of the uncommitted steps."""

    def __init__(self, committed: CommittedState, data: Data | None) -> None:
        self.committed, self._data = committed, data
        self._looked = 0  # the number of checks for late changes
        self._warned: set[str] = set()
        self._clear()

    def _clear(self) -> None:
        self._begun = 0  # steps yielded since the last commit
        self._used = 0  # this worker's samples of these steps, without the open step
        self._open: Step | None = None
        self._numbered = False  # steps() yields numbers, since there is no data
        self._micro: MicroBatch | None = None
        self._epoch: Epoch | None = None

    def leave(self) -> None:
        """Leave the world, and go back to the last commit."""
        self._clear()
        self.committed.leave()

    # ------------------------------------------------------------ steps

    def steps(self, until: int | None, accumulate: int) -> Iterator[Any]:
        self._begin(accumulate)
        until = None if until is None else whole_number(until, "the number of steps")
        if self._data is not None:
            yield from self._of_data(self._shares(self._data), until)
        elif until is None:
            raise TypeError("state.steps() without a number needs State(..., data=worker.Data(...))")
        else:
            yield from self._of_numbers(until, accumulate)

    def _begin(self, accumulate: int) -> None:
        if whole_number(accumulate, "accumulate") < 1:
            raise ValueError(f"accumulate is {accumulate}: give a number that is 1 or more")
        if accumulate != 1 and self._data is not None:
            raise TypeError("Data cuts the batches of a step: give accumulate= to Data instead")
        self._begun = self._used = 0

    @property
    def _number(self) -> int:
        """The number of the next step."""
        return self.committed.step + self._begun

    def _shares(self, data: Data) -> Peekable[Share]:
        """Return this worker's shares. With an iterable dataset, all workers first compare the samples that
        they have read."""

        def compared() -> Iterator[Share]:
            shares = data.shares(rank(), world_size())
            first = next(shares, None)
            if data.is_stream:
                data.check_read([read for (read,) in gathered([data.read], self.committed.world)])
            if first is not None:
                yield first
                yield from shares

        return Peekable(compared())

    def _of_data(
        self, shares: Peekable[Share], until: int | None, epoch: int | None = None
    ) -> Iterator[Step]:
        """Yield steps until ``until`` steps are made, or to the end of the given epoch."""
        committed, data = self.committed, self._data
        assert data is not None
        while until is None or self._number < until:
            self._check_world()
            share = shares.next
            if share is None or (epoch is not None and share.batch.epoch != epoch):
                return
            shares.take()
            if self._begun and self._open is not None:  # the step before is not committed yet
                self._used += self._open.used
            taken = committed.recorder.took if committed.recorder is not None else None
            portions = partial(data.portions, share.batch, world_size())
            calls, number = committed.models.calls, self._number
            reduction, splits = committed.reduction, isinstance(committed.shards, SplitState)
            self._open = Step(number, self._begun, share, reduction, taken, portions, calls, splits=splits)
            committed.place = share.batch.epoch, share.batch.first
            self._begun += 1
            yield self._open
            self._close_step()
            self._warn_of_late_changes()

    def _of_numbers(self, until: int, accumulate: int) -> Iterator[Any]:
        """Yield the steps' numbers; with ``accumulate`` above 1, a MicroBatch for each."""
        self._numbered = True
        try:
            while self._number < until:
                self._check_world()
                number = self._number
                self._begun += 1
                if accumulate == 1:
                    yield number
                else:
                    yield from self._micros(number, accumulate)
                self._warn_of_late_changes()
        finally:
            self._numbered, self._micro = False, None

    def _micros(self, number: int, accumulate: int) -> Iterator[MicroBatch]:
        for turn in range(accumulate):
            self._micro = micro = MicroBatch(number, turn, last=turn == accumulate - 1)
            with contextlib.nullcontext() if micro.last else self.committed.models.without_sums():
                yield micro

    def _close_step(self) -> None:
        if self._open is not None and not self._open.done:
            raise RuntimeError(
                f"the batches of step {self._open.number} were not all used: go through them, as in "
                "`for batch in step`, before state.commit() and the next step"
            )

    def _check_world(self) -> None:
        """Raise WorldChanged if no further step is possible in this world, even if the script has swallowed
        the error of the last step."""
        world = self.committed.world
        if world is not None:
            world.check()
            if self._begun and world.sums != world.sums_begun:
                raise WorldChanged

    # ------------------------------------------------------------ epochs

    def epochs(self, until: int | None, steps: int | None, accumulate: int) -> Iterator[Epoch]:
        self._begin(accumulate)
        until = None if until is None else whole_number(until, "the number of epochs")
        data, progress = self._data, self.committed.progress
        if steps is None:
            if data is None:
                raise TypeError("state.epochs() needs steps=, or State(..., data=worker.Data(...))")
            if until is not None and data.epochs is not None and until > data.epochs:
                raise ValueError(
                    f"state.epochs({until}) asks for more epochs than Data has: give Data epochs={until}"
                )
        elif whole_number(steps, "steps") < 1:
            raise ValueError(f"steps is {steps}: give a number that is 1 or more")
        if progress.began is None and data is not None and steps is None:
            progress.ended = max(progress.ended, data.committed[0])
        shares = self._shares(data) if data is not None else None
        epoch = None
        try:
            while not progress.stopped and (until is None or progress.ended < until):
                self._check_world()
                if (
                    shares is not None
                    and shares.next is None
                    and progress.began in (None, self.committed.step)
                ):
                    return  # the data has ended
                if progress.began is None:
                    progress.began = self.committed.step
                if steps is None and shares is not None and shares.next is not None:
                    self._refuse_other_epochs(shares.next.batch.epoch)
                last = None if steps is None else progress.began + steps
                self._epoch = epoch = Epoch(progress.ended, self._of_epoch(shares, last, accumulate))
                yield epoch
                self._end_epoch(epoch)
        finally:
            if self._epoch is epoch:
                self._epoch = None

    def _refuse_other_epochs(self, epoch: int) -> None:
        """Raise ValueError if the data is in an epoch that counts as over, so that the epoch would have no
        steps. This happens after epochs that were cut short by ``steps=``."""
        if epoch < (ended := self.committed.progress.ended):
            raise ValueError(
                f"{ended} epochs are over, and the data is in its epoch {epoch}: give state.epochs() the "
                "same steps= as for those epochs"
            )

    def _of_epoch(self, shares: Peekable[Share] | None, until: int | None, accumulate: int) -> Iterator[Any]:
        """Yield the steps of the present epoch, until ``until`` steps or to the end of the data's epoch."""
        if shares is not None:
            yield from self._of_data(shares, until, self.committed.progress.ended if until is None else None)
        elif until is not None:
            yield from self._of_numbers(until, accumulate)
        if self._begun:  # commit, so that the work after the steps can be repeated without the steps
            self.commit()

    def _end_epoch(self, epoch: Epoch) -> None:
        """Commit the work after an epoch's steps. Raises WorldChanged."""
        if not epoch.over and not epoch.stops:
            raise RuntimeError(
                f"epoch {epoch.number} was left before its end: iterate over all its steps, or call "
                "epoch.stop() before leaving the loop"
            )
        if self._begun and self.committed.uncommitted.stepped:  # the script left the epoch after a step
            self.commit()
        self._check_world()
        self.committed.commit_epoch(over=epoch.over, stops=epoch.stops)

    # ------------------------------------------------------------ commits

    def commit(self, **values: Any) -> None:
        self._close_step()
        if self._micro is not None and not self._micro.last:
            raise RuntimeError(
                f"state.commit() was called before the last micro-batch of step {self._micro.step}, so "
                "gradients would be lost if the world changed: step the optimizer, and commit, if micro.last"
            )
        if self._numbered and not self._begun:
            raise RuntimeError(
                f"state.commit() was called a second time in step {self._number - 1}: commit once in each "
                "step, or in every k-th step, at its end"
            )
        if values:
            report(**values)
        if self._epoch is not None and not self._epoch.under_way and not self._begun:
            self._warn_once(
                "state.commit() outside of the steps of epoch %d commits nothing: work after its steps is "
                "committed when the script asks for the next epoch",
                self._epoch.number,
            )
            return
        covers, used, batch = self._begun, self._used, None
        if self._open is not None:
            used, batch = used + self._open.used, self._open.batch
        self._open = None
        self._begun = self._used = 0
        self.committed.commit(covers=covers, samples=used, batch=batch)

    def finish(self) -> None:
        """Commit and save the last steps, after the run functions of all workers have returned. Raises
        WorldChanged."""
        if self.committed.uncommitted.stepped and (self._open is None or self._open.done):
            self._warn_once(
                "what the script did after committed step %d is committed at the end of the training: call "
                "state.commit() after the last step, too",
                self.committed.step,
            )
            self.commit()
        self.committed.finish()

    def _warn_of_late_changes(self) -> None:
        """Warn once if the script has changed a value between the commit and the next step.

        Simple values are checked each time. Everything else is checked in the first steps, and then more and
        more rarely.
        """
        if self._begun or _CHANGED_LATE in self._warned or rank() != 0:
            return
        self._looked += 1
        deep = self._looked <= LOOKS_DEEP or self._looked.bit_count() == 1
        if changed := self.committed.last.changed(deep=deep):
            self._warn_once(_CHANGED_LATE, changed)

    def _warn_once(self, sentence: str, about: object) -> None:
        if sentence not in self._warned and rank() == 0:
            _log.warning(sentence, about)
        self._warned.add(sentence)
