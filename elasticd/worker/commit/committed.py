"""The committed state of the training in this worker: keep it, go back to it, save it, and exchange it with
other workers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from elasticd.channel.worker_messages import Holds
from elasticd.checkpoint.client.tensors import full_of, local_of
from elasticd.core.age import Age
from elasticd.core.page_layout import Fatal
from elasticd.core.state_memory import StateMemory
from elasticd.data.dealing import Batch
from elasticd.worker.agent_link import agentpage
from elasticd.worker.commit.checkpointing import CommitCheckpoints, Parts
from elasticd.worker.commit.comparison import Comparison, Digests
from elasticd.worker.commit.copies import LastCommit
from elasticd.worker.commit.uncommitted import Uncommitted
from elasticd.worker.data import Data, DataChanged
from elasticd.worker.gradients.consistent import ConsistentReduction
from elasticd.worker.gradients.rates import ScaledRates
from elasticd.worker.gradients.reduction import AveragedReduction, Reduction
from elasticd.worker.gradients.replicated import ReplicatedGradients
from elasticd.worker.gradients.wrapping import WrappedModels
from elasticd.worker.samples.auditing import Recorder, recorder
from elasticd.worker.sharding.held import CommitPoint
from elasticd.worker.sharding.sharded_state import ShardedState
from elasticd.worker.splitting.split_state import SplitState
from elasticd.worker.values import randomness
from elasticd.worker.values.contents import Contents, EpochProgress, FrozenParameters, parameters_of
from elasticd.worker.values.plaindata import copied, require_sendable, unchanged, with_tensors
from elasticd.worker.world.group import World, WorldChanged, gathered, or_over, rank, world_size

if TYPE_CHECKING:
    from torch.optim import Optimizer

_log = logging.getLogger(__name__)


class CommittedState:
    """The committed state of the training, and the parts that continue from it in the present world.

    ``step``: the number of committed steps. ``agreed``: the last round in which all workers had this state; 0
    if there was none. ``world``: None outside any world, and in a world that cannot change.
    ``reduction``: how gradients are reduced in this world. ``place``: the epoch, and the position in the
    data, of the step under way. ``shards``: keeps parameters and optimizers' state if the model is sharded
    or split.
    """

    def __init__(
        self,
        contents: Contents,
        models: WrappedModels,
        data: Data | None,
        *,
        restore: Callable[[], int | None] | None,
        saves: CommitCheckpoints | None,
        undo: bool | None,
        compares: bool,
        shards: ShardedState | SplitState | None = None,
    ) -> None:
        self.step = self.agreed = 0
        self.world: World | None = None
        self.reduction: Reduction = AveragedReduction(models)
        self._replicated: ReplicatedGradients | None = None
        self.recorder: Recorder | None = None
        self.place = 0, 0
        self.contents, self.models, self.data = contents, models, data
        self.progress = EpochProgress()
        contents.stateful["_epochs"] = self.progress
        self._frozen = FrozenParameters(contents.modules)
        if not isinstance(shards, SplitState):  # where each worker has other parameters
            contents.stateful["_frozen"] = self._frozen
        self.saves = saves
        self.last = LastCommit(contents)
        self.shards = shards
        self.uncommitted = Uncommitted(contents, models, undo, kept_elsewhere=shards is not None)
        self._is_consistent = data is not None and data.consistent
        self.comparison = Comparison(contents, compares=compares, exact=self._is_consistent)
        self._restore = restore
        rates = data is not None and data.grows
        self._rates = ScaledRates(contents.optimizers.values()) if rates else None
        self._seeds: dict[str, int] = {}
        self._sendable: list[int] = []  # for each optimizer, how many parameters' states were checked
        models.before_forward = self._before_forward

    @property
    def commit_number(self) -> int:
        """A number that grows with each commit, also at an epoch's end. It is the same in all workers."""
        return self.step + self.progress.marks

    @property
    def unit(self) -> int:
        """The number of neighbouring workers that train on the same samples."""
        return self.shards.model.unit if isinstance(self.shards, SplitState) else 1

    @property
    def counts_samples(self) -> bool:
        """Whether this worker counts and notes its samples. Of a unit, the last worker does: the last stage
        of a pipeline knows the loss."""
        return rank() % self.unit == self.unit - 1

    @property
    def holds(self) -> Holds:
        if self.uncommitted.is_torn:
            return Holds.TORN
        if not self.agreed:
            return Holds.NONE
        return Holds.SHARD if isinstance(self.shards, ShardedState) else Holds.WHOLE

    @property
    def shard_sizes(self) -> tuple[int, int]:
        """Bytes of a sharded model: of this worker's shard, and of its copies of shards; 0 for others."""
        if not isinstance(self.shards, ShardedState):
            return 0, 0
        return self.shards.sizes.shard, self.shards.sizes.copies

    @property
    def memory(self) -> StateMemory | None:
        """What a sharded model's state takes of the host's memory; None for others."""
        return self.shards.memory if isinstance(self.shards, ShardedState) else None

    @property
    def growth(self) -> tuple[int, float]:
        """The size of a batch that grows with the world, and the factor for the learning rates; 0 and 1 if
        the batch does not grow."""
        return (
            self.data.growth(world_size()) if self._rates is not None and self.data is not None else (0, 1.0)
        )

    # ------------------------------------------------------------ worlds

    def begin(self) -> None:
        """Keep the script's initial state, so that this worker can go back to it before the first commit."""
        if not self.last.kept:
            self._seeds = randomness.digests(randomness.note())
            self.comparison.begin()
            self.last.keep()

    def enter(self, world: World | None) -> None:
        """Enter a world. All workers of the world have the same state."""
        self.world = world
        if world is None and self.shards is not None:
            self.shards.forget()
        agentpage.begins_after(self.step)
        for scaler in self.contents.scalers:  # initialises the scaler, also in a worker without a batch
            scaler.scale(torch.zeros((), device=self.last.device))
        self.models.enter(world)
        self._close_reductions()  # of an earlier run function in the same world
        self.uncommitted.enter(world)
        self.comparison.enter(world, self.step)
        if self._is_consistent and self.data is not None:
            self.reduction = self._consistent_reduction(self.data, world)
        else:
            sharded = isinstance(self.shards, ShardedState)
            several = world if len(self.models) > 1 else None
            self.reduction = AveragedReduction(self.models, several, is_sharded=sharded)
            if isinstance(self.shards, ShardedState) and (replicated := self.shards.model.replicated):
                self._replicated = ReplicatedGradients(replicated)
        if self._rates is not None:
            _, self._rates.times = self.growth
        self.recorder = recorder() if self.counts_samples else None
        if self.recorder is not None:
            about = (*self.data.committed, self.data.facts) if self.data is not None else None
            number = world.number if world is not None else int(os.environ.get("ELASTICD_ROUND", "1"))
            unit = self.unit
            self.recorder.entered(number, rank() // unit, world_size() // unit, self.step, about)

    def _consistent_reduction(self, data: Data, world: World | None) -> Reduction:
        modules, ranks, seed = [*self.contents.modules.values()], data.virtual_ranks, data.seed
        shared = self.contents.shared(self.contents.stateful).values()
        generators = [its.generator for its in shared if isinstance(its, randomness.GeneratorState)]
        if isinstance(self.shards, ShardedState):
            # Imported here, since it imports parts of torch that only sharded models need.
            from elasticd.worker.gradients.sharded_reduction import ShardedReduction

            spans = self.shards.spans
            return ShardedReduction(modules[0], spans, ranks, seed, lambda: self.place, world, generators)
        return ConsistentReduction(modules, ranks, seed, lambda: self.place, world, generators)

    def leave(self) -> None:
        """Leave the world and go back to the last commit, unless parameters without a copy have changed
        since."""
        self.world = None
        if self.saves is not None:
            self.saves.leave()
        self.comparison.leave()
        self._close_reductions()
        self.reduction = AveragedReduction(self.models)
        self.models.leave()
        for parameter in self.contents.parameters():
            parameter.grad = None
        for scaler in self.contents.scalers:  # the interrupted step may have left the scaler before update()
            vars(scaler)["_per_optimizer_states"].clear()
        if self._rates is not None:
            self._rates.give_back()
        undone = self.uncommitted.go_back()
        if self.shards is not None:  # the next world's agreement restores a commit
            if isinstance(self.shards, ShardedState):
                self.shards.leave()
            self.shards.model.leave()
            self.lay_out()
        elif undone:
            self.last.go_back()

    def lay_out(self) -> None:
        """Copy and compare the modules of a new layout from now on, if the model is sharded."""
        self.last.follow(self.contents)
        self._frozen.follow()
        self.comparison.follow(self.contents)

    def _close_reductions(self) -> None:
        self.reduction.close()
        if self._replicated is not None:
            self._replicated.close()
            self._replicated = None

    def agree(self, round: int) -> None:
        """Note that all workers of the round have the same whole state."""
        self.agreed = round
        self.uncommitted.keep()

    def _before_forward(self, name: str) -> None:
        self.uncommitted.before_forward()
        if isinstance(self.reduction, AveragedReduction):
            self.reduction.calls(name)

    # ------------------------------------------------------------ commits

    def commit(self, *, covers: int = 0, samples: int = 0, batch: Batch | None = None) -> None:
        """Commit the work since the last commit. Raises WorldChanged if the world ends with this commit.

        ``covers``: the number of steps since the last commit; 0 counts as one step. ``samples``: the number
        of samples that this worker used. ``batch``: the last batch of the data.
        """
        self.uncommitted.before_commit()
        if self.data is not None and batch is not None:
            self.data.advance(batch)
        step = self.step + max(1, covers)
        if self.recorder is not None:  # before other workers can have the commit: this worker may be lost
            self.recorder.committed(step, self._learned(), covers)
        self._keep(step)
        self.step = step
        agentpage.committed(self.step)
        agentpage.samples(samples if self.counts_samples else 0)
        self._end_commit(due=True)
        self.comparison.after_commit(self.step)

    def commit_epoch(self, *, over: bool, stops: bool) -> None:
        """Commit the work after an epoch's steps, on all workers together. Rank 0 decides whether training
        ``stops``. Raises WorldChanged if the world ends with this commit."""
        heard = gathered([stops, *self.comparison.digests()], self.world)
        self.comparison.compare(self.world, range(len(heard)), [Digests(*each[1:]) for each in heard])
        if over:
            self.progress.ended += 1
            self.progress.began = None
        self.progress.stopped = bool(heard[0][0])
        self._keep(self.step)
        self._end_commit(due=False)

    def finish(self) -> None:
        """Save the last steps, after the run functions of all workers have returned. Raises WorldChanged."""
        self._close_reductions()  # from now on the model is the script's
        if self.recorder is not None:
            self.recorder.learned(self.step, self._learned())
        if self.saves is not None:
            if not dist.is_initialized():
                raise RuntimeError(
                    "the run function has destroyed the process group before the last checkpoint: remove "
                    "destroy_process_group(), which elasticd.worker calls itself"
                )
            self.saves.finished(self.parts(), self.world)

    def _keep(self, step: int) -> None:
        """Keep the present state, so that this worker can go back to it. Raises TypeError if the state cannot
        be sent to other workers. ``step``: the number of steps with this commit. A sharded model raises
        WorldChanged if the world ends before all workers have the copies."""
        if isinstance(self.shards, ShardedState) and self.world is not None:
            # Until then the workers may go back to the commit before that, whose memory ``last`` uses again.
            self.shards.complete(self.world)
        self.last.keep()
        self.uncommitted.keep()
        if self.shards is not None:
            if self.world is not None:
                point = CommitPoint(self.world.number, step, self.progress.marks)
                self.shards.keep(point, self.last.kept, self.world)
            return
        optimizers = self.contents.optimizers
        sizes = [len(optimizer.state) for optimizer in optimizers.values()]
        if sizes != self._sendable:
            for name, optimizer in optimizers.items():
                require_sendable(optimizer.state_dict()["state"], f"State's {name}.state")
            self._sendable = sizes

    def _end_commit(self, *, due: bool) -> None:
        """Save the commit if the world ends with it, or if a checkpoint may be ``due``."""
        world = self.world
        ends = world is not None and world.ends_with_commit(self.commit_number)
        if self.shards is not None and world is not None and world.ends_as_planned:
            self.shards.hand_over(world)
        if self.saves is not None and (ends or due) and not (world is not None and world.over):
            self.saves.after_commit(self.parts(), world, ends)
        if ends:
            raise WorldChanged

    def _learned(self) -> Iterator[torch.Tensor]:
        """Yield parameters and optimizers' tensors; in consistent mode also buffers, which are then the same
        in all workers. The workers gather a sharded tensor together, and of a split one each has its part.
        Raises WorldChanged."""
        for tensor in self.contents.tensors(buffers=self._is_consistent):
            with or_over(self.world):
                whole = full_of(tensor) if isinstance(self.shards, ShardedState) else local_of(tensor)[0]
            yield whole

    # ------------------------------------------------------------ from and to other workers

    def snapshot(self) -> dict[str, Any]:
        """Return all that is committed, as plain data and tensors. Parameters and optimizers' tensors are not
        copied."""
        contents = self.contents
        return {
            **self.snapshot_of(self.last.kept),
            "step": self.step,
            "parameters": self._parameters(),
            "optimizers": {name: o.state_dict()["state"] for name, o in contents.optimizers.items()},
            "undoes": self.uncommitted.wanted,
        }

    def snapshot_of(self, kept: dict[str, Any]) -> dict[str, Any]:
        """Return what another worker needs of a commit besides the step, parameters and optimizers' state.
        ``kept``: see ``LastCommit``."""
        shared = self.contents.shared
        return {
            "seeds": self._seeds,
            "kept": {n: shared(part) if n in ("plain", "stateful") else part for n, part in kept.items()},
            "order": self.contents.order,
        }

    def overwritten(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the parameters, by module and name, to be overwritten by another worker's. They are torn
        until all have arrived."""
        self.uncommitted.tear()
        return self._parameters()

    def _parameters(self) -> dict[str, dict[str, torch.Tensor]]:
        return {name: dict(module.named_parameters()) for name, module in self.contents.modules.items()}

    def take(self, snapshot: dict[str, Any]) -> None:
        """Take over another worker's snapshot, except for this worker's own values."""
        contents, kept = self.contents, self.kept_of(snapshot)
        self.refuse_other_optimizers(snapshot)
        with torch.no_grad():
            for name, module in contents.modules.items():
                arrived = snapshot["parameters"][name]
                for key, parameter in module.named_parameters():
                    parameter.copy_(arrived[key])
        for name, optimizer in contents.optimizers.items():
            _give(optimizer, snapshot["optimizers"][name])
        self.last.take(kept)
        self.step = snapshot["step"]
        self.uncommitted.want(snapshot["undoes"])

    def kept_of(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """Return another worker's copy of a commit, for ``LastCommit.take``, with this worker's own values.

        A source of random numbers continues like the other worker's if both scripts gave it the same seed.
        Otherwise it continues with this worker's own numbers, so that independent draws stay independent.
        """
        kept = snapshot["kept"]
        theirs = kept["random"]
        alike = {n for n, seed in self._seeds.items() if snapshot["seeds"].get(n) == seed and n in theirs}
        kept = {**kept, "random": randomness.note() | {n: theirs[n] for n in alike}}
        for part in ("plain", "stateful"):
            mine = self.last.kept.get(part, {})
            kept[part] = {**kept[part], **{name: mine[name] for name in self.contents.own & mine.keys()}}
        return kept

    def refuse_other_optimizers(self, snapshot: dict[str, Any]) -> None:
        """Raise RuntimeError if another worker's optimizers have other parameters than this worker's, or in
        another order."""
        order = self.contents.order
        for name, theirs in snapshot["order"].items():
            if len(order[name]) != len(theirs):
                raise RuntimeError(
                    f"{name} has {len(order[name])} groups of parameters here, and {len(theirs)} in the "
                    "workers that trained so far: have the script make them all before it enters its run "
                    "function"
                )
            if order[name] != theirs:
                raise RuntimeError(
                    f"{name} has its parameters in another order here than in the workers that trained so "
                    "far: have the script give them in the same order in each process, never from a set"
                )

    # ------------------------------------------------------------ from the script, and from checkpoints

    @property
    def can_restore(self) -> bool:
        return self._restore is not None

    def restore(self) -> bool:
        """Call the script's ``restore``. Return whether it restored a step."""
        step = self._restore() if self._restore is not None else None
        if step is None:
            return False
        self.step = step
        self.last.keep()
        return True

    def survived(self) -> None:
        """Note that this world continues from the memory of the last world's workers."""
        if self.saves is not None:
            self.saves.save_first_commit()

    def has_newer(self, age: Age, world: World) -> bool:
        """Whether a world after the age's, and before this one, kept a newer state. No worker of such a world
        is left. All workers of this world call it together."""
        between = age.agreed < world.number - 1
        return between and self.saves is not None and self.saves.has_newer(age, world)

    def resume(self, world: World, beyond: Age | None = None) -> str:
        """Load the newest kept state, on all workers of the world together.

        Return the tier that the state came from; empty if no state was loaded. ``beyond``: load only a state
        newer than this age, because some workers have a state of this age in memory. These workers keep their
        state unless the newer state was loaded on all workers.
        """
        if self.saves is None:
            return ""
        whole = self.holds is Holds.WHOLE and self.shards is None  # a sharded state has its own copies
        mine = self._copied() if beyond is not None and whole else None
        found, self._frozen.changed = None, ""
        try:
            found = self.saves.resume(self.parts(), world, has_restore=self.can_restore, beyond=beyond)
        except DataChanged:
            agentpage.fatal(Fatal.BAD_DATA)  # a restart would fail the same way
            raise
        finally:
            if found is None and self.saves.checkpoints.overwrote:  # the state is partly or wrongly loaded
                if mine is not None:
                    self.take(mine)
                else:
                    self.uncommitted.tear()
        if found is None:
            return ""
        if self._frozen.changed and rank() == 0:
            _log.warning(
                "%s and perhaps others are frozen or not as of the checkpoint, and not as the script said: "
                "change requires_grad in the run function if you want it otherwise",
                self._frozen.changed,
            )
        self.contents.plain.update(found.plain)
        self._take_own_back()
        self.step = found.step
        randomness.resume(dict(found.random))
        self.last.keep()
        return self.saves.checkpoints.tier

    def parts(self) -> Parts:
        contents = self.contents
        things = {**contents.modules, **contents.optimizers, **contents.shared(contents.stateful)}
        plain, random = contents.shared(contents.plain), self.last.kept["random"]
        return Parts(things, plain, self._seeds, self.step, random, self.progress)

    def _copied(self) -> dict[str, Any]:
        """Return a snapshot in the host's memory that training does not change."""
        snapshot = self.snapshot()
        moved = {
            name: with_tensors(snapshot[name], lambda tensor: tensor.detach().to("cpu", copy=True))
            for name in ("parameters", "optimizers")
        }
        return {**snapshot, **moved}

    def _take_own_back(self) -> None:
        """Restore this worker's own values from its last commit."""
        contents, kept = self.contents, self.last.kept
        for name in contents.own & contents.plain.keys():
            contents.plain[name] = copied(kept["plain"][name], name)
        for name in contents.own & contents.stateful.keys():
            contents.stateful[name].load_state_dict(copied(kept["stateful"][name], name))


def _give(optimizer: Optimizer, state: dict[int, Any]) -> None:
    """Load the state of another worker's optimizer. ``load_state_dict`` casts the state to the parameter's
    type, so set the original values afterwards."""
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    for number, parameter in enumerate(parameters_of(optimizer)):
        if parameter in optimizer.state:
            unchanged(optimizer.state[parameter], state.get(number))
