"""The State of a training: the values that continue after a change of world, and the steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from elasticd.core.page_layout import Use
from elasticd.worker.agent_link import agentpage
from elasticd.worker.commit.checkpointing import CommitCheckpoints
from elasticd.worker.commit.committed import CommittedState
from elasticd.worker.data import Data
from elasticd.worker.gradients.consistent import consistent_arithmetic, refuse_layouts
from elasticd.worker.gradients.wrapping import Wrap, WrappedModels, data_parallel, to_wrap
from elasticd.worker.sharding.initial_values import Init
from elasticd.worker.sharding.sharded_model import Shard, ShardedModel
from elasticd.worker.sharding.sharded_state import ShardedState
from elasticd.worker.splitting.split_model import Split, SplitModel
from elasticd.worker.splitting.split_state import SplitState
from elasticd.worker.steps import Epoch, StepLoop
from elasticd.worker.values.contents import Contents
from elasticd.worker.values.randomness import GeneratorState
from elasticd.worker.world.group import asked_unit, device

if TYPE_CHECKING:
    from elasticd.worker.checkpoints import Checkpoints

CHECKPOINTS = "ELASTICD_CHECKPOINTS"  # the folder of checkpoints, unless the script names one


class State:
    """A model, its optimizer, and everything else that the training continues from.

    * model: the module itself, not wrapped. Call ``state.model``: it is wrapped for the present world by
      ``wrap`` (None: not wrapped; the script then adds up gradients itself).
    * shard: in place of ``wrap``, a function ``shard(module, mesh)`` that calls ``fully_shard`` on the
      module, with the mesh. It is called for each world, on a copy of the model. Each worker keeps its shards
      of the last two commits in the host's memory. The given model keeps no memory. See docs/in-place.md for
      what is refused.
    * init: with ``shard`` and a model on the meta device, a function ``init(name, module)`` that gives the
      model its initial values, such as random ones or those of a file: the same ones in all workers. It is
      called for each module, and may be called again. The module's own parameters and buffers are whole then,
      in the host's memory, and their values are undefined; modules within have no memory. By default the
      module's ``reset_parameters()`` is called.
    * redundancy: with ``shard``, how many other workers, on other nodes if there are any, also have each
      shard: replicas, or else copies. Up to ``redundancy`` workers can be lost at once without a checkpoint.
    * overlap: with ``shard`` and ``redundancy``, send a commit's copies while the next steps run, and wait
      for them at the next commit. After a loss the workers may then repeat the steps since the commit before.
    * split: in place of ``wrap``, a function ``split(module, mesh)`` that returns this worker's part of the
      module, such as a stage of a pipeline; None: the module, which the function has changed. The mesh has
      the workers of this worker's unit. The function is called for each world, on a copy of the model, and
      the script itself adds up the gradients of workers at the same place of their units. Each worker keeps
      its part of the last two commits in the host's memory. See docs/units.md.
    * unit: with ``split`` or ``shard``, the number of workers that hold one model together, by default that
      of ``elasticd run --unit``. The mesh of ``shard`` then has two dimensions, as that of
      ``worker.mesh(unit)`` (hybrid sharding); with 1, or in a world that is no multiple of the unit, all
      workers hold one model.
    * checkpoints: a ``Checkpoints`` or a folder, by default that of ``elasticd run --checkpoints``. Commits
      are saved there when a save is due, at the first commit of a world of survivors, when all workers leave,
      and at the end. If no worker has the newest state any more, the state comes from this node's memory,
      from another node's memory, or from the newest checkpoint.
    * restore: called as ``restore(state)`` on one worker when there is no state anywhere, as at the start. It
      may load something into the objects, and returns the step of what it loaded, or None.
    * data: the data to train with; ``steps`` then yields this worker's share of it. With ``split``, the
      workers of a unit get the same share.
    * undo: copy parameters and optimizers' state at each commit, too, so that every step can be undone (see
      below).
    * compare: compare the workers' parameters now and then, and all else that must be the same. A difference
      ends the job. Parameters that DistributedDataParallel ignores are not compared.
    * others, by name: modules and optimizers; objects with ``state_dict`` and ``load_state_dict``, such as a
      scheduler; a ``torch.Generator``; and plain data (numbers, strings, tensors, containers of them). A
      module that an optimizer trains is wrapped like the model, and called by its name: ``state.head``. Plain
      data is read and set as an attribute: ``State(..., epoch=0)``, ``state.epoch += 1``.

    All values are the same in all workers: a new worker takes over the others' values. Give a value that each
    worker keeps for itself as ``worker.Local(value)``.

    Parameters and optimizers' state are not copied by default. If a step is abandoned after an optimizer has
    begun to change them, the worker takes the state of another worker that has it whole, if there is one.
    Some scripts change parameters before the last sum of a step over the workers: with two optimizers, with
    an optimizer that evaluates the model several times, or directly. Once State sees such a change, it copies
    the changed values at each commit from then on; ``undo=False`` prevents the copies. Everything else,
    including random numbers and buffers, is copied at each commit and restored when a step is abandoned.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        data: Data | None = None,
        wrap: Wrap | None = data_parallel,
        shard: Shard | None = None,
        init: Init | None = None,
        redundancy: int = 1,
        overlap: bool = False,
        split: Split | None = None,
        unit: int | None = None,
        restore: Callable[[State], int | None] | None = None,
        checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
        undo: bool | None = None,
        compare: bool = True,
        **others: Any,
    ) -> None:
        agentpage.uses(Use.STATE)
        for name in others:
            if name.startswith("_") or hasattr(State, name):
                raise TypeError(f"State uses the name {name!r} itself: give the value another name")
        named = {"model": model, "optimizer": optimizer, "data": data}
        given = {name: value for name, value in named.items() if value is not None}
        self._contents = contents = Contents({**given, **others}, never_own=(nn.Module, Optimizer, Data))
        shards: ShardedState | SplitState | None = None
        if data is not None and not isinstance(data, Data):
            raise TypeError(f"data= is of the type {type(data).__name__}: give a worker.Data(...) of it")
        consistent = data is not None and data.consistent
        if redundancy != 1 and shard is None:
            raise TypeError("redundancy= is the number of copies of each shard: give shard=, or leave it out")
        if unit is not None and shard is None and split is None:
            raise TypeError("unit= is the number of workers that hold one model: give shard= or split=, too")
        if overlap and (shard is None or redundancy == 0):
            raise TypeError(
                "overlap=True sends copies of shards while the next steps run: give shard= and redundancy=1 "
                "or more, or leave out overlap="
            )
        if init is not None and (shard is None or not callable(init)):
            raise TypeError(
                "init= is a function that gives a model on the meta device its values, for shard=: give both "
                "functions, or give a value another name"
            )
        if split is not None:
            if not callable(split):
                raise TypeError(
                    "split= is a function that returns a worker's part: give a value another name"
                )
            if shard is not None:
                raise TypeError("State takes either shard= or split=, and not both")
            _refuse_with_shards("split", data, restore, undo, wrap)
            shards = _split(contents, split, unit, data)
            wrap, compare = None, False
        if shard is not None:
            if not callable(shard):
                raise TypeError("shard= is a function that calls fully_shard: give a value another name")
            _refuse_with_shards("shard", data, restore, undo, wrap)
            sharded = _sharded(contents, shard, unit, data, init)
            shards = ShardedState(sharded, redundancy, overlap=overlap)
            wrap = None
        names = to_wrap(contents.modules, contents.trained) if wrap is not None else []
        if consistent and shard is None:
            arithmetic = consistent_arithmetic(contents.modules, wraps=wrap is not data_parallel)
            contents.stateful["_arithmetic"] = arithmetic
            names = []
        self._models = WrappedModels(contents.modules, names, wrap, sums_per_step=data is not None)
        self._committed = CommittedState(
            contents,
            self._models,
            data,
            restore=partial(restore, self) if restore is not None else None,
            saves=_saves_of(checkpoints or os.environ.get(CHECKPOINTS), in_parts=split is not None),
            undo=undo,
            compares=compare,
            shards=shards,
        )
        self._loop = StepLoop(self._committed, data)

    @property
    def step(self) -> int:
        """The number of committed steps: the steps that ``steps`` has yielded, even if one commit covers
        several. Without ``steps``, each commit is one step."""
        return self._committed.step

    @property
    def model(self) -> Any:
        """The model as wrapped for the present world."""
        return self._models["model"] if "model" in self._contents.modules else None

    def steps(self, until: int | None = None, *, accumulate: int = 1) -> Iterator[Any]:
        """Yield the remaining steps, from the last committed one, until ``until`` steps are made.

        With ``data``, yield a Step for each, to the end of the data's epochs. Without, yield the steps'
        numbers. With ``accumulate``, yield that many ``MicroBatch`` for each step: DistributedDataParallel
        adds gradients up in the last one only.

        A commit covers all steps yielded since the last one. A step that is not committed comes again in the
        next world, and when ``steps`` is called again.
        """
        return self._loop.steps(until, accumulate)

    def epochs(
        self, until: int | None = None, *, steps: int | None = None, accumulate: int = 1
    ) -> Iterator[Epoch]:
        """Yield the remaining epochs, from the one under way, until ``until`` epochs are made. Iterate each
        for its steps.

        With ``data``, an epoch is the data's, or ``steps`` steps. Without, an epoch is ``steps`` steps, whose
        numbers (or ``MicroBatch``) are yielded as by ``steps``.

        Work after an epoch's steps (an evaluation, a scheduler, ``epoch.stop()``) is committed when the
        script asks for the next epoch. If the world changes before that, the work comes again.
        """
        return self._loop.epochs(until, steps, accumulate)

    def commit(self, **values: Any) -> None:
        """Commit the steps since the last commit. Call it after the optimizer's step.

        After a failure, training continues from the last commit if a worker that has it lives, and otherwise
        from a checkpoint.

        ``values``: for ``worker.report``, such as the loss. Raises WorldChanged when the world ends here: do
        not catch it.
        """
        self._loop.commit(**values)

    def __getattr__(self, name: str) -> Any:
        contents: Contents | None = self.__dict__.get("_contents")
        if contents is not None:
            if name in contents.modules:
                return self._models[name]
            for kept in (contents.plain, contents.stateful, contents.optimizers):
                if name in kept:
                    value: Any = kept[name]
                    return value.generator if isinstance(value, GeneratorState) else value
        raise AttributeError(f"State was given nothing named {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        elif name in self._contents.plain:
            self._contents.plain[name] = value
        else:
            raise AttributeError(f"state.{name} cannot be set: only plain data given as State({name}=...)")


def _refuse_with_shards(
    by: str, data: Data | None, restore: object, undo: bool | None, wrap: Wrap | None
) -> None:
    """Raise TypeError for an argument of State that has no meaning yet with ``shard`` or ``split``. ``by``:
    which of the two is given."""
    if by == "split" and data is not None and data.consistent:
        raise TypeError("State takes no Data(consistent=True) with split=: leave out consistent=True")
    if restore is not None:
        raise TypeError(f"State takes no restore= with {by}=: load the weights before State gets the model")
    if undo is not None or wrap is not data_parallel:
        given = "undo" if undo is not None else "wrap"
        raise TypeError(f"State takes no {given}= with {by}=, which copies and {by}s the model itself")


def _split(contents: Contents, split: Split, unit: int | None, data: Data | None) -> SplitState:
    """Prepare the model and the data for units that split the model."""
    shards = SplitState(SplitModel(contents, split, unit))
    if data is not None:
        data.divide(unit=asked_unit(unit), evens=True)
    return shards


def _sharded(
    contents: Contents, shard: Shard, unit: int | None, data: Data | None, init: Init | None
) -> ShardedModel:
    """Prepare the model and the data for a sharded model."""
    if data is not None:
        data.divide(unit=1, evens=True)
        if data.consistent:
            arithmetic = consistent_arithmetic(contents.modules, wraps=False, device=device())
            refuse_layouts(contents.modules, contents.optimizers, device())
            contents.stateful["_arithmetic"] = arithmetic
    return ShardedModel(contents, shard, asked_unit(unit), init)


def _saves_of(
    given: Checkpoints | str | os.PathLike[str] | None, *, in_parts: bool
) -> CommitCheckpoints | None:
    if not given:
        return None
    # Imported here, since it imports parts of torch that only checkpoints need.
    from elasticd.worker.checkpoints import Checkpoints

    checkpoints = given if isinstance(given, Checkpoints) else Checkpoints(given)
    if in_parts:
        checkpoints.keep_parts()
    return CommitCheckpoints(checkpoints)
