"""What a worker keeps of the last commits of a sharded State: its own shard, and copies of others' shards."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from elasticd.core.state_memory import StateMemory
from elasticd.worker.agent_link import agentpage
from elasticd.worker.sharding.held import INITIAL, CommitPoint
from elasticd.worker.sharding.host_shards import Generation, HostShard, Kinds, SmallState, size_of
from elasticd.worker.sharding.moves import guardians, heirs, replicas
from elasticd.worker.sharding.parts import WHOLE, Part, Spans
from elasticd.worker.sharding.sharded_model import ShardedModel
from elasticd.worker.sharding.transport import Copies, Guarding, copy_to_guardians
from elasticd.worker.world.group import World, all_have, gathered

_log = logging.getLogger(__name__)
GENERATIONS = 2  # two workers are at most one commit apart, so both have the older of their commits


class ShardSizes(NamedTuple):
    """Bytes of one worker. ``shard``: its part of the parameters and of the optimizers' state. ``of_own`` and
    ``of_others``: the copies that it keeps in the host's memory, of its own shard and of others'."""

    shard: int
    of_own: int
    of_others: int

    @property
    def copies(self) -> int:
        return self.of_own + self.of_others


class ShardedState:
    """The commits of a sharded model that a worker can go back to, or give to others.

    ``redundancy``: how many other workers have each shard too, as replicas or as copies. ``generations``: the
    last commits, the newest last. At the beginning there is one, with the script's initial state, whole. The
    worker's first commit, or an agreement on a later step, drops this one.
    ``sizes``: how much memory the state takes in the present world, with what the optimizers will keep.
    ``overlap``: a commit does not wait for its copies. The next commit does, so that after a loss the workers
    may go back to the commit before.

    Parameters that every rank has whole need no copies. Their tensors come last in a ``HostShard``, so that
    the rest is one block, which is sent.
    """

    def __init__(self, model: ShardedModel, redundancy: int, *, overlap: bool = False) -> None:
        if redundancy < 0:
            raise ValueError(f"redundancy is {redundancy}: give the number of copies of a shard, 0 or more")
        self.model, self.redundancy, self.overlap = model, redundancy, overlap
        initial, slots = model.empty()
        self.generations = [Generation(INITIAL, SmallState({}, slots, model.trainable), initial)]
        self._parts: Sequence[Part] = ()
        self._guards: Sequence[Sequence[int]] = ()
        self._guarding = Guarding()
        self._there_are_copies = False
        self._groups: Sequence[tuple[int, ...]] = ()
        self._kinds: Kinds = ()
        self._copies: Copies | None = None  # of the newest commit, on their way
        self._complete = True  # no worker lacks the newest commit, or a copy of it
        self.sizes = ShardSizes(0, 0, 0)
        # Bytes of all shards together.
        self._sharded = size_of(model.expected_kinds(), model.shapes.spans(WHOLE))
        self._replicated = 0  # bytes of what each worker has whole, as far as known

    @property
    def memory(self) -> StateMemory:
        """What the state takes of the host's memory."""
        times = GENERATIONS + self.model.is_in_host_memory
        own, replicated = times * self._sharded, times * self._replicated
        return StateMemory(own, GENERATIONS * self._sharded, self.redundancy, self.model.unit, replicated)

    @property
    def spans(self) -> Sequence[Spans]:
        """The part of each parameter that each rank has in the present world."""
        return [*map(self.model.shapes.spans, self._parts)]

    def generation(self, point: CommitPoint) -> Generation | None:
        return next((its for its in self.generations if its.point == point), None)

    def drop_all_but(self, point: CommitPoint) -> None:
        """Drop all commits but the one to go on from. Before the first step the script's initial state stays
        in its place: every worker has that whole, so that the workers can begin again whoever is lost."""
        begins = (point.step, point.marks) == (INITIAL.step, INITIAL.marks)
        kept = (self.generation(INITIAL) if begins else None) or self.generation(point)
        self.generations = [kept] if kept is not None else []

    def enter(self, rank: int, nodes: Sequence[str], parts: Sequence[Part]) -> None:
        """Begin a world as ``rank``. ``nodes``, ``parts``: the node of each rank, and its part of the
        model."""
        self._parts, self._groups = parts, replicas(parts)
        self._guards = guardians(nodes, self.redundancy, self._groups)
        owners = [owner for owner, its in enumerate(self._guards) if rank in its]
        self._guarding = Guarding(self._guards[rank], self._copies_of(owners))
        self._there_are_copies = any(self._guards) or any(len(group) > 1 for group in self._groups)
        self._kinds = ()

    def _copies_of(self, owners: Iterable[int]) -> dict[int, Part]:
        return {owner: self._parts[owner]._replace(copy=True) for owner in owners}

    def leave(self) -> None:
        """Leave a world. Copies that have not arrived are lost."""
        if self._copies is not None:
            self.generations[-1].guarded = self._copies.arrived()
            self._copies = None
        self._complete = True  # what some workers lack is lost, and nobody waits for that

    def forget(self) -> None:
        """Keep no commit: the world cannot change, so no world will go back to one."""
        if self._copies is not None:
            self._copies.await_arrival()
            self._copies = None
        self._complete = True
        self.generations.clear()

    def keep(self, point: CommitPoint, kept: dict[str, Any], world: World) -> None:
        """Copy the present state as of a commit, and send this rank's shard to its guardians.

        Returns once all ranks have done so: no loss of up to ``redundancy`` workers undoes the commit. With
        ``overlap`` this holds for the commit before. ``kept``: see ``LastCommit``. Raises WorldChanged: the
        commit then counts only if all its parts are held.
        """
        self.complete(world)
        old = self.generations.pop(0) if len(self.generations) == GENERATIONS else None
        model, part, kinds = self.model, self._parts[world.rank], self.model.kinds()
        fits = old is not None and old.own.suits(kinds, part)
        own = old.own if old is not None and fits else HostShard(kinds, part, model.shapes)
        model.copy_to(own)
        self._begin(point, SmallState(kept, model.slots(), model.trainable), own, world, old)
        if not self.overlap:
            self.complete(world)

    def add(self, point: CommitPoint, small: SmallState, own: HostShard, world: World) -> None:
        """Keep the commit with which a world begins, and begin to send this rank's shard to its guardians.
        The next commit waits for these copies. All ranks call it together. Raises WorldChanged."""
        self._begin(point, small, own, world)

    def _begin(
        self,
        point: CommitPoint,
        small: SmallState,
        own: HostShard,
        world: World,
        old: Generation | None = None,
    ) -> None:
        """Keep a commit with this rank's shard, and begin to send the shard to its guardians. ``old``: a
        commit whose memory may be used again."""
        if own.kinds != self._kinds:
            self._kinds = own.kinds
            self._measure(self.model.expected_kinds(), world)
        latest = Generation(point, small, own, ranks=world.size)
        self.generations.append(latest)
        self._complete = False
        if any(self._guarding):
            with world.or_over():
                rooms = old.guarded if old is not None else {}
                self._copies = copy_to_guardians(own, self._guarding, self.model.shapes, rooms)

    def complete(self, world: World) -> None:
        """Wait until all ranks have the newest commit, and the copies of it. All ranks call it together.
        Raises WorldChanged."""
        if self._complete:
            return
        latest = self.generations[-1]
        if self._copies is not None:
            with world.or_over():
                latest.guarded = self._copies.await_arrival()
            self._copies = None
        if self._there_are_copies and not all_have(latest.point.step, world):
            raise RuntimeError("the workers commit different steps: call state.commit() on all workers")
        self._complete = True

    def hand_over(self, world: World) -> None:
        """Send the shards of workers that leave to workers that stay. All ranks call the method together,
        after the last commit of a world. Raises WorldChanged."""
        self.complete(world)
        going = [bool(goes) for [goes] in gathered([world.is_going], world)]
        found = heirs(going, self._guards, self._groups)
        if found:
            latest = self.generations[-1]
            to = [found[world.rank]] if world.rank in found else []
            owners = [owner for owner, heir in found.items() if heir == world.rank]
            given = Guarding(to, self._copies_of(owners))
            with world.or_over():
                copies = copy_to_guardians(latest.own, given, self.model.shapes, {})
                latest.take_over(copies.await_arrival().values())

    def _measure(self, kinds: Kinds, world: World) -> None:
        """Note how much memory the sharded state takes in this world, and say it if it has changed.
        ``kinds``: the tensors of the state."""
        shapes, part = self.model.shapes, self._parts[world.rank]
        self._replicated = size_of(kinds, shapes.uncut(part.cut))
        self._sharded = size_of(kinds, shapes.spans(WHOLE)) - self._replicated
        own = size_of(kinds, shapes.spans(part))
        guarded = sum(size_of(kinds, shapes.spans(its)) for its in self._guarding.guarded.values())
        sizes = ShardSizes(own, GENERATIONS * own, GENERATIONS * guarded)
        if sizes == self.sizes:
            return
        self.sizes = sizes
        agentpage.keeps_shards(sizes.shard, sizes.copies)
        if world.rank == 0:
            _log.info(
                "this worker has %s of the sharded state, and keeps %s of copies in the host's memory: %s of "
                "its own shard, and %s of other workers' (redundancy=%d)",
                *map(_megabytes, (sizes.shard, sizes.copies, sizes.of_own, sizes.of_others)),
                self.redundancy,
            )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def node() -> str:
    """Return a name of this worker's node, which workers of one node share."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()
