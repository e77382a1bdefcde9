"""Name stragglers: the leader writes its findings for all to see, and gives a reason for each change."""

from __future__ import annotations

from dataclasses import replace

from elasticd.core.facts import Laggard, Phase, Stragglers
from elasticd.core.leader.plan import Plan
from elasticd.core.leader.view import View
from elasticd.core.ports import Put
from elasticd.core.reasons import GpuRelieved, GpuStrained, Reason, SlotBad, WorkerKeepsUp, WorkerStraggling

CHANGED = 0.02  # the least relative change of the usual time that is written


def name_stragglers(view: View) -> Plan:
    """Write the stragglers if they differ from the record."""
    round, found = view.round, view.comparison.found
    if "stragglers" not in view.revisions or round is None or round.phase is not Phase.LIVE:
        return Plan()
    if found is None or found.round != round.number:
        return Plan()
    before = view.stragglers if view.stragglers and view.stragglers.round == round.number else None
    if before is not None and not view.comparison.whole:
        # An earlier leader wrote the record. This leader has not seen a full window yet.
        named = {_key(one) for one in found.slow}
        kept = (o for o in before.slow if _key(o) not in named and not o.strained)
        found = replace(found, slow=(*found.slow, *kept))
    if before is not None and not _differs(before, found):
        return Plan()
    return Plan(writes=(Put("stragglers", found, leased=True),), reasons=_said(before, found))


def _key(one: Laggard) -> tuple[str, int, str]:
    return one.node, one.slot, one.why


def _said(before: Stragglers | None, found: Stragglers) -> tuple[Reason, ...]:
    then = {_key(one): one for one in before.slow} if before is not None else {}
    now = {_key(one): one for one in found.slow}
    fresh = [named(one) for key, one in now.items() if key not in then]
    strained = {(one.node, one.slot) for one in found.slow if one.strained}
    over = [
        _cleared(one)
        for key, one in then.items()
        if key not in now and not (one.strained and (one.node, one.slot) in strained)
    ]
    return (*fresh, *over)


def named(one: Laggard) -> GpuStrained | SlotBad | WorkerStraggling:
    """Return the reason that names the straggler."""
    if one.strained:
        return GpuStrained(one.node, one.slot, one.rank, one.why)
    if one.why:
        return SlotBad(one.node, one.slot, one.rank, one.why)
    return WorkerStraggling(one.node, one.slot, one.rank, one.ratio)


def _cleared(one: Laggard) -> Reason:
    if one.strained:
        return GpuRelieved(one.node, one.slot, one.rank)
    return WorkerKeepsUp(one.node, one.slot, one.rank)


def _differs(one: Stragglers, other: Stragglers) -> bool:
    """Whether two findings differ enough for a write."""
    if {_key(x) for x in one.slow} != {_key(x) for x in other.slow}:
        return True
    return abs(one.usual_s - other.usual_s) > CHANGED * max(one.usual_s, other.usual_s)
