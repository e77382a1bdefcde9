"""Lay a sharded State out for a new world: agree on the commit to go on from, and move its parts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from elasticd.channel.worker_messages import Holds, Source
from elasticd.checkpoint.client.collectives import world_group
from elasticd.core.age import Age
from elasticd.core.page_layout import Fatal
from elasticd.worker.agent_link import agentpage
from elasticd.worker.commit.committed import CommittedState
from elasticd.worker.commit.comparison import Digests
from elasticd.worker.joining.exchange import StateLost
from elasticd.worker.joining.transfer import Transfer, receive_snapshot, send_snapshot
from elasticd.worker.sharding.held import INITIAL, CommitPoint, HeldShard, newest_whole_point, source_of
from elasticd.worker.sharding.host_shards import Generation, HostShard, SmallState, TensorKind, held_shards
from elasticd.worker.sharding.initial_values import Sums
from elasticd.worker.sharding.moves import MovePlan, plan_passing
from elasticd.worker.sharding.parts import NOTHING, Part, Shapes, missing, parts_of_ranks
from elasticd.worker.sharding.sharded_state import ShardedState, node
from elasticd.worker.sharding.transport import carry_out, carry_shards
from elasticd.worker.values.plaindata import number_of
from elasticd.worker.values.randomness import Sources
from elasticd.worker.world.group import World, all_have, gathered

_log = logging.getLogger(__name__)


class Bringing(NamedTuple):
    """What a worker brings to a round. ``shapes``: the digest of the shapes of the model's parameters.
    ``began``: the digest of the script's initial values. ``gives``: the worker is in a handover round to give
    what it has."""

    node: str
    shapes: int
    held: list[HeldShard]
    began: int = 0
    gives: bool = False


class _Choice(NamedTuple):
    """The commit to go on from. ``source``: the rank that sends what is not sharded, to the ranks ``takers``.
    ``held``: by rank, the shards of the commit that the rank has."""

    point: CommitPoint
    source: int
    takers: tuple[int, ...]
    held: list[list[HeldShard]]

    @property
    def transfer(self) -> Transfer:
        return Transfer(self.source, self.takers, fresh=self.point == INITIAL)


def agree_on_shards(state: CommittedState, shards: ShardedState, world: World) -> Source:
    """Give all workers of the world the same state, each its part. Return where the state came from.

    Raises StateLost. Raises WorldChanged if the world ends first; nothing that was held is lost then.
    """
    state.begin()
    brought = _brought(state, shards, world)
    point = newest_whole_point(shards.model.shapes, (its.held for its in brought))
    at_start = all((held.point.step, held.point.marks) == (0, 0) for its in brought for held in its.held)
    fresh = at_start and any(_has(its, INITIAL) for its in brought)
    source = next((rank for rank, its in enumerate(brought) if _has(its, point or INITIAL)), 0)
    if len({its.began for its in brought}) > 1:
        joins = state.holds is Holds.NONE
        state.comparison.compare_beginnings(world, source, fresh=fresh, joins=joins)
    if point is None:
        return _begin(state, shards, world, source, brought, fresh=fresh)
    return _continue(state, shards, world, _choice(point, brought), brought)


def pass_on(state: CommittedState, shards: ShardedState, world: World, *, gives: bool) -> Source:
    """Have the workers that leave give what they hold of the newest commit to workers that stay and lack it.

    Nobody trains. ``gives``: this worker leaves. Raises WorldChanged if the world ends first;
    nothing that was held is lost then.
    """
    state.begin()
    brought = _brought(state, shards, world, gives=gives)
    point = newest_whole_point(shards.model.shapes, (its.held for its in brought))
    if point is None:
        return Source.SCRIPT
    choice = _choice(point, brought)
    small = _small(state, shards, world, choice)
    passed = plan_passing(choice.held, point, [its.gives for its in brought])
    held = [shard for _, shard in held_shards(shards.generations)]
    with world.or_over():
        arrived = carry_shards(passed, choice.held, small.kinds, shards.model.shapes, held)
    mine = shards.generation(point)
    if mine is None:
        own = HostShard(small.kinds, NOTHING, shards.model.shapes)
        mine = Generation(point, small.state, own, ranks=world.size)
        shards.drop_all_but(point)
        shards.generations.append(mine)
        state.last.take(small.state.kept)
        state.step = point.step
        state.agree(point.round)
    mine.take_over(arrived)
    return Source.SURVIVOR


def _begin(
    state: CommittedState,
    shards: ShardedState,
    world: World,
    source: int,
    brought: Sequence[Bringing],
    *,
    fresh: bool,
) -> Source:
    """Begin from a checkpoint, or else with the initial state of the source's script. ``fresh``: no worker
    has committed anything."""
    lost = "" if fresh else _why_lost(shards.model.shapes, brought)
    if lost and world.rank == 0:
        _log.warning("%s", lost)
    tier = ""
    if state.saves is not None:
        shards.model.lay_out(shards.model.trainable, world.number)
        state.lay_out()
        tier = state.resume(world)
    if lost and not tier:
        raise StateLost(
            f"{lost}, and there is no checkpoint: give State redundancy=1 or more, or checkpoints"
        )
    if tier:
        _keep_loaded(state, shards, world, brought)
        return Source(tier)
    takers = tuple(rank for rank in range(world.size) if rank != source)
    held = [its.held if rank == source else [] for rank, its in enumerate(brought)]
    choice = _Choice(INITIAL, source, takers, held)
    _take(state, shards, world, choice, brought)
    state.agree(world.number)
    return Source.SCRIPT


def _continue(
    state: CommittedState, shards: ShardedState, world: World, choice: _Choice, brought: Sequence[Bringing]
) -> Source:
    """Go on from a commit that the workers hold, unless a newer state was saved elsewhere."""
    point = choice.point
    _take(state, shards, world, choice, brought)
    age = Age(point.round, point.step)
    if state.has_newer(age, world):
        if tier := state.resume(world, beyond=age):
            _keep_loaded(state, shards, world, brought)
            return Source(tier)
        latest = shards.generations[-1]  # the attempt may have overwritten the state
        shards.model.fill(latest.own, latest.small.slots)
        state.last.take(latest.small.kept)
    state.agree(world.number)
    state.survived()
    return source_of(shards.model.shapes, choice.held, point)


def _take(
    state: CommittedState, shards: ShardedState, world: World, choice: _Choice, brought: Sequence[Bringing]
) -> None:
    """Lay the model out for this world, and fill it with the chosen commit. Raises WorldChanged."""
    small = _small(state, shards, world, choice)
    shards.model.lay_out(small.state.trainable, world.number)
    state.lay_out()
    wanted = _wanted(shards, world)
    if choice.point == INITIAL and len({h.part for b in brought for h in b.held if h.point == INITIAL}) > 1:
        raise RuntimeError(
            "some workers have built the model on the meta device, and others have not: build it in the same "
            "way in each worker"
        )
    if choice.point == INITIAL and shards.model.makes_beginning:
        own = HostShard(shards.model.in_order(small.kinds), wanted[world.rank], shards.model.shapes)
        sums = shards.model.begin(own, small.random)
        _refuse_other_beginnings(shards.model.names, sums, world)
    else:
        own = _moved(shards, world, choice, small, wanted)
    shards.model.fill(own, small.state.slots)
    state.last.take(small.state.kept)
    state.step = choice.point.step
    shards.enter(world.rank, [its.node for its in brought], wanted)
    shards.drop_all_but(choice.point)
    _add(state, shards, world, SmallState(state.last.kept, small.state.slots, small.state.trainable), own)


def _refuse_other_beginnings(names: Sequence[str], sums: Sequence[Sums], world: World) -> None:
    """Raise RuntimeError if ``init=`` has given a parameter different values in different workers: the model
    would be a mixture. All workers call it together. ``names``: of the parameters."""
    values = torch.tensor([its.values for its in sums], dtype=torch.float64, device="cpu")
    slack = torch.tensor([its.slack for its in sums], dtype=torch.float64, device="cpu")
    most = torch.cat([values, -values, slack])
    with world.or_over():
        dist.all_reduce(most, dist.ReduceOp.MAX)
    largest, negated_least, slack = most.tensor_split(3)
    different = (largest + negated_least > slack).nonzero()
    if len(different):
        agentpage.fatal(Fatal.BAD_DATA)  # a restart would end the same way
        raise RuntimeError(
            f"init= gives {names[int(different[0])]} different values in different workers: draw them from "
            "torch's random numbers, without another seed, or read the same file in each worker"
        )


def _keep_loaded(
    state: CommittedState, shards: ShardedState, world: World, brought: Sequence[Bringing]
) -> None:
    """Keep the state that was loaded from a checkpoint. Raises WorldChanged."""
    shards.complete(world)  # copies of the commit that the loaded state replaces may be on their way
    model, wanted = shards.model, _wanted(shards, world)
    own = HostShard(model.kinds(), wanted[world.rank], model.shapes)
    model.copy_to(own)
    shards.enter(world.rank, [its.node for its in brought], wanted)
    shards.generations = shards.generations[-1:]
    _add(state, shards, world, SmallState(state.last.kept, model.slots(), model.trainable), own)
    state.agree(world.number)


def _add(
    state: CommittedState, shards: ShardedState, world: World, small: SmallState, own: HostShard
) -> None:
    shards.add(CommitPoint(world.number, state.step, state.progress.marks), small, own, world)
    heard = gathered(state.comparison.digests(), world)
    state.comparison.compare(world, range(world.size), [Digests(*each) for each in heard])


# ---------------------------------------------------------------- what the ranks have, and want


def _brought(
    state: CommittedState, shards: ShardedState, world: World, *, gives: bool = False
) -> list[Bringing]:
    """Return what each worker brings, by rank."""
    held = [shard for shard, _ in held_shards(shards.generations)]
    mine = Bringing(node(), shards.model.shapes.digest, held, state.comparison.digests().began, gives)
    with world.or_over():
        said = world_group().gather(msgspec.json.encode(mine))
    brought = [msgspec.json.decode(raw, type=Bringing) for raw in said]
    if len({its.shapes for its in brought}) > 1:
        agentpage.fatal(Fatal.BAD_DATA)  # a restart would end the same way
        raise RuntimeError("the workers have models with other parameters: build the same model in each")
    return brought


def _wanted(shards: ShardedState, world: World) -> list[Part]:
    """Return the part of the model that each rank has in this world. Raises RuntimeError if ``shard`` has cut
    the model in different ways."""
    mine = shards.model.part()
    wanted = parts_of_ranks(mine.cut, world.size)
    assert wanted[world.rank] == mine
    cut = number_of(blake2b(repr(mine.cut).encode(), digest_size=8))
    if not all_have(cut, world):
        agentpage.fatal(Fatal.BAD_DATA)
        raise RuntimeError(
            "shard= shards other parameters in some workers than in others: shard the same in each worker"
        )
    return wanted


def _choice(point: CommitPoint, brought: Sequence[Bringing]) -> _Choice:
    have = [_has(its, point) for its in brought]
    takers = tuple(rank for rank, has in enumerate(have) if not has)
    return _Choice(point, have.index(True), takers, [its.held for its in brought])


def _has(brought: Bringing, point: CommitPoint | None) -> bool:
    return any(held.point == point for held in brought.held)


def _why_lost(shapes: Shapes, brought: Sequence[Bringing]) -> str:
    """Say which part of which commit is lost. At least one rank holds something of a commit."""
    newest = max(held.point for its in brought for held in its.held)
    there = [held.part for its in brought for held in its.held if held.point == newest]
    lost, of = missing(shapes, there), sum(shapes.sizes)
    return (
        f"no worker has {lost} of the {of} parameters of step {newest.step} any more: more workers were lost "
        "than there are copies of a shard"
    )


# ---------------------------------------------------------------- the state


class _Small(NamedTuple):
    """What is not sharded of the chosen commit, the tensors that are, and the source's random numbers."""

    state: SmallState
    kinds: tuple[TensorKind, ...]
    random: Sources


def _small(state: CommittedState, shards: ShardedState, world: World, choice: _Choice) -> _Small:
    """Return what is not sharded of the chosen commit: this worker's own, or the source's. Raises
    WorldChanged."""
    mine = shards.generation(choice.point)
    if choice.takers and world.rank == choice.source:
        assert mine is not None
        with world.or_over():
            send_snapshot(_snapshot(state, mine), choice.transfer)
    if world.rank in choice.takers:
        with world.or_over():
            arrived = receive_snapshot(choice.transfer, world)
        state.refuse_other_optimizers(arrived)
        small = SmallState(state.kept_of(arrived), arrived["slots"], arrived["trainable"])
        kinds = tuple(TensorKind(*kind) for kind in arrived["kinds"])
        return _Small(small, kinds, arrived["kept"]["random"])
    assert mine is not None
    kept = mine.small.kept or state.last.kept
    small = SmallState(kept, mine.small.slots, mine.small.trainable)
    return _Small(small, mine.own.kinds, kept["random"])


def _snapshot(state: CommittedState, mine: Generation) -> dict[str, Any]:
    return {
        **state.snapshot_of(mine.small.kept or state.last.kept),
        "kinds": [tuple(kind) for kind in mine.own.kinds],
        "slots": mine.small.slots,
        "trainable": mine.small.trainable,
    }


def _moved(
    shards: ShardedState, world: World, choice: _Choice, small: _Small, wanted: Sequence[Part]
) -> HostShard:
    """Return this rank's part of the chosen commit, after all parts have moved. Raises WorldChanged."""
    model = shards.model
    own = HostShard(model.in_order(small.kinds), wanted[world.rank], model.shapes)
    held = [shard for _, shard in held_shards(shards.generations)]
    moves = MovePlan(model.shapes, choice.held, choice.point, wanted).of_rank(world.rank)
    with world.or_over():
        carry_out(moves, held, own)
    if world.rank == 0 and choice.point > INITIAL:
        arrived = sum(move.span.size for move in moves if move.sender != world.rank == move.receiver)
        _log.info(
            "step %d continues from the workers' memory: rank 0 has received %d of its %d parameters",
            choice.point.step,
            arrived,
            sum(span.size for span in own.spans),
        )
    return own
