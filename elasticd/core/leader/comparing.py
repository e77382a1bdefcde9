"""Combine the paces of all nodes into periods in which every worker of the round is known."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from elasticd.core.facts import BadSlot, Laggard, Paces, Phase, Policy, Round, Stragglers
from elasticd.core.persistent_map import PersistentMap
from elasticd.core.straggler import PERIODS, Watch

LAGGARDS_MAX = 1000  # that a record names: 100 kB in etcd, and every agent reads it


@dataclass(frozen=True, slots=True)
class PaceComparison:
    """The paces of all nodes.

    ``paces``: the last report of each node. ``fresh``: how many of these reports are not in a period yet.
    ``taken``: the ``Paces.number`` of each node in the last period. ``found``: the stragglers of ``round``,
    as ``watch`` judges.
    """

    paces: PersistentMap[Paces] = field(default_factory=PersistentMap)
    round: int = 0
    fresh: int = 0
    taken: Mapping[str, int] = field(default_factory=dict)
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
    fresh = known.fresh - _is_fresh(known, before) + _is_fresh(known, paces)
    known = replace(known, paces=told, fresh=fresh)
    if round is None or round.phase is not Phase.LIVE or round.number != known.round:
        return known
    same_gpus = (before.bad if before is not None else ()) == (paces.bad if paces is not None else ())
    if same_gpus and known.fresh < len(round.members):
        return known
    return _compare(known, round)


def follow(known: PaceComparison, round: Round | None, policy: Policy) -> PaceComparison:
    """Return the comparison after news of the round. A new round starts without knowledge of its workers."""
    if round is None or round.phase is not Phase.LIVE or round.number == known.round:
        return known
    watch = Watch(limit=policy.straggler_ratio)
    known = PaceComparison(known.paces, round.number, watch=watch)
    told = known.paces.to_dict().values()
    fresh = sum([_is_fresh(known, paces) for paces in told if paces.round == round.number])
    return _compare(replace(known, fresh=fresh), round)


def _is_fresh(known: PaceComparison, paces: Paces | None) -> bool:
    if paces is None or paces.round != known.round or not paces.slots:
        return False
    return paces.number > known.taken.get(paces.node, 0)


def _compare(known: PaceComparison, round: Round) -> PaceComparison:
    """Return the comparison with one more period, if every member has reported it, and with its findings."""
    told = {node: paces for node, paces in known.paces.to_dict().items() if paces.round == round.number}
    both = [(member, told[member.node]) for member in round.members if member.node in told] if told else []
    heard = [(member, paces) for member, paces in both if paces.incarnation == member.incarnation]
    if len(heard) == len(round.members) and all(_is_fresh(known, paces) for _, paces in heard):
        known = replace(known, taken={member.node: paces.number for member, paces in heard}, fresh=0)
        if all(len(paces.slots) == len(member.slots) for member, paces in heard):
            own = [pace.own_s for _, paces in heard for pace in paces.slots]
            known = replace(known, watch=known.watch.see(own))
    bad = [(paces.node, one) for _, paces in heard for one in paces.bad]
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
