"""Exchange the state at the start of each round, from a worker with the newest state to the other workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticd.channel.worker_messages import Holds, Source
from elasticd.core.age import Age
from elasticd.worker.commit.committed import CommittedState
from elasticd.worker.commit.comparison import Digests
from elasticd.worker.joining.peer_memory import reach
from elasticd.worker.joining.transfer import Transfer, receive_snapshot, send_snapshot
from elasticd.worker.world.group import World, gathered

_HOLDS = tuple(Holds)
_NO_DIGESTS = Digests()

_NOT_WHOLE = (
    "a part of the script's initial state was overwritten, by a damaged checkpoint or by another worker's "
    "state of which the rest was lost, and nothing else can be loaded: remove the checkpoints if they are "
    "damaged, or have restore= load a state"
)


class StateLost(RuntimeError):
    """No worker has a whole state."""


@dataclass(frozen=True, slots=True)
class HeldState:
    """The state that a worker brings to a round, and its age (see ``Age``). ``marks``: the number of commits
    without a step, such as an epoch's end. ``reach``: see ``peer_memory.reach``."""

    holds: Holds
    agreed: int
    step: int
    marks: int = 0
    reach: int = 0
    digests: Digests = _NO_DIGESTS


def choose(standings: Sequence[HeldState]) -> Transfer:
    """Choose the most advanced state. Of several workers that have it, the lowest rank sends. If none has a
    state, the lowest rank whose initial state is intact sends this one."""
    ages = [(s.agreed, s.step, s.marks) if s.holds is Holds.WHOLE else None for s in standings]
    newest = max((age for age in ages if age is not None), default=None)
    if newest is None:
        source = next((rank for rank, s in enumerate(standings) if s.holds is Holds.NONE), 0)
        takers = tuple(rank for rank in range(len(standings)) if rank != source)
    else:
        source = ages.index(newest)
        takers = tuple(rank for rank, age in enumerate(ages) if age != newest)
    its = standings[source].reach
    readers = tuple(rank for rank in takers if its and standings[rank].reach == its)
    return Transfer(source, takers, fresh=newest is None, readers=readers)


def agree(state: CommittedState, world: World) -> Source:
    """Give all workers of the world the same state. Return where the state came from.

    Raises StateLost. Raises WorldChanged if the world ends first. This worker then has its old state, or a
    torn one if it was loading a checkpoint.
    """
    state.begin()
    standings = _standings(state, world)
    choice = choose(standings)
    digests = [each.digests for each in standings]
    if not choice.fresh:
        holders = [rank for rank in range(world.size) if rank not in choice.takers]
        state.comparison.compare(world, holders, digests)
    if len({each.began for each in digests}) > 1:
        joins = state.holds is Holds.NONE
        state.comparison.compare_beginnings(world, choice.source, fresh=choice.fresh, joins=joins)
    newest = standings[choice.source]
    age = Age(newest.agreed, newest.step)
    tier = ""
    if choice.fresh:
        tier = state.resume(world)
    elif state.has_newer(age, world):
        tier = state.resume(world, beyond=age)
    if tier:
        state.agree(world.number)
        return Source(tier)
    if choice.fresh:
        torn = [s.step for s in standings if s.holds is Holds.TORN and s.agreed]
        if torn and not state.can_restore:
            raise StateLost(_why_lost(max(torn)))
        if choice.source == world.rank and not state.restore():
            if torn:
                raise StateLost(_why_lost(max(torn)))
            if state.holds is Holds.TORN:
                raise StateLost(_NOT_WHOLE)
    if choice.takers:
        if world.rank == choice.source:
            with world.or_over():
                send_snapshot(state.snapshot(), choice)
        elif world.rank in choice.takers:
            in_place = state.holds is not Holds.WHOLE and not choice.fresh
            with world.or_over():
                snapshot = receive_snapshot(choice, world, state.overwritten if in_place else None)
            state.take(snapshot)
    state.agree(world.number)
    if choice.fresh:
        return Source.SCRIPT
    state.survived()
    return Source.SURVIVOR


def _why_lost(step: int) -> str:
    never = "; state.commit() was never called" if step == 0 else ""
    return (
        f"no worker has a whole state any more: after committed step {step} each was interrupted in an "
        "optimizer's step, in another change of weights or while it read a checkpoint, and could not undo "
        f"that{never}. Call state.commit() right after the optimizer's step, call no collective in between "
        "or while other weights are swapped in, or give State undo=True, which keeps a copy at each commit, "
        "or a restore= that loads a checkpoint"
    )


def _standings(state: CommittedState, world: World) -> list[HeldState]:
    """Return the state that each worker brings, by rank."""
    in_reach = reach() if all(p.device.type == "cpu" for p in state.contents.parameters()) else 0
    mine = [_HOLDS.index(state.holds), state.agreed, state.step, state.progress.marks, in_reach]
    heard = gathered([*mine, *state.comparison.digests()], world)
    return [
        HeldState(_HOLDS[holds], agreed, step, marks, its_reach, Digests(*digests))
        for holds, agreed, step, marks, its_reach, *digests in heard
    ]
