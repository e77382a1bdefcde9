"""The state of a training: committed step by step, and rolled back when a step is abandoned."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from elasticd.channel.worker_messages import Holds
from elasticd.core.age import Age
from elasticd.core.page_layout import Fatal, Use
from elasticd.worker.agent import agentpage
from elasticd.worker.commit import divergence, randomness
from elasticd.worker.commit.changes import Trace
from elasticd.worker.commit.checkpointing import Lasting, Parts
from elasticd.worker.commit.copies import LastCommit, Undo
from elasticd.worker.commit.divergence import Alike
from elasticd.worker.commit.plaindata import copied, require_sendable, unchanged, with_tensors
from elasticd.worker.commit.shared import Local, Shared
from elasticd.worker.data import Data, DataChanged
from elasticd.worker.gradients.consistent import Arithmetic, Consistent, refuse_inconsistent
from elasticd.worker.gradients.rates import Following
from elasticd.worker.gradients.reduction import Averaged, Reduction
from elasticd.worker.gradients.wrapping import (
    SHARDED,
    Calls,
    Silence,
    Wrap,
    Wrapped,
    data_parallel,
    is_flattened,
    to_wrap,
)
from elasticd.worker.report import all_finite, not_finite, policy, report
from elasticd.worker.samples.auditing import Recorder, recorder
from elasticd.worker.samples.loading import Share
from elasticd.worker.steps import Ahead, Epoch, EpochProgress, Micro, Step
from elasticd.worker.world.group import World, WorldChanged, rank, world_size

if TYPE_CHECKING:
    from elasticd.worker.checkpoints import Checkpoints

_log = logging.getLogger(__name__)
LOOKS_DEEP = 3
LOOKS_INTO = 3  # commits after which elements of parameters are compared: versions miss some changes
CHECKPOINTS = "ELASTICD_CHECKPOINTS"  # the folder of checkpoints, unless the script names one


class State:
    """A model, its optimizer, and everything else that the training continues from.

    * model: the module itself, not wrapped. Call ``state.model``: it is wrapped for the present world by
      ``wrap`` (None: not wrapped; the script then adds up gradients itself).
    * checkpoints: a ``Checkpoints`` or a folder, by default that of ``elasticd run --checkpoints``. Commits
      are saved there when a save is due, at the first commit of a world of survivors, when all workers leave,
      and at the end. If no worker has the newest state any more, it comes from this node's memory, from
      another node's, or from the newest checkpoint.
    * restore: called as ``restore(state)`` on one worker when there is no state anywhere, as at the start. It
      may load something into the objects, and returns the step of what it loaded, or None.
    * data: the data to train with; ``steps`` then yields this worker's share of it.
    * undo: copy parameters and optimizers' state at each commit as well, so that every step can be undone
      (see below).
    * compare: compare the workers' parameters, and whatever else must be the same, now and then. A difference
      ends the job. Parameters that DistributedDataParallel ignores are not compared.
    * others, by name: modules and optimizers (a module that an optimizer trains is wrapped like the model,
      and called by its name: ``state.head``); objects with ``state_dict`` and ``load_state_dict``, such as a
      scheduler; a ``torch.Generator``; and plain data (numbers, strings, tensors, containers of them), which
      is read and set as an attribute: ``State(..., epoch=0)``, ``state.epoch += 1``.

    All of this is the same in all workers: a new worker takes over the others' values. A value that is each
    worker's own is given as ``worker.Local(value)``.

    Parameters and optimizers' state are not copied by default. If a step is abandoned after an optimizer has
    begun to change them, the worker takes the state of another worker that has it whole, if there is one.
    Some scripts change parameters before the last sum of a step over the workers: with two optimizers, with
    an optimizer that evaluates the model several times, or directly. Once such a change is seen, what it
    changes is copied at each commit from then on; ``undo=False`` prevents that. Everything else, including
    random numbers and buffers, is copied at each commit and restored when a step is abandoned.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        data: Data | None = None,
        wrap: Wrap | None = data_parallel,
        restore: Callable[[State], int | None] | None = None,
        checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
        undo: bool | None = None,
        compare: bool = True,
        **others: Any,
    ) -> None:
        agentpage.uses(Use.STATE)
        self._plain: dict[str, Any] = {}
        self._own: set[str] = set()  # the names of values that are this worker's own
        self._modules: dict[str, nn.Module] = {}
        self._optimizers: dict[str, Optimizer] = {}
        self._stateful: dict[str, Any] = {}
        self._step = 0
        self._agreed = 0
        self._torn = False
        self._world: World | None = None
        self._gpus: set[torch.device] = set()
        self._wrap = wrap
        self._wraps: dict[str, Any] = {}  # wrapped modules
        self._silence = Silence()
        self._as_wrapped: dict[str, Wrapped] = {}
        self._stepped: set[str] = set()  # the optimizers that have begun a step since the last commit
        self._carried: tuple[torch.Tensor, torch.Tensor] | None = None  # see _unused_gradient
        self._commits = 0  # commits of this process
        self._restore = restore
        self._lasting = _lasting(checkpoints or os.environ.get(CHECKPOINTS))
        self._seeds: dict[str, int] = {}
        self._data = data
        self._reduction: Reduction = Averaged({})
        self._open: Step | None = None
        self._calls = Calls(())
        self._begun = 0  # steps yielded by steps() since the last commit
        self._numbers_only = False  # steps() is running, without data
        self._micro: Micro | None = None
        self._epoch: Epoch | None = None  # the epoch that epochs() has yielded
        self._progress = EpochProgress()
        self._said_needless = self._said_between = False
        self._calls_before = 0  # the number of collectives when an optimizer last began a step
        self._looked = 0  # how often changes after a commit were looked for
        self._said_late = False
        self._used = 0  # samples of finished, uncommitted steps
        self._evaluated = 0  # forward passes without gradients since the last commit
        self._tried: list[int] = []  # for each optimizer, the number of parameters whose state was checked
        self._recorder: Recorder | None = None
        given = {"model": model, "optimizer": optimizer, "data": data}
        for name, value in {**given, **others}.items():
            if value is not None or name in others:
                self._take_in(name, value)
        self._stateful["_epochs"] = self._progress
        self._refuse_what_is_left_out()
        trained = {id(p) for o in self._optimizers.values() for p in _parameters(o)}
        self._to_wrap = to_wrap(self._modules, trained) if wrap is not None else []
        if data is not None and data.consistent:
            self._make_consistent()
        self._following = Following(self._optimizers.values()) if data is not None and data.grows else None
        self._committed = LastCommit(self._plain, self._modules, self._optimizers, self._stateful)
        parameters = {id(p): p for module in self._modules.values() for p in module.parameters()}
        self._trace = Trace([*parameters.values()])
        numbers = {id(p): n for n, p in enumerate(self._trace.parameters)}
        self._owned = {
            name: {numbers[id(p)] for p in _parameters(o) if id(p) in numbers}
            for name, o in self._optimizers.items()
        }
        owned = set().union(*self._owned.values())
        self._followers = [
            {numbers[id(p)] for p in module.parameters()} - owned for module in self._modules.values()
        ]
        self._undoes = undo
        self._undo = Undo(self._trace.parameters, self._optimizers)
        if undo:
            self._undo.want(range(len(numbers)), self._optimizers)
        self._trained = divergence.trained_of(self._modules, trained) if compare and trained else None
        self._alike: Alike | None = None
        self._compares = compare
        self._shared = Shared(self._plain, self._stateful, self._optimizers, self._own)

    def _take_in(self, name: str, value: Any) -> None:
        if name.startswith("_") or (hasattr(State, name) and name not in ("model", "optimizer")):
            raise TypeError(
                f"State cannot keep something under the name {name!r}: it has a meaning of its own"
            )
        if isinstance(value, Local):
            self._own.add(name)
            value = value.value
            if isinstance(value, nn.Module | Optimizer | Data):
                raise TypeError(
                    f"State keeps {name}, a {type(value).__name__}, alike in all workers: worker.Local is "
                    "for plain data, generators, and other objects with state_dict()"
                )
        if isinstance(value, DistributedDataParallel):
            raise TypeError(
                "State wraps the model itself, for each world anew: give it the module, not its DDP"
            )
        if isinstance(value, nn.Module):
            if any(hasattr(p, "device_mesh") for p in value.parameters()) or is_flattened(value):
                raise TypeError(f"State cannot keep {name}, as {SHARDED}")
            self._modules[name] = value
        elif isinstance(value, Optimizer):
            self._optimizers[name] = value
            value.register_step_pre_hook(self._before_step)
        elif isinstance(value, torch.Generator):
            self._stateful[name] = randomness.Drawn(value)
        elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            self._stateful[name] = value
        else:
            copied(value, f"State's {name}")
            self._plain[name] = value

    def _refuse_what_is_left_out(self) -> None:
        kept = {p for module in self._modules.values() for p in module.parameters()}
        for name, optimizer in self._optimizers.items():
            if any(p not in kept for p in _parameters(optimizer)):
                raise TypeError(
                    f"{name} changes parameters of no module that State was given, so one that comes later "
                    "would not have them: give State that module as well, by a name of its own"
                )

    def _make_consistent(self) -> None:
        if self._wrap is not data_parallel:
            raise TypeError(
                "consistent mode adds gradients up itself, and calls the model as it is: leave out wrap=, or "
                "give Data consistent=False"
            )
        if "model" not in self._modules:
            raise TypeError("consistent data needs a model to be consistent with: give State model=")
        refuse_inconsistent(self._modules.values())
        self._wrap = None
        self._to_wrap = []
        self._stateful["_arithmetic"] = Arithmetic(next(self._modules["model"].parameters()).device)

    def _place(self) -> tuple[int, int]:
        """The position of the present step in the data."""
        assert self._open is not None
        return self._open.epoch, self._open.position

    # ------------------------------------------------------------ what scripts use

    @property
    def step(self) -> int:
        """The number of committed steps: the steps that ``steps`` has yielded, even if one commit covers
        several. Without ``steps``, each commit is one step."""
        return self._step

    @property
    def model(self) -> Any:
        """The model as wrapped for the present world."""
        return self._called("model") if "model" in self._modules else None

    def _called(self, name: str) -> Any:
        """Return a module as wrapped for the present world and its trainable parameters."""
        self._wrap_anew(name)
        if name not in self._wraps:
            self._see_swapped()
            return self._modules[name]
        return self._wraps[name]

    def _wrap_anew(self, name: str) -> None:
        """Wrap a module again if its trainable parameters have changed since it was wrapped."""
        if name in self._as_wrapped and not self._as_wrapped[name].as_it_was:
            if name in self._wraps:
                Averaged({name: self._wraps.pop(name)}).close()
            self._wrap_for(name)
            self._calls.leave_out(self._wraps.get(name))
            self._silence.take_in(self._wraps.get(name))

    def _wrap_all_anew(self) -> None:
        for name in self._to_wrap:
            self._wrap_anew(name)

    def _wrap_for(self, name: str) -> None:
        """Wrap a module, unless it is frozen and has no gradients to add up."""
        assert self._wrap is not None
        self._as_wrapped[name] = Wrapped(self._modules[name])
        if self._as_wrapped[name].is_frozen:
            return
        self._wraps[name] = self._as_wrapped[name].wrapped_in(
            self._wrap, self._world, sums_per_step=self._data is not None
        )
        if isinstance(self._wraps[name], nn.Module):  # not a method: a deep copy of the module would copy it
            self._wraps[name].register_forward_pre_hook(lambda *_: self._before_forward(name))

    def _before_forward(self, name: str) -> None:
        self._see_swapped()
        if isinstance(self._reduction, Averaged):
            self._reduction.calls(name)

    def steps(self, until: int | None = None, *, accumulate: int = 1) -> Iterator[Any]:
        """Yield the remaining steps, from the last committed one, until ``until`` steps are made.

        With ``data``, yield a Step for each, to the end of the data's epochs. Without, yield the steps'
        numbers. With ``accumulate``, yield that many ``Micro`` for each step: DistributedDataParallel adds
        gradients up in the last one only.

        A commit covers all steps yielded since the last one. A step that is not committed comes again in the
        next world, and when ``steps`` is called again.
        """
        self._begun = self._used = 0
        self._check_accumulate(accumulate)
        if self._data is not None:
            yield from self._of_data(self._shares(self._data), until)
        elif until is None:
            raise TypeError("state.steps() without a number needs State(..., data=worker.Data(...))")
        else:
            yield from self._of_numbers(until, accumulate)

    def epochs(
        self, until: int | None = None, *, steps: int | None = None, accumulate: int = 1
    ) -> Iterator[Epoch]:
        """Yield the remaining epochs, from the one under way, until ``until`` epochs are made. Iterate each
        for its steps.

        With ``data``, an epoch is the data's, or ``steps`` steps. Without, an epoch is ``steps`` steps, whose
        numbers (or ``Micro``) are yielded as by ``steps``.

        Work after an epoch's steps (an evaluation, a scheduler, ``epoch.stop()``) is committed when the
        script asks for the next epoch. If the world changes before that, the work comes again.
        """
        self._begun = self._used = 0
        self._check_accumulate(accumulate)
        data, progress = self._data, self._progress
        if steps is None:
            if data is None:
                raise TypeError("state.epochs() needs steps=, or State(..., data=worker.Data(...))")
            if until is not None and data.epochs is not None and until > data.epochs:
                raise ValueError(
                    f"state.epochs({until}) asks for more epochs than Data has: give Data epochs={until}"
                )
        elif steps < 1:
            raise ValueError(f"steps is {steps}: give a number that is 1 or more")
        if progress.began is None and data is not None and steps is None:
            progress.ended = max(progress.ended, data.committed[0])
        shares = self._shares(data) if data is not None else None
        epoch = None
        try:
            while not progress.stopped and (until is None or progress.ended < until):
                self._check_world()
                if shares is not None and shares.next is None and progress.began in (None, self._step):
                    return  # the data has ended
                if progress.began is None:
                    progress.began = self._step
                self._refuse_other_epochs(shares, steps)
                last = None if steps is None else progress.began + steps
                self._epoch = epoch = Epoch(progress.ended, self._of_epoch(shares, last, accumulate))
                yield epoch
                self._end_epoch(epoch)
        finally:
            if self._epoch is epoch:
                self._epoch = None

    def _refuse_other_epochs(self, shares: Ahead[Share] | None, steps: int | None) -> None:
        """Raise ValueError where the epochs of the data come after more epochs of so many steps: none of them
        would have a step."""
        if steps is None and shares is not None and shares.next is not None:
            epoch, ended = shares.next.batch.epoch, self._progress.ended
            if epoch < ended:
                raise ValueError(
                    f"{ended} epochs are over, and the data is in its epoch {epoch}: give state.epochs() the "
                    "steps= that those were of"
                )

    def _of_epoch(self, shares: Ahead[Share] | None, until: int | None, accumulate: int) -> Iterator[Any]:
        """Yield the steps of the present epoch, until ``until`` steps or to the end of the data's epoch."""
        if shares is not None:
            yield from self._of_data(shares, until, self._progress.ended if until is None else None)
        elif until is not None:
            yield from self._of_numbers(until, accumulate)
        if self._begun:  # so that the work after the steps can be repeated without them
            self.commit()

    def _end_epoch(self, epoch: Epoch) -> None:
        """Commit the work after an epoch's steps, on all workers together. Raises WorldChanged."""
        if not epoch.over and not epoch.stops:
            raise RuntimeError(
                f"epoch {epoch.number} was left before its end: go through all that `for step in epoch` "
                "gives, or call epoch.stop() before leaving that loop for good"
            )
        if self._begun and self._stepped:  # the script left the epoch after an optimizer's step
            self.commit()
        world, progress = self._world, self._progress
        self._check_world()
        heard = self._heard([int(epoch.stops), self._shared.digest() if self._compares else 0])
        if len({shared for _, shared in heard}) > 1:
            self._shared.compare(world, range(len(heard)), exact=self._exact)
        if epoch.over:
            progress.ended += 1
            progress.began = None
        progress.stopped = bool(heard[0][0])
        self._keep()
        self._require_sendable()
        self._end_commit(world is not None and world.passed(self.commit_number), due=False)

    def _heard(self, mine: Sequence[int]) -> list[list[int]]:
        """Return the values of each worker, by rank. All workers must call it."""
        if world_size() == 1:
            return [[*mine]]
        said = torch.tensor(mine)
        heard = [torch.zeros_like(said) for _ in range(world_size())]
        with self._world.or_over() if self._world is not None else contextlib.nullcontext():
            dist.all_gather(heard, said)
        return [each.tolist() for each in heard]

    def _check_accumulate(self, accumulate: int) -> None:
        if accumulate < 1:
            raise ValueError(f"accumulate is {accumulate}: give a number that is 1 or more")
        if accumulate != 1 and self._data is not None:
            raise TypeError("with data the batches are cut by Data: give accumulate= to it alone")

    def _of_numbers(self, until: int, accumulate: int) -> Iterator[Any]:
        numbers = self._numbers(until)
        return numbers if accumulate == 1 else self._in_pieces(numbers, accumulate)

    def _shares(self, data: Data) -> Ahead[Share]:
        """Return this worker's shares. All workers compare what they have read first of a stream."""

        def compared() -> Iterator[Share]:
            shares = data.shares(rank(), world_size())
            first = next(shares, None)
            if data.is_stream:
                data.check_read([read for (read,) in self._heard([data.read])])
            if first is not None:
                yield first
                yield from shares

        return Ahead(compared())

    def _of_data(self, shares: Ahead[Share], until: int | None, epoch: int | None = None) -> Iterator[Step]:
        """Yield steps until ``until`` steps are made, or to the end of the given epoch."""
        assert self._data is not None
        while until is None or self._step + self._begun < until:
            self._check_world()
            share = shares.next
            if share is None or (epoch is not None and share.batch.epoch != epoch):
                return
            shares.take()
            if self._begun and self._open is not None:  # which no commit has covered
                self._used += self._open.used
            noted = self._recorder.took if self._recorder is not None else None
            uneven = functools.partial(self._data.is_uneven, share.batch, world_size())
            left_out = functools.partial(self._data.left_out, share.batch, world_size())
            number = self._step + self._begun
            self._open = Step(
                number, self._begun, share, self._reduction, noted, uneven, left_out, self._calls
            )
            self._begun += 1
            yield self._open
            self._close_step()
            self._see_late_changes()

    def _numbers(self, until: int) -> Iterator[int]:
        self._numbers_only = True
        try:
            while self._step + self._begun < until:
                self._check_world()
                self._begun += 1
                yield self._step + self._begun - 1
                self._see_late_changes()
        finally:
            self._numbers_only = False

    def _in_pieces(self, numbers: Iterator[int], accumulate: int) -> Iterator[Micro]:
        try:
            for number in numbers:
                for turn in range(accumulate):
                    self._micro = micro = Micro(number, turn, last=turn == accumulate - 1)
                    with contextlib.nullcontext() if micro.last else self._silence.over(self._wraps.values()):
                        yield micro
        finally:
            self._micro = None

    def _check_world(self) -> None:
        """Raise WorldChanged if no further step is possible in this world, even if the script has swallowed
        the error of the last step."""
        world = self._world
        if world is not None:
            world.check()
            if self._begun and world.sums != world.sums_begun:
                raise WorldChanged

    def _see_late_changes(self) -> None:
        """Warn once if the script has changed something after it committed a step.

        Simple values are checked each time. Everything else is checked in the first steps, and then more and
        more rarely.
        """
        if self._begun or self._said_late or rank() != 0:
            return
        self._looked += 1
        deep = self._looked <= LOOKS_DEEP or self._looked.bit_count() == 1
        if changed := self._committed.changed(deep=deep):
            self._said_late = True
            _log.warning(
                "%s was changed between state.commit() and the next step, which is lost whenever the world "
                "changes: change it before the commit (as by scheduler.step())",
                changed,
            )

    def _close_step(self) -> None:
        if self._open is not None and not self._open.done:
            raise RuntimeError(
                f"the batches of step {self._open.number} were not all used: go through them, as in "
                "`for batch in step`, before state.commit() and the next step"
            )

    def commit(self, **said: Any) -> None:
        """Commit the steps since the last commit: no worker falls behind them. Call it after the optimizer's
        step.

        ``said``: values for ``worker.report``, such as the loss. Raises WorldChanged when the world ends
        here: do not catch it.
        """
        self._close_step()
        if self._micro is not None and not self._micro.last:
            raise RuntimeError(
                f"state.commit() was called before the last micro-batch of step {self._micro.step}, so that "
                "gradients would be lost with the world: have the optimizer step, and commit, if micro.last"
            )
        if self._numbers_only and not self._begun:
            raise RuntimeError(
                f"state.commit() was called a second time in step {self._step - 1}: what steps() yields is a "
                "step, so commit once in each or in every k-th of them, after all that belongs to it"
            )
        if said:
            report(**said)
        if self._epoch is not None and not self._epoch.under_way and not self._begun:
            self._say_needless(self._epoch)
            return
        world = self._world
        if self._stepped:
            self._see_calls_between()
        else:
            self._carried = self._unused_gradient()
            if world is not None:
                world.vouch()
        if self._data is not None and self._open is not None:
            self._data.advance(self._open.batch)
        used = self._used + (self._open.used if self._open is not None else 0)
        covers = self._begun
        self._open = None
        self._begun = self._used = 0
        self._keep()
        self._require_sendable()
        self._step += max(1, covers)
        self._commits += 1
        agentpage.committed(self._step)
        agentpage.samples(used)
        if self._recorder is not None:
            self._recorder.committed(self._step, self._learned(), covers)
        self._end_commit(world is not None and world.passed(self.commit_number), due=True)
        if self._alike is not None:
            self._alike.passed(self._step)

    def _end_commit(self, ends: bool, *, due: bool) -> None:
        """Finish a commit. ``ends``: the world ends with it; ``due``: a checkpoint may be due. Raises
        WorldChanged."""
        world = self._world
        if self._lasting is not None and (ends or due) and not (world is not None and world.over):
            self._lasting.passed(self._parts(), world, ends)
        if ends:
            raise WorldChanged

    def _say_needless(self, epoch: Epoch) -> None:
        if not self._said_needless and rank() == 0:
            _log.warning(
                "state.commit() outside of the steps of epoch %d commits nothing: what comes after its steps "
                "is committed with its end, when the script asks for the next epoch",
                epoch.number,
            )
        self._said_needless = True

    def _keep(self) -> None:
        """Keep the present state as the one to go back to."""
        self._committed.keep()
        self._undo.keep()
        self._trace.note()
        self._stepped.clear()
        self._evaluated = 0
        self._torn = False

    def _require_sendable(self) -> None:
        """Check that optimizers' state can be sent to new workers. ``LastCommit`` checks all else, since it
        copies all else."""
        sizes = [len(optimizer.state) for optimizer in self._optimizers.values()]
        if sizes != self._tried:
            for name, optimizer in self._optimizers.items():
                require_sendable(optimizer.state_dict()["state"], f"State's {name}.state")
            self._tried = sizes

    def __getattr__(self, name: str) -> Any:
        for kind in ("_plain", "_stateful", "_optimizers"):
            kept = self.__dict__.get(kind, {})
            if name in kept:
                return kept[name].generator if isinstance(kept[name], randomness.Drawn) else kept[name]
        if name in self.__dict__.get("_modules", {}):
            return self._called(name)
        raise AttributeError(f"State was given nothing named {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        elif name in self._plain:
            self._plain[name] = value
        else:
            raise AttributeError(
                f"State keeps what it was given when it was made: add {name}=... there to set it here"
            )

    # ------------------------------------------------------------ what the run loop uses

    @property
    def holds(self) -> Holds:
        if self._torn or not self._undo.covers((), self._stepped):
            return Holds.TORN
        return Holds.WHOLE if self._agreed else Holds.NONE

    @property
    def commit_number(self) -> int:
        """A number that grows with each commit, also at an epoch's end. It is the same in all workers."""
        return self._step + self._progress.marks

    def enter(self, world: World | None) -> None:
        """Enter a world with the present state, which all its workers have."""
        self._world = world
        self._gpus = {p.device for module in self._modules.values() for p in module.parameters() if p.is_cuda}
        agentpage.begins_after(self._step)
        for thing in self._stateful.values():
            if isinstance(thing, torch.amp.GradScaler):  # initialises it, also without a batch
                thing.scale(torch.zeros((), device=self._committed.device))
        for name in self._to_wrap:
            self._wrap_for(name)
        several = world if len(self._to_wrap) > 1 else None
        self._reduction = Averaged(self._wraps, self._silence, self._wrap_all_anew, several)
        self._calls = Calls(self._wraps.values())
        if world is not None and world.size > 1 and self._compares:
            self._alike = Alike(self._trained, self._shared, world, self._step, exact=self._exact)
        if self._data is not None and self._data.consistent:
            self._reduction = Consistent(
                list(self._modules.values()), self._data.virtual_ranks, self._data.seed, self._place, world
            )
        if self._following is not None and self._data is not None:
            _, self._following.times = self._data.growth(world_size())
        self._recorder = recorder()
        if self._recorder is not None:
            data = self._data
            about = (*data.committed, data.facts) if data is not None else None
            number = world.number if world is not None else int(os.environ.get("ELASTICD_ROUND", "1"))
            self._recorder.entered(number, rank(), world_size(), self._step, about)

    @property
    def growth(self) -> tuple[int, float]:
        """The batch that grows with the world, and the factor of the learning rates; 0 and 1 if it does not
        grow."""
        if self._following is None or self._data is None:
            return 0, 1.0
        return self._data.growth(world_size())

    def leave(self) -> None:
        """Leave the world and go back to the last commit, unless parameters without a copy have changed
        since."""
        self._world = None
        self._open = None
        self._begun = self._used = 0
        self._numbers_only = False
        self._alike = self._carried = None
        self._micro = self._epoch = None
        self._reduction.close()
        self._reduction = Averaged({})
        self._wraps.clear()
        self._as_wrapped.clear()
        for module in self._modules.values():
            for parameter in module.parameters():
                parameter.grad = None
        for thing in self._stateful.values():
            if isinstance(thing, torch.amp.GradScaler):  # it may expect update()
                vars(thing)["_per_optimizer_states"].clear()
        outside = self._changed_outside(contents=True)
        if not self._torn and (self._stepped or outside):
            self._torn = not self._undo.covers(outside, self._stepped)
            if not self._torn:
                self._undo.put_back()
                self._trace.note()
        self._stepped.clear()
        if not self._torn:
            self._committed.go_back()

    def _changed_outside(self, *, contents: bool) -> set[int]:
        """Return the parameters that changed since the last commit although no optimizer has begun a step on
        them."""
        changed = self._trace.changed(contents=contents)
        return changed.difference(*(self._owned[name] for name in self._stepped)) if changed else changed

    def begin(self) -> None:
        """Keep the script's initial state as the one to go back to, until the first commit."""
        if not self._committed.kept:
            self._seeds = randomness.digests(randomness.note())
            self._shared.begin()
            self._committed.keep()

    # ------------------------------------------------------------ what the exchange uses

    @property
    def agreed(self) -> int:
        return self._agreed

    def agree(self, round: int) -> None:
        """Note that all workers of the round have the same whole state."""
        self._agreed = round
        self._torn = False
        self._undo.keep()
        self._trace.note()

    @property
    def _exact(self) -> bool:
        return self._data is not None and self._data.consistent

    def digest(self) -> int:
        """Return a digest of the parameters: equal in workers with the same parameters; 0 if they are not
        compared."""
        return divergence.digest(self._trained) if self._trained is not None and self._agreed else 0

    def compare(self, world: World, ranks: Sequence[int]) -> None:
        """Compare parameters on all workers together, when the digests of these ranks differ."""
        if self._trained is not None:
            divergence.compare(self._trained, world, ranks, exact=self._exact)

    def shared_digests(self) -> tuple[int, int]:
        """Return two digests: of the shared values besides parameters, and of those values when the scripts
        began. 0 if they are not compared."""
        if not self._compares:
            return 0, 0
        return self._shared.digest(), self._shared.digest_of_beginning()

    def compare_shared(self, world: World | None, ranks: Sequence[int]) -> None:
        """Compare the shared values on all workers together, when the first digest differs among these
        ranks."""
        self._shared.compare(world, ranks, exact=self._exact)

    def compare_beginning(self, world: World, source: int, *, fresh: bool) -> None:
        """Compare the initial values on all workers together, when the second digest differs.

        A difference is refused while no worker has committed anything. A worker that joins later takes the
        values of ``source``, with a warning.
        """
        differs = self._shared.compare_beginning(world, source, fresh=fresh, exact=self._exact)
        if differs and self.holds is Holds.NONE:
            _log.warning(
                "%s, as their scripts began: worker %d takes what the others have. Give State "
                "worker.Local(...) for what each worker is to keep for itself",
                differs,
                world.rank,
            )

    def outlived(self) -> None:
        """Note that this world continues from the memory of the last world's workers."""
        if self._lasting is not None:
            self._lasting.outlived()

    def kept_beyond(self, age: Age, world: World) -> bool:
        """Whether a newer state than this age was kept anywhere. All workers of the world call it
        together."""
        return self._lasting is not None and self._lasting.has_beyond(age, world)

    def resume(self, world: World, beyond: Age | None = None) -> str:
        """Load the newest kept state, on all workers of the world together.

        Return the tier that the state came from; empty if there is none. ``beyond``: load only a state newer
        than this age, which some workers have in memory. They keep theirs unless the loaded state proves
        whole on all workers.
        """
        if self._lasting is None:
            return ""
        mine = self._copied() if beyond is not None and self.holds is Holds.WHOLE else None
        found = None
        try:
            found = self._lasting.resume(
                self._parts(), world, else_asks=self._restore is not None, beyond=beyond
            )
        except DataChanged:
            agentpage.fatal(Fatal.BAD_DATA)  # a restart would fail the same way
            raise
        finally:
            if found is None and self._lasting.overwrote:  # partly, or with damaged data
                if mine is not None:
                    self.take(mine)
                else:
                    self._torn = True
        if found is None:
            return ""
        self._plain.update(found.plain)
        self._take_own_back()
        self._step = found.step
        randomness.resume(dict(found.random))
        self._committed.keep()
        return self._lasting.tier

    def finish(self) -> None:
        """Commit and save the last steps, after the run functions of all workers have returned. Raises
        WorldChanged."""
        if self._stepped and (self._open is None or self._open.done):
            if rank() == 0:
                _log.warning(
                    "what the script did after committed step %d is committed at its end: call "
                    "state.commit() after the last step, too",
                    self._step,
                )
            self.commit()
        if self._recorder is not None:
            self._recorder.learned(self._step, self._learned())
        if self._lasting is not None:
            if not dist.is_initialized():
                raise RuntimeError(
                    "the run function has destroyed the process group, without which no checkpoint can be "
                    "agreed on: leave out destroy_process_group(), as elasticd.worker sees to it"
                )
            self._lasting.finished(self._parts(), self._world)

    def _parts(self) -> Parts:
        things = {**self._modules, **self._optimizers, **self._without_own(self._stateful)}
        plain, random = self._without_own(self._plain), self._committed.kept["random"]
        return Parts(things, plain, self._seeds, self._step, random, self._progress)

    def _without_own(self, named: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in named.items() if name not in self._own}

    def _take_own_back(self) -> None:
        """Restore this worker's own values from its last commit."""
        for name in self._own & self._plain.keys():
            self._plain[name] = copied(self._committed.kept["plain"][name], name)
        for name in self._own & self._stateful.keys():
            self._stateful[name].load_state_dict(copied(self._committed.kept["stateful"][name], name))

    @property
    def can_restore(self) -> bool:
        return self._restore is not None

    def restore(self) -> bool:
        """Call the script's ``restore``. Return whether it restored a step."""
        step = self._restore(self) if self._restore is not None else None
        if step is None:
            return False
        self._step = step
        self._committed.keep()
        return True

    def snapshot(self) -> dict[str, Any]:
        """Return all that is committed, as plain data and tensors. Parameters and optimizers' tensors are not
        copied."""
        return {
            "step": self._step,
            "seeds": self._seeds,
            "kept": {
                part: self._without_own(kept) if part in ("plain", "stateful") else kept
                for part, kept in self._committed.kept.items()
            },
            "parameters": {name: dict(m.named_parameters()) for name, m in self._modules.items()},
            "optimizers": {name: o.state_dict()["state"] for name, o in self._optimizers.items()},
            "order": self._order(),
            "undoes": self._undo.wanted,
        }

    def _order(self) -> dict[str, list[list[str]]]:
        """Return the names of each optimizer's parameters, by group: the optimizer knows only their order."""
        names = {p: f"{name}.{key}" for name, m in self._modules.items() for key, p in m.named_parameters()}
        return {
            name: [[names[p] for p in group["params"]] for group in optimizer.param_groups]
            for name, optimizer in self._optimizers.items()
        }

    def _copied(self) -> dict[str, Any]:
        """Return a snapshot in the host's memory that training does not change."""
        snapshot = self.snapshot()
        moved = {
            name: with_tensors(snapshot[name], lambda tensor: tensor.detach().to("cpu", copy=True))
            for name in ("parameters", "optimizers")
        }
        return {**snapshot, **moved}

    def take(self, snapshot: dict[str, Any]) -> None:
        """Take another worker's snapshot, except for this worker's own values.

        Random numbers continue as the other worker's where both scripts began alike. Otherwise they continue
        as this worker's, so that independent draws stay independent.
        """
        kept = snapshot["kept"]
        theirs = kept["random"]
        alike = {n for n, seed in self._seeds.items() if snapshot["seeds"].get(n) == seed and n in theirs}
        kept = {**kept, "random": randomness.note() | {n: theirs[n] for n in alike}}
        for part in ("plain", "stateful"):
            mine = self._committed.kept.get(part, {})
            kept[part] = {**kept[part], **{name: mine[name] for name in self._own & mine.keys()}}
        for name, optimizer in self._optimizers.items():
            mine, others = len(optimizer.param_groups), len(kept["groups"][name])
            if mine != others:
                raise RuntimeError(
                    f"{name} has {mine} groups of parameters here, and {others} in the workers that trained "
                    "so far: have the script make them all before it enters its run function"
                )
        for name, order in self._order().items():
            if order != snapshot["order"][name]:
                raise RuntimeError(
                    f"{name} has its parameters in another order here than in the workers that trained so "
                    "far: have the script give them in the same order in each process, never from a set"
                )
        with torch.no_grad():
            for name, module in self._modules.items():
                arrived = snapshot["parameters"][name]
                for key, parameter in module.named_parameters():
                    parameter.copy_(arrived[key])
        for name, optimizer in self._optimizers.items():
            _give(optimizer, snapshot["optimizers"][name])
        self._committed.take(kept)
        self._step = snapshot["step"]
        if (
            self._undoes is not False
        ):  # values that change early in other workers do so here, from the first step
            self._undo.want(*snapshot["undoes"])

    def _learned(self) -> Iterator[torch.Tensor]:
        """Yield all parameters and optimizers' tensors, in the same order on all workers. In consistent mode
        also yield buffers, which are then the same in all workers."""
        for _, module in sorted(self._modules.items()):
            yield from module.parameters()
            if self._data is not None and self._data.consistent:
                yield from module.buffers()
        for _, optimizer in sorted(self._optimizers.items()):
            for _, values in sorted(optimizer.state_dict()["state"].items()):
                yield from (v for _, v in sorted(values.items()) if isinstance(v, torch.Tensor))

    # ------------------------------------------------------------ copies

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Note that an optimizer is about to change parameters. With a closure, the change begins only after
        the closure."""
        [name] = [name for name, mine in self._optimizers.items() if mine is optimizer]
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if not callable(closure):
            self._begins(name)
            return None

        def evaluate() -> Any:
            if name in self._stepped:  # it has changed parameters already, and continues with other gradients
                self._undo_from_now_on(set(), {name})
            loss = closure()
            self._begins(name)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluate}
        return (args[0], evaluate, *args[2:]), kwargs

    def _begins(self, name: str) -> None:
        """Check an optimizer's step right before it changes parameters: later it is too late."""
        self._refuse_carried()
        self._refuse_unfrozen()
        world = self._world
        if world is not None and (not self._stepped or world.sums_begun):
            outside = self._changed_outside(contents=self._commits < LOOKS_INTO)
            if self._stepped or outside:
                self._undo_from_now_on(outside, self._stepped)
            for gpu in self._gpus:
                torch.cuda.current_stream(gpu).synchronize()  # the sums are there, or the world ends
                world.check()
            world.vouch()
        if policy() != "ignore" and not all_finite(_gradients(self._optimizers[name])):
            not_finite("a gradient is NaN or infinite")
        self._stepped.add(name)
        self._calls_before = self._calls()

    def _see_calls_between(self) -> None:
        """Warn once if the script uses collectives while a step can be neither finished nor undone."""
        if self._said_between or self._calls() == self._calls_before or self._undo.covers((), self._stepped):
            return
        self._said_between = True
        if rank() == 0:
            _log.warning(
                "the workers talk to each other between the optimizer's step and state.commit(): where one "
                "is lost there, no worker can finish this step or undo it. Do that before the step or after "
                "the commit, or give State undo=True"
            )

    def _see_swapped(self) -> None:
        """Look for weights that were swapped in for an evaluation, before a forward pass without gradients.

        They may be gone again at the next step. The check runs in passes 1, 2, 4, 8 and so on after a commit.
        """
        if self._world is None or self._stepped or torch.is_grad_enabled():
            return
        self._evaluated += 1
        if self._evaluated.bit_count() == 1 and (outside := self._changed_outside(contents=True)):
            self._undo_from_now_on(outside, set())

    def _undo_from_now_on(self, parameters: set[int], optimizers: set[str]) -> None:
        """Copy these parameters at each commit from now on. They change before the last sum of a step, so a
        death in that sum would leave no worker whole. Parameters of the same module that no optimizer changes
        are copied as well: averages of a frozen layer change only once the layer is trained."""
        owned = [self._owned[name] for name in optimizers]
        followers = [of for of in self._followers if of & parameters]
        if self._undoes is False or not self._undo.want(parameters.union(*owned, *followers), optimizers):
            return
        if self._world is not None and self._world.rank == 0:
            what = ", ".join(sorted(optimizers)) or "something else than an optimizer"
            _log.warning(
                "%s changes parameters before the last sum of a step over the workers: from now on a copy is "
                "kept at each commit, of %.0f MB, to undo that with (undo=False: none is)",
                what,
                self._undo.nbytes / 1e6,
            )

    def _unused_gradient(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a parameter and its gradient if a commit comes before any optimizer's step, and an optimizer
        could use the gradient."""
        for optimizer in self._optimizers.values():
            for parameter in _parameters(optimizer):
                if parameter.grad is not None:
                    return (parameter, parameter.grad) if all_finite(_gradients(optimizer)) else None
        return None

    def _refuse_carried(self) -> None:
        if self._carried is not None and self._carried[0].grad is self._carried[1]:
            raise RuntimeError(
                "gradients were added up over several commits, and would be lost at a change of world: call "
                "state.commit() after the optimizer's step, and not after each backward pass; where a step "
                "is left out on purpose, call optimizer.zero_grad() before state.commit()"
            )
        self._carried = None

    def _refuse_unfrozen(self) -> None:
        for name, wrapped in self._as_wrapped.items():
            if late := wrapped.unfrozen():
                raise RuntimeError(
                    f"{late} was unfrozen after State had wrapped {name} for this world, so the workers do "
                    f"not add up its gradient: call state.{name}, which is wrapped anew then, in place of a "
                    "variable from before"
                )


def _lasting(checkpoints: Checkpoints | str | os.PathLike[str] | None) -> Lasting | None:
    if not checkpoints:
        return None
    from elasticd.worker.checkpoints import Checkpoints  # imports parts of torch that nothing else here needs

    made = checkpoints if isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints)
    return Lasting(made)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _gradients(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (p.grad for p in _parameters(optimizer) if p.grad is not None)


def _give(optimizer: Optimizer, state: dict[int, Any]) -> None:
    """Load another optimizer's state. ``load_state_dict`` casts it to the parameter's type, so set the
    original values afterwards."""
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    for number, parameter in enumerate(_parameters(optimizer)):
        if parameter in optimizer.state:
            unchanged(optimizer.state[parameter], state.get(number))
