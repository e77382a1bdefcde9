"""Combine the paces of all nodes into periods in which every worker of the round is known."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain

from elasticd.core.facts import BadSlot, Laggard, Paces, Phase, Policy, Round, Stragglers
from elasticd.core.persistent_map import PersistentMap
from elasticd.core.straggler import PERIODS, Watch

LAGGARDS_MAX = 1000  # that a record names: 100 kB in etcd, and every agent reads it


@dataclass(frozen=True, slots=True)
class PaceComparison:
    """The paces of all nodes.

    ``paces``: the last report of each node. ``own``: the own times of the members of ``round`` that have
    reported since the last period, in the order of their slots. ``bad``: the last reports of members with bad
    slots. ``found``: the stragglers of ``round``, as ``watch`` judges.
    """

    paces: PersistentMap[Paces] = field(default_factory=PersistentMap)
    round: int = 0
    own: PersistentMap[tuple[float, ...]] = field(default_factory=PersistentMap)
    bad: PersistentMap[Paces] = field(default_factory=PersistentMap)
    watch: Watch = field(default_factory=Watch)
    found: Stragglers | None = None

    @property
    def whole(self) -> bool:
        """Whether the window is full. Before that, no straggler can be cleared."""
        return len(self.watch.periods) >= PERIODS


def hear(known: PaceComparison, node: str, paces: Paces | None, round: Round | None) -> PaceComparison:
    """Return the comparison after a node has reported ``paces`` (None: its record was deleted).

    Paces are compared only when a period is complete or the bad GPUs change. The work for one node's news
    thus does not grow with the number of nodes.
    """
    before = known.paces.get(node)
    told = known.paces.updated({node: paces})
    if round is None or round.number != known.round:
        return replace(known, paces=told)
    same_gpus = _bad(known.bad.get(node)) == _bad(mine := _of_member(round, paces))
    if mine is None or not mine.slots:
        own = known.own.updated({node: None})
    elif node in known.own or not _was_in_a_period(mine, before):
        own = known.own.updated({node: _own_times(mine)})
    else:
        own = known.own
    bad = known.bad if same_gpus else known.bad.updated({node: mine if _bad(mine) else None})
    known = replace(known, paces=told, own=own, bad=bad)
    if round.phase is not Phase.LIVE or (same_gpus and len(own) < len(round.members)):
        return known
    return _compare(known, round)


def follow(known: PaceComparison, round: Round | None, policy: Policy) -> PaceComparison:
    """Return the comparison after news of the round. A new round starts without knowledge of its workers."""
    if round is None or round.phase is not Phase.LIVE or round.number == known.round:
        return known
    told = [paces for paces in known.paces.values() if _of_member(round, paces)]
    own = PersistentMap({paces.node: _own_times(paces) for paces in told if paces.slots})
    bad = PersistentMap({paces.node: paces for paces in told if paces.bad})
    watch = Watch(limit=policy.straggler_ratio)
    return _compare(PaceComparison(known.paces, round.number, own, bad, watch), round)


def _of_member(round: Round, paces: Paces | None) -> Paces | None:
    """Return the paces if they are of a member of the round."""
    if paces is None or paces.round != round.number or not round.member(paces.node, paces.incarnation):
        return None
    return paces


def _was_in_a_period(paces: Paces, before: Paces | None) -> bool:
    """Whether the paces are no newer than ``before``, the node's last report, which a period has."""
    if before is None or (before.round, before.incarnation) != (paces.round, paces.incarnation):
        return False
    return paces.number <= before.number


def _own_times(paces: Paces) -> tuple[float, ...]:
    return tuple([pace.own_s for pace in paces.slots])


def _bad(paces: Paces | None) -> tuple[BadSlot, ...]:
    return paces.bad if paces is not None else ()


def _compare(known: PaceComparison, round: Round) -> PaceComparison:
    """Return the comparison with one more period, if every member has reported it, and with its findings."""
    if len(known.own) == len(round.members):
        times = list(map(known.own.to_dict().__getitem__, round.by_node))
        known = replace(known, own=PersistentMap())
        if list(map(len, times)) == [len(member.slots) for member in round.members]:
            known = replace(known, watch=known.watch.see(list(chain.from_iterable(times))))
    bad = [(paces.node, one) for paces in known.bad.values() for one in paces.bad]
    return replace(known, found=_found(known.watch, round, bad))


def _found(watch: Watch, round: Round, bad: Iterable[tuple[str, BadSlot]]) -> Stragglers | None:
    slow = [_laggard(round, rank, watch.ratio(rank)) for rank in watch.named]
    slow += [Laggard(node, one.slot, one.rank, 0.0, one.why, one.strained) for node, one in bad]
    if not slow and not watch.usual_s:
        return None
    slow.sort(key=lambda one: (not one.why, one.strained, one.rank))
    named = sorted(slow[:LAGGARDS_MAX], key=lambda one: one.rank)
    return Stragglers(round.number, watch.usual_s, tuple(named), len(slow[LAGGARDS_MAX:]))


def _laggard(round: Round, rank: int, ratio: float) -> Laggard:
    member = round.members[bisect_right(round.members, rank, key=lambda m: m.base_rank) - 1]
    return Laggard(member.node, member.slots[rank - member.base_rank], rank, int(ratio * 100 + 0.5) / 100)
