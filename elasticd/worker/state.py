"""What training goes on from: committed step by step, taken back where a step was abandoned."""

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

from elasticd.core.age import Age
from elasticd.core.link import Holds
from elasticd.core.page import Fatal, Use
from elasticd.worker import alike, chance, told
from elasticd.worker.alike import Alike
from elasticd.worker.arithmetic import Arithmetic, refuse_inconsistent
from elasticd.worker.committed import Committed
from elasticd.worker.consistent import Consistent
from elasticd.worker.data import Data, DataChanged
from elasticd.worker.epochs import Ahead, Epoch, Progress
from elasticd.worker.finite import all_finite
from elasticd.worker.lasting import Lasting, Parts
from elasticd.worker.loading import Share
from elasticd.worker.place import rank, world_size
from elasticd.worker.plain import copied, require_sendable, unchanged, with_tensors
from elasticd.worker.rate import Following
from elasticd.worker.recorder import Recorder, recorder
from elasticd.worker.reduction import Averaged, Reduction
from elasticd.worker.shared import Local, Shared
from elasticd.worker.step import Micro, Step
from elasticd.worker.trace import Trace
from elasticd.worker.undo import Undo
from elasticd.worker.world import World, WorldChanged
from elasticd.worker.wrapping import (
    SHARDED,
    Calls,
    Silence,
    Wrap,
    Wrapped,
    data_parallel,
    is_flattened,
    to_wrap,
)

if TYPE_CHECKING:
    from elasticd.worker.checkpoint import Checkpoints

_log = logging.getLogger(__name__)
LOOKS_DEEP = 3
LOOKS_INTO = 3  # commits after which elements of parameters are looked at as well: versions do not tell all
CHECKPOINTS = "ELASTICD_CHECKPOINTS"  # where they go, unless the script says so itself


class State:
    """A model, its optimizer, and whatever else training goes on from.

    ``model``: the module itself, not wrapped. ``state.model`` is what to call: wrapped for the world
    at hand by ``wrap`` (None: not wrapped; gradients are the script's to add up).

    ``checkpoints``: what is committed is kept in a ``Checkpoints`` or below a folder (by default the
    one that ``elasticd run --checkpoints`` names): when they are due, at the first commit of a world of
    survivors, when all workers go, and at the end. Where no worker has the newest state any more, it comes
    from the memory of this node, or of another, or from the newest checkpoint. ``restore``: where there is
    none either, as at the start, one worker calls ``restore(state)``, which may load something into the
    objects and returns the step that it is of, or None.

    ``data``: what it is trained with; ``steps`` then yields this worker's share of it.

    Others by name: modules and optimizers (a module that an optimizer trains is wrapped as the model is, and
    called by its name: ``state.head``); objects with ``state_dict`` and ``load_state_dict``, such
    as a scheduler; a ``torch.Generator``; and plain data (numbers, strings, tensors, containers of them),
    which is read and set as an attribute: ``State(..., epoch=0)``, ``state.epoch += 1``. All of it is the
    same in all workers: one that comes takes over what the others have. What is each worker's own is given as
    ``worker.Local(value)``.

    What lies in modules' parameters and optimizers is not copied. Where a step is abandoned after an
    optimizer has begun to change them, others' are taken, if any has them whole. ``undo``: copy them, too, at
    each commit, and so undo any step. By default, what is seen to change before the last sum of a step over
    the workers is copied from then on: by the first of two optimizers, by one that evaluates the model again
    and again, or by the script itself. Everything else, random numbers and buffers included, is copied at
    each commit, and put back where a step is abandoned.

    ``compare``: see now and then whether the workers' parameters are alike, and what else they are to have
    alike, and end the job where it is not. Not what DistributedDataParallel is told to ignore.
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
        told.uses(Use.STATE)
        self._plain: dict[str, Any] = {}
        self._own: set[str] = set()  # the names of what is this worker's own
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
        self._stepped: set[str] = (
            set()
        )  # the optimizers that may have changed something since the last commit
        self._carried: tuple[torch.Tensor, torch.Tensor] | None = None  # see _unused_gradient
        self._commits = 0  # of this process
        self._restore = restore
        self._lasting = _lasting(checkpoints or os.environ.get(CHECKPOINTS))
        self._seeds: dict[str, int] = {}
        self._data = data
        self._reduction: Reduction = Averaged(())
        self._open: Step | None = None
        self._calls = Calls(())
        self._begun = 0  # steps that steps() has yielded since the last commit
        self._numbers_only = False  # steps() is under way, without data
        self._micro: Micro | None = None
        self._epoch: Epoch | None = None  # that epochs() has yielded
        self._progress = Progress()
        self._said_needless = self._said_between = False
        self._calls_before = 0  # collectives, when an optimizer last began to step
        self._looked = 0  # for what was changed after a commit
        self._said_late = False
        self._used = 0  # samples of the steps that are over and not committed
        self._evaluated = 0  # forward passes without gradients since the last commit
        self._tried: list[int] = []  # of how many parameters each optimizer's state was found sendable
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
        self._committed = Committed(self._plain, self._modules, self._optimizers, self._stateful)
        parameters = {id(p): p for module in self._modules.values() for p in module.parameters()}
        self._trace = Trace([*parameters.values()])
        numbers = {id(p): n for n, p in enumerate(self._trace.parameters)}
        self._owned = {
            name: {numbers[id(p)] for p in _parameters(o) if id(p) in numbers}
            for name, o in self._optimizers.items()
        }
        self._undoes = undo
        self._undo = Undo(self._trace.parameters, self._optimizers)
        if undo:
            self._undo.want(range(len(numbers)), self._optimizers)
        self._trained = alike.trained_of(self._modules, trained) if compare and trained else None
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
            self._stateful[name] = chance.Drawn(value)
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
        """Of the step that is under way, in the data."""
        assert self._open is not None
        return self._open.epoch, self._open.position

    # ------------------------------------------------------------ what scripts use

    @property
    def step(self) -> int:
        """How many steps are committed: those that ``steps`` has yielded, however many of them a commit
        covers; without ``steps`` each commit is one."""
        return self._step

    @property
    def model(self) -> Any:
        """The model as it is called in the present world."""
        return self._called("model") if "model" in self._modules else None

    def _called(self, name: str) -> Any:
        """A module as it is called in the present world: wrapped for the parameters that are trained now."""
        self._wrap_anew(name)
        if name not in self._wraps:
            self._see_swapped()
            return self._modules[name]
        return self._wraps[name]

    def _wrap_anew(self, name: str) -> None:
        """Where other parameters of the module are to be trained than when it was wrapped."""
        if name in self._as_wrapped and not self._as_wrapped[name].as_it_was:
            if name in self._wraps:
                Averaged([self._wraps.pop(name)]).close()
            self._wrap_for(name)
            self._calls.leave_out(self._wraps.get(name))
            self._silence.take_in(self._wraps.get(name))

    def _wrap_all_anew(self) -> None:
        for name in self._to_wrap:
            self._wrap_anew(name)

    def _wrap_for(self, name: str) -> None:
        """Unless all of it is frozen, and has no gradient to add up."""
        assert self._wrap is not None
        self._as_wrapped[name] = Wrapped(self._modules[name])
        if self._as_wrapped[name].is_frozen:
            return
        self._wraps[name] = self._as_wrapped[name].wrapped_in(
            self._wrap, self._world, sums_per_step=self._data is not None
        )
        if isinstance(self._wraps[name], nn.Module):  # no method, which would be copied with a copy of it
            self._wraps[name].register_forward_pre_hook(lambda *_: self._see_swapped())

    def steps(self, until: int | None = None, *, accumulate: int = 1) -> Iterator[Any]:
        """The steps that are still to be made, from the last committed one, until there are ``until``. With
        ``data``: a Step each, to the end of its epochs; without: their numbers, or with ``accumulate`` so
        many ``Micro`` for each, of which only the last has DistributedDataParallel add gradients up.

        A commit covers all that were yielded since the last one. What is not committed comes again in the
        next world, and where ``steps`` is called again."""
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
        """The epochs that are still to be made, from the one under way, until there are ``until``; each is
        iterated for its steps. With ``data``: those of the data, or of so many ``steps`` each; without: of so
        many ``steps``, whose numbers are yielded, or ``Micro`` as by ``steps``.

        What the script does after the steps of an epoch (evaluate, ask a scheduler, ``epoch.stop()``) is
        committed when the script asks for the next epoch, and comes again where the world changes before."""
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
        if progress.began is None:
            progress.began = self._step
            progress.ended = data.committed[0] if data is not None and steps is None else 0
        shares = self._shares(data) if data is not None else None
        epoch = None
        try:
            while not progress.stopped and (until is None or progress.ended < until):
                self._check_world()
                if shares is not None and shares.next is None and self._step == progress.began:
                    return  # there is no more data
                last = None if steps is None else progress.began + steps
                self._epoch = epoch = Epoch(progress.ended, self._of_epoch(shares, last, accumulate))
                yield epoch
                self._end_epoch(epoch)
        finally:
            if self._epoch is epoch:
                self._epoch = None

    def _of_epoch(self, shares: Ahead[Share] | None, until: int | None, accumulate: int) -> Iterator[Any]:
        """The steps of the present epoch, until there are so many, or to the end of the data's."""
        if shares is not None:
            yield from self._of_data(shares, until, self._progress.ended if until is None else None)
        elif until is not None:
            yield from self._of_numbers(until, accumulate)
        if self._begun:  # so that what comes after the steps can be done again without them
            self.commit()

    def _end_epoch(self, epoch: Epoch) -> None:
        """All workers together: commit what came after its steps. Raises WorldChanged."""
        if not epoch.over and not epoch.stops:
            raise RuntimeError(
                f"epoch {epoch.number} was left before its end: go through all that `for step in epoch` "
                "gives, or call epoch.stop() before leaving that loop for good"
            )
        if self._begun and self._stepped:  # it was left after an optimizer's step
            self.commit()
        world, progress = self._world, self._progress
        self._check_world()
        heard = self._heard([int(epoch.stops), self._shared.digest() if self._compares else 0])
        if len({shared for _, shared in heard}) > 1:
            self._shared.compare(world, range(len(heard)))
        if epoch.over:
            progress.ended += 1
            progress.began = self._step
        progress.stopped = bool(heard[0][0])
        self._keep()
        self._require_sendable()
        self._end_commit(world is not None and world.passed(self.commit_number), due=False)

    def _heard(self, mine: Sequence[int]) -> list[list[int]]:
        """What each worker has to say, by rank. All of them ask."""
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
        """This worker's. All workers see whether they have begun to read the same of a stream."""

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
        """Until there are so many, or to the end of the epoch of that number."""
        assert self._data is not None
        while until is None or self._step + self._begun < until:
            self._check_world()
            share = shares.next
            if share is None or (epoch is not None and share.batch.epoch != epoch):
                return
            shares.take()
            noted = self._recorder.took if self._recorder is not None else None
            uneven = functools.partial(self._data.is_uneven, share.batch, world_size())
            number = self._step + self._begun
            self._open = Step(number, self._begun, share, self._reduction, noted, uneven, self._calls)
            self._begun += 1
            yield self._open
            self._close_step()
            self._see_late_changes()
            self._used += self._open.used if self._open is not None else 0  # not committed

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
        """Raises WorldChanged where no other step can be made in it, also if the script has swallowed what
        was wrong with the last one."""
        world = self._world
        if world is not None:
            world.check()
            if self._begun and world.sums != world.sums_begun:
                raise WorldChanged

    def _see_late_changes(self) -> None:
        """Say it once where the script has changed something after it has committed the step. Numbers are
        looked at each time; all else in the first steps, and then more and more rarely."""
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
        """What was done since the last commit is done for good: nobody falls behind of it. Call it after the
        optimizer's step. ``said``: what there is to ``worker.report`` of the step, such as its loss.

        Raises WorldChanged when the world ends here: leave it uncaught."""
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
            told.report(**said)
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
        told.committed(self._step)
        told.samples(used)
        if self._recorder is not None:
            self._recorder.committed(self._step, self._learned(), covers)
        self._end_commit(world is not None and world.passed(self.commit_number), due=True)
        if self._alike is not None:
            self._alike.passed(self._step)

    def _end_commit(self, ends: bool, *, due: bool) -> None:
        """``ends``: whether the world does, with this commit; ``due``: whether a checkpoint may be. Raises
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
        """This is what there is to go back to."""
        self._committed.keep()
        self._undo.keep()
        self._trace.note()
        self._stepped.clear()
        self._evaluated = 0
        self._torn = False

    def _require_sendable(self) -> None:
        """What optimizers keep is the one part of a state that ``Committed`` does not copy; it is tried out
        where it is new, so that those who come later can take it."""
        sizes = [len(optimizer.state) for optimizer in self._optimizers.values()]
        if sizes != self._tried:
            for name, optimizer in self._optimizers.items():
                require_sendable(optimizer.state_dict()["state"], f"State's {name}.state")
            self._tried = sizes

    def __getattr__(self, name: str) -> Any:
        for kind in ("_plain", "_stateful", "_optimizers"):
            kept = self.__dict__.get(kind, {})
            if name in kept:
                return kept[name].generator if isinstance(kept[name], chance.Drawn) else kept[name]
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
        """Grows with each commit, also with that of an epoch's end, and alike in all workers."""
        return self._step + self._progress.marks

    def enter(self, world: World | None) -> None:
        """Take part in the world with what this worker has now, which all others have too."""
        self._world = world
        self._gpus = {p.device for module in self._modules.values() for p in module.parameters() if p.is_cuda}
        told.begins_after(self._step)
        for thing in self._stateful.values():
            if isinstance(thing, torch.amp.GradScaler):  # where no batch is this worker's it scales no loss
                thing.scale(torch.zeros((), device=self._committed.device))
        for name in self._to_wrap:
            self._wrap_for(name)
        self._reduction = Averaged(self._wraps.values(), self._silence, self._wrap_all_anew)
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
        """The batch that grows with the world, and what it multiplies learning rates by; 0 and 1 without."""
        if self._following is None or self._data is None:
            return 0, 1.0
        return self._data.growth(world_size())

    def leave(self) -> None:
        """Out of the world, and back to what is committed, unless parameters have changed since then of which
        there is no copy."""
        self._world = None
        self._open = None
        self._begun = self._used = 0
        self._numbers_only = False
        self._alike = self._carried = None
        self._micro = self._epoch = None
        self._reduction.close()
        self._reduction = Averaged(())
        self._wraps.clear()
        self._as_wrapped.clear()
        for module in self._modules.values():
            for parameter in module.parameters():
                parameter.grad = None
        for thing in self._stateful.values():
            if isinstance(thing, torch.amp.GradScaler):  # between unscale_() and update(), as it believes
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
        """The parameters that have changed since the last commit, though no optimizer has begun to."""
        changed = self._trace.changed(contents=contents)
        return changed.difference(*(self._owned[name] for name in self._stepped)) if changed else changed

    def begin(self) -> None:
        """What the script has made is what there is to go back to, until something is committed."""
        if not self._committed.kept:
            self._seeds = chance.digests(chance.note())
            self._shared.begin()
            self._committed.keep()

    # ------------------------------------------------------------ what the exchange uses

    @property
    def agreed(self) -> int:
        return self._agreed

    def agree(self, round: int) -> None:
        """All have the same, which is whole."""
        self._agreed = round
        self._torn = False
        self._undo.keep()
        self._trace.note()

    @property
    def _exact(self) -> bool:
        return self._data is not None and self._data.consistent

    def digest(self) -> int:
        """Alike in workers that have the same parameters; 0 where that is not to be asked."""
        return alike.digest(self._trained) if self._trained is not None and self._agreed else 0

    def compare(self, world: World, ranks: Sequence[int]) -> None:
        """All workers together, where digests of these ranks differ."""
        if self._trained is not None:
            alike.compare(self._trained, world, ranks, exact=self._exact)

    def shared_digests(self) -> tuple[int, int]:
        """Alike in workers that have alike what they are to have so, beside parameters; and in those whose
        scripts began alike. 0 where that is not to be asked."""
        if not self._compares:
            return 0, 0
        return self._shared.digest(), self._shared.digest_of_beginning()

    def compare_shared(self, world: World | None, ranks: Sequence[int]) -> None:
        """All workers together, where the first of those digests differs among these ranks."""
        self._shared.compare(world, ranks)

    def compare_beginning(self, world: World, source: int, *, fresh: bool) -> None:
        """All workers together, where the second differs. That is refused where no worker has committed
        anything; one that comes later takes what ``source`` has, and says so."""
        differs = self._shared.compare_beginning(world, source, fresh=fresh)
        if differs and self.holds is Holds.NONE:
            _log.warning(
                "%s, as their scripts began: worker %d takes what the others have. Give State "
                "worker.Local(...) for what each worker is to keep for itself",
                differs,
                world.rank,
            )

    def outlived(self) -> None:
        """This world goes on from what workers of the last one have in memory."""
        if self._lasting is not None:
            self._lasting.outlived()

    def kept_beyond(self, age: Age, world: World) -> bool:
        """All workers of the world together: whether a newer state than that was kept anywhere."""
        return self._lasting is not None and self._lasting.has_beyond(age, world)

    def resume(self, world: World, beyond: Age | None = None) -> str:
        """All workers of the world together: have the newest state that was kept anywhere. The tier it was
        kept in; empty where there is none. ``beyond``: if it is further than this, which some of them have.
        They have it still unless what was kept has proved whole, to all of them."""
        if self._lasting is None:
            return ""
        mine = self._copied() if beyond is not None and self.holds is Holds.WHOLE else None
        found = None
        try:
            found = self._lasting.resume(
                self._parts(), world, else_asks=self._restore is not None, beyond=beyond
            )
        except DataChanged:
            told.fatal(Fatal.BAD_DATA)  # another try would find the same
            raise
        finally:
            if found is None and self._lasting.overwrote:  # in part, or what was read is not whole
                if mine is not None:
                    self.take(mine)
                else:
                    self._torn = True
        if found is None:
            return ""
        self._plain.update(found.plain)
        self._take_own_back()
        self._step = found.step
        chance.resume(dict(found.random))
        self._committed.keep()
        return self._lasting.tier

    def finish(self) -> None:
        """All workers' run functions have come to their end. Raises WorldChanged."""
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
        """As it was when this worker last committed."""
        for name in self._own & self._plain.keys():
            self._plain[name] = copied(self._committed.kept["plain"][name], name)
        for name in self._own & self._stateful.keys():
            self._stateful[name].load_state_dict(copied(self._committed.kept["stateful"][name], name))

    @property
    def can_restore(self) -> bool:
        return self._restore is not None

    def restore(self) -> bool:
        """Begin where the script's ``restore`` says, if it can."""
        step = self._restore(self) if self._restore is not None else None
        if step is None:
            return False
        self._step = step
        self._committed.keep()
        return True

    def snapshot(self) -> dict[str, Any]:
        """All that is committed: plain data and tensors, the large ones being the very parameters."""
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
        """By optimizer and group, the names of its parameters, which it knows by their order alone."""
        names = {p: f"{name}.{key}" for name, m in self._modules.items() for key, p in m.named_parameters()}
        return {
            name: [[names[p] for p in group["params"]] for group in optimizer.param_groups]
            for name, optimizer in self._optimizers.items()
        }

    def _copied(self) -> dict[str, Any]:
        """A snapshot that shares nothing with what training changes, in the memory of the host."""
        snapshot = self.snapshot()
        moved = {
            name: with_tensors(snapshot[name], lambda tensor: tensor.detach().to("cpu", copy=True))
            for name in ("parameters", "optimizers")
        }
        return {**snapshot, **moved}

    def take(self, snapshot: dict[str, Any]) -> None:
        """Have what another worker had, but for what is this one's own. Random numbers go on as its do where
        both began alike, and as this worker's otherwise, so that what was drawn independently stays so."""
        kept = snapshot["kept"]
        theirs = kept["random"]
        alike = {n for n, seed in self._seeds.items() if snapshot["seeds"].get(n) == seed and n in theirs}
        kept = {**kept, "random": chance.note() | {n: theirs[n] for n in alike}}
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
        ):  # what was seen to change early there does so here, from the first step on
            self._undo.want(*snapshot["undoes"])

    def _learned(self) -> Iterator[torch.Tensor]:
        """All parameters and what the optimizers have of them, in one order everywhere. Buffers where they
        are alike in all workers, as they are in consistent mode."""
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
        """An optimizer is about to change parameters, unless it is given a closure to call first."""
        [name] = [name for name, mine in self._optimizers.items() if mine is optimizer]
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if not callable(closure):
            self._begins(name)
            return None

        def evaluate() -> Any:
            if name in self._stepped:  # it has changed them already, and goes on with other gradients
                self._undo_from_now_on(set(), {name})
            loss = closure()
            self._begins(name)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluate}
        return (args[0], evaluate, *args[2:]), kwargs

    def _begins(self, name: str) -> None:
        """The last instant at which an optimizer has not changed anything, so whatever may be wrong with its
        step has to be known now."""
        self._refuse_carried()
        self._refuse_unfrozen()
        world = self._world
        if world is not None and (not self._stepped or world.sums_begun):
            outside = self._changed_outside(contents=self._commits < LOOKS_INTO)
            if self._stepped or outside:
                self._undo_from_now_on(outside, self._stepped)
            for gpu in self._gpus:
                torch.cuda.current_stream(gpu).synchronize()  # the sums are there, or the world is over
                world.check()
            world.vouch()
        if told.policy() != "ignore" and not all_finite(_gradients(self._optimizers[name])):
            told.not_finite("a gradient is NaN or infinite")
        self._stepped.add(name)
        self._calls_before = self._calls()

    def _see_calls_between(self) -> None:
        """Say it once where the script talks to others while a step can be neither finished nor undone."""
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
        """Before a forward pass: other weights may have been swapped in for an evaluation, and be gone again
        at the next step. Looked for in the first such pass after a commit, the second, the fourth and so
        on."""
        if self._world is None or self._stepped or torch.is_grad_enabled():
            return
        self._evaluated += 1
        if self._evaluated.bit_count() == 1 and (outside := self._changed_outside(contents=True)):
            self._undo_from_now_on(outside, set())

    def _undo_from_now_on(self, parameters: set[int], optimizers: set[str]) -> None:
        """They have changed before the last sum of a step: a death in that sum leaves no worker whole."""
        owned = [self._owned[name] for name in optimizers]
        if self._undoes is False or not self._undo.want(parameters.union(*owned), optimizers):
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
        """At a commit before any optimizer has stepped: a parameter and its gradient, if there is one that an
        optimizer could use."""
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
    from elasticd.worker.checkpoint import Checkpoints  # imports much that nothing else here needs

    made = checkpoints if isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints)
    return Lasting(made)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _gradients(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (p.grad for p in _parameters(optimizer) if p.grad is not None)


def _give(optimizer: Optimizer, state: dict[int, Any]) -> None:
    """Load what another of its kind has. torch takes that to be of its parameter's type, whatever it is."""
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    for number, parameter in enumerate(_parameters(optimizer)):
        if parameter in optimizer.state:
            unchanged(optimizer.state[parameter], state.get(number))
